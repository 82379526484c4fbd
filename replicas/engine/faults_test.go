package engine

import (
	"bytes"
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack"
)

// TestFaults plays a guest against members that break, come back, fill up and join, beside an API that loses answers.
// Every acknowledged write is, at the moment of the acknowledgement, on every member that the API records. No I/O fails
// or hangs. In the end all members hold exactly the written content. DROVER_FAULTS sets the number of schedules,
// DROVER_SEED repeats one schedule.
func TestFaults(t *testing.T) {
	n := suite.Count(t, "DROVER_FAULTS", 30, 500)
	stalls, taken, missing, grown := 0, 0, 0, int64(0)
	defer func() {
		t.Logf("%d schedules: %d replicas were abandoned, %d were missing at the open, %d snapshots, %d expansions",
			n, stalls, missing, taken, grown)
	}()
	for seed := range suite.Seeds(t, n) {
		synctest.Test(t, func(t *testing.T) {
			w := newFaulty(t, seed)
			w.play()
			stalls, taken, missing = stalls+w.stalls, taken+len(w.taken), missing+len(w.e.Missing())
			grown += (w.size - faultySize) / (64 << 10)
		})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// replica is a faulty member.
type replica struct {
	w    *faulty
	name string

	mu      sync.Mutex
	data    []byte
	away    bool
	full    bool
	tracks  bool
	hung    chan struct{} // closed when the disk answers again; nil: the disk does not hang
	pending []*block.Request
	far     *farReplica // nil: on the engine's node

	snaps    []snapped
	prepared *stack.Snapshot
}

// faulty has an engine, its members and its API. Time is the bubble's.
type faulty struct {
	t     *testing.T
	seed  uint64
	l     *testLoop
	e     *Engine
	model []byte

	mu      sync.Mutex
	rng     *rand.Rand
	epoch   int64 // the API's record
	members []string
	lossy   bool // answers of the API get lost
	all     map[string]*replica
	joins   sync.WaitGroup
	joining int
	alone   *replica // the only member of an engine for a single member; nil: the engine takes more members
	watch   *Watch
	size    int64 // size after the last expansion
	growing bool
	cutting bool
	cuts    int
	taken   []stack.Snapshot // reported cuts
	stalls  int              // number of abandoned replicas
	bufs    [][]byte         // of answered requests, without buffers that a hanging disk still uses. Loop thread
}

// memory of a request. Loop thread.
func (w *faulty) memory(n int, b byte) []byte {
	if k := len(w.bufs); k > 0 {
		buf := w.bufs[k-1][:n]
		w.bufs = w.bufs[:k-1]
		for i := range buf {
			buf[i] = b
		}
		return buf
	}
	return fill(64<<10, b)[:n]
}

const faultySize = 128 << 10

func (w *faulty) chance(n int) bool { return w.pick(n) == 0 }

func (w *faulty) pick(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rng.IntN(n)
}

func newFaulty(t *testing.T, seed uint64) *faulty {
	w := &faulty{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 77)), l: newLoop(t), epoch: 5,
		model: make([]byte, faultySize), size: faultySize, all: map[string]*replica{}, watch: NewWatch()}
	n := 1 + w.pick(3)
	cfg := Config{Loop: w.l, Size: faultySize, Epoch: 5, Incarnation: 1, Track: true, Lenient: true, Drop: w.drop, Add: w.add,
		OnFence: func(err error) { t.Errorf("seed %d: fenced: %v", seed, err) }}
	if seed%3 == 0 { // a volume with one replica, which gets more replicas
		w.alone = w.replica("a")
		w.members, n, cfg.Track = []string{"a"}, 0, false
		cfg.Members = []Named{{Name: "a", Local: true, Member: w.member(w.alone, true)}}
	}
	for i := range n {
		r := w.replica(string(rune('a' + i)))
		w.members = append(w.members, r.name)
		m := Named{Name: r.name, Local: i == 0 && seed%2 == 0}
		m.Member = w.member(r, m.Local)
		cfg.Members = append(cfg.Members, m)
	}
	if n > 1 && seed%2 == 1 {
		cfg.Resync = true
		w.unlike()
	}
	w.open(cfg)
	return w
}

// member is a replica of the engine's node, or of another node.
func (w *faulty) member(r *replica, near bool) Member {
	on := Cutter(r)
	if !near {
		r.mu.Lock()
		r.far = &farReplica{replica: r, asked: map[*block.Request]bool{}}
		on = r.far
		r.mu.Unlock()
	}
	return w.watch.Member(on, WatchOptions{Loop: w.l, Replica: r.name,
		Timeout: func() StallTimeout { return StallTimeout{watchTick, 2 * watchTick} }, OnStall: func(why error) {
			w.mu.Lock()
			w.stalls++
			e := w.e
			w.mu.Unlock()
			if e != nil {
				e.Suspect(r.name, why)
			}
		}})
}

func (w *faulty) replica(name string) *replica {
	r := &replica{w: w, name: name, data: make([]byte, faultySize)}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all[name] = r
	return r
}

// outcome answers a swap. The API has made the swap even if the answer is lost.
func (w *faulty) outcome() error {
	if w.lossy && w.rng.IntN(2) == 0 {
		return api.Errorf(api.Unavailable, "the answer is lost")
	}
	return nil
}

func (w *faulty) drop(_ context.Context, epoch int64, name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lossy && w.rng.IntN(3) == 0 {
		return api.Errorf(api.Unavailable, "the API is away")
	}
	i := slices.Index(w.members, name)
	switch {
	case w.epoch == epoch+1 && i < 0:
		return nil
	case w.epoch != epoch || i < 0 || len(w.members) == 1:
		w.t.Errorf("seed %d: drop of %s in epoch %d, the record is %d %v", w.seed, name, epoch, w.epoch, w.members)
		return api.Errorf(api.Denied, "no")
	}
	w.members = slices.Delete(slices.Clone(w.members), i, i+1)
	w.epoch++
	return w.outcome()
}

func (w *faulty) add(_ context.Context, epoch int64, name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	there := slices.Contains(w.members, name)
	switch {
	case w.epoch == epoch+1 && there:
		return nil
	case w.epoch != epoch || there:
		w.t.Errorf("seed %d: add of %s in epoch %d, the record is %d %v", w.seed, name, epoch, w.epoch, w.members)
		return api.Errorf(api.Denied, "no")
	case w.rng.IntN(8) == 0:
		return api.Errorf(api.NotFound, "it is being removed")
	case w.lossy && w.rng.IntN(3) == 0:
		return api.Errorf(api.Unavailable, "the API is away")
	}
	w.members = append(slices.Clone(w.members), name)
	w.epoch++
	return w.outcome()
}

// Submit implements block.Submitter.
func (r *replica) Submit(q *block.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending = append(r.pending, q)
}

// answer answers a waiting request. Loop thread.
func (r *replica) answer(i int) {
	r.mu.Lock()
	q := r.pending[i]
	r.pending = append(r.pending[:i:i], r.pending[i+1:]...)
	q.Err = nil
	switch {
	case r.away:
		q.Err = errAway
	case r.full && (q.Op == block.OpWrite || q.Op == block.OpZero):
		q.Err = syscall.ENOSPC
	case q.Op == block.OpRead:
		copy(q.Buf, r.data[q.Off:])
	case q.Op == block.OpWrite:
		copy(r.data[q.Off:], q.Buf)
	case q.Op == block.OpZero || q.Op == block.OpDiscard:
		clear(r.data[q.Off : q.Off+q.Len])
	}
	r.mu.Unlock()
	q.Done(q)
}

func (r *replica) reach(ctx context.Context) error {
	time.Sleep(time.Duration(1+r.w.pick(5)) * time.Millisecond)
	r.mu.Lock()
	if hung := r.hung; hung != nil {
		far := r.far != nil
		r.mu.Unlock()
		if !far {
			ctx = context.Background() // a disk ignores the context
		}
		select {
		case <-hung:
		case <-ctx.Done():
			return ctx.Err()
		}
		r.mu.Lock()
	}
	defer r.mu.Unlock()
	if r.away {
		return errAway
	}
	return nil
}

func (r *replica) Adopt(ctx context.Context, _, _ int64, _ []string) error { return r.reach(ctx) }
func (r *replica) Expand(ctx context.Context, size int64) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.data = append(r.data, make([]byte, max(0, size-int64(len(r.data))))...)
	return nil
}
func (r *replica) Close() error { return nil }
func (r *replica) Track(_ context.Context, on bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tracks = on
	return nil
}
func (r *replica) Intend(context.Context, []int64) error              { return nil }
func (r *replica) Unnoted(ctx context.Context, _ int64) error         { return r.reach(ctx) }
func (r *replica) Mark(ctx context.Context, _ int64) error            { return r.reach(ctx) }
func (r *replica) Clean(context.Context, int64, int64, []int64) error { return nil }
func (r *replica) Intents(ctx context.Context) (stack.Intents, error) {
	return stack.Intents{Region: 64 << 10, Joined: 1, Regions: []int64{0, 1, 2, 3}}, r.reach(ctx)
}

func (r *replica) Digests(ctx context.Context, off, n int64) ([]byte, error) {
	if err := r.reach(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return sums(r.data, off, n), nil
}

// join has a new replica join.
func (w *faulty) join() {
	w.mu.Lock()
	if w.joining > 0 {
		w.mu.Unlock()
		return
	}
	w.joining++
	w.mu.Unlock()
	w.joins.Go(func() {
		defer func() {
			w.mu.Lock()
			w.joining--
			w.mu.Unlock()
		}()
		if alone := w.alone; alone != nil {
			if err := w.e.NoteIntents(w.t.Context()); err != nil {
				return // the next join tries again
			}
			w.alone = nil
		}
		r := w.replica("j" + strconv.Itoa(w.pick(1<<30)))
		for i := range r.data {
			r.data[i] = 0xdd // of another time
		}
		n := Named{Name: r.name, Member: w.member(r, w.chance(3))}
		if _, err := w.e.Join(w.t.Context(), n, JoinOptions{}); err != nil {
			_ = n.Member.Close()
		}
	})
}

// fault breaks or repairs something.
func (w *faulty) fault() {
	w.mu.Lock()
	names := make([]string, 0, len(w.all))
	for name := range w.all {
		names = append(names, name)
	}
	slices.Sort(names)
	w.mu.Unlock()
	r := w.all[names[w.pick(len(names))]]
	switch w.pick(8) {
	case 6, 7:
		r.mu.Lock()
		if r.hung == nil {
			r.hung = make(chan struct{})
		}
		r.mu.Unlock()
	case 0, 1:
		r.goAway(func(is bool) bool { return !is })
	case 2:
		r.mu.Lock()
		r.full = !r.full
		r.mu.Unlock()
	case 3, 4:
		w.join()
	case 5:
		w.mu.Lock()
		w.lossy = !w.lossy
		w.mu.Unlock()
	}
}

// heal mends all.
func (w *faulty) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lossy = false
	for _, r := range w.all {
		r.goAway(func(bool) bool { return false })
		r.mu.Lock()
		r.full = false
		if r.hung != nil {
			close(r.hung)
			r.hung = nil
		}
		r.mu.Unlock()
	}
}

// recorded are the members in the API's record.
func (w *faulty) recorded() (list []*replica) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range w.members {
		list = append(list, w.all[name])
	}
	return list
}

// submit starts a request of the guest which overlaps no request in progress. Loop thread.
func (w *faulty) submit(busy map[int64]bool) {
	const sector = 512
	from := int64(w.pick(faultySize/sector - 1))
	to := min(from+1+int64(w.pick([]int{2, 16, 64}[w.pick(3)])), faultySize/sector)
	kind := []block.Op{block.OpRead, block.OpWrite, block.OpWrite, block.OpWrite, block.OpZero, block.OpFlush}[w.pick(6)]
	for s := from; s < to; s++ {
		if busy[s] {
			return
		}
	}
	q := &block.Request{Op: kind, Off: from * sector, Len: (to - from) * sector}
	switch kind {
	case block.OpFlush:
		q.Off, q.Len = 0, 0
	case block.OpRead:
		q.Buf = w.memory(int(q.Len), 0xee)
	case block.OpWrite:
		q.Buf = w.memory(int(q.Len), byte(1+w.pick(250)))
	}
	if kind == block.OpFlush {
		to = from + 1
	}
	for s := from; s < to; s++ {
		busy[s] = true
	}
	mine := q.Buf
	q.Done = func(q *block.Request) {
		if mine != nil {
			if q.Lease.Released() {
				w.bufs = append(w.bufs, mine[:cap(mine)])
			} else {
				q.Lease.OnRelease(func() { w.bufs = append(w.bufs, mine[:cap(mine)]) })
			}
		}
		for s := from; s < to; s++ {
			delete(busy, s)
		}
		at := w.model[q.Off : q.Off+q.Len]
		switch {
		case q.Err != nil:
			w.t.Errorf("seed %d: op %d at %d+%d: %v", w.seed, q.Op, q.Off, q.Len, q.Err)
		case q.Op == block.OpRead && !bytes.Equal(at, q.Buf):
			w.t.Errorf("seed %d: read of %d+%d is not what was written", w.seed, q.Off, q.Len)
		case q.Op == block.OpWrite:
			copy(at, q.Buf)
		case q.Op == block.OpZero:
			clear(at)
		}
		if q.Err != nil || q.Op != block.OpWrite && q.Op != block.OpZero {
			return
		}
		several := len(w.recorded()) > 1
		for _, r := range w.recorded() {
			r.mu.Lock()
			if !bytes.Equal(r.data[q.Off:q.Off+q.Len], at) {
				w.t.Errorf("seed %d: op %d at %d+%d is acknowledged, and member %s does not have it", w.seed, q.Op, q.Off, q.Len,
					r.name)
			}
			if !r.tracks && several {
				w.t.Errorf("seed %d: op %d at %d+%d is acknowledged, and member %s has not noted it", w.seed, q.Op, q.Off, q.Len,
					r.name)
			}
			r.mu.Unlock()
		}
	}
	w.e.Submit(q)
}

// answers lets members answer, in any order. Loop thread.
func (w *faulty) answers(n int) {
	w.mu.Lock()
	var list []*replica
	for _, r := range w.all {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *replica) int { return bytes.Compare([]byte(a.name), []byte(b.name)) })
	w.mu.Unlock()
	for range n {
		r := list[w.pick(len(list))]
		r.mu.Lock()
		k := len(r.pending)
		if r.hung != nil {
			k = 0
		}
		r.mu.Unlock()
		if k > 0 {
			r.answer(w.pick(k))
		}
	}
}

func (w *faulty) play() {
	busy := map[int64]bool{} // loop thread
	for step := range 2000 {
		if w.chance(40) {
			w.fault()
		}
		if w.chance(300) {
			w.heal()
		}
		if w.chance(150) {
			w.cut()
		}
		if w.chance(400) {
			w.grow()
		}
		w.l.do(func() {
			if len(busy) < 200 {
				w.submit(busy)
			}
			w.answers(w.pick(12))
		})
		if step%8 == 0 {
			w.e.Retry()
		}
		time.Sleep(time.Millisecond)
	}
	joined := make(chan struct{})
	go func() { w.joins.Wait(); close(joined) }()
	left, end := 1, time.Now().Add(10*time.Minute)
	for ; left > 0 || joined != nil; time.Sleep(time.Millisecond) {
		w.heal()
		w.e.Retry()
		w.l.do(func() {
			w.answers(40)
			left = w.e.inflight + len(w.e.stalled.list)
			if w.e.dropping || w.e.suspect != 0 {
				left++
			}
		})
		select {
		case <-joined:
			joined = nil
		default:
		}
		if time.Now().After(end) {
			w.t.Fatalf("seed %d: %d operations hang", w.seed, left)
		}
	}
	w.l.do(func() {
		names := w.e.memberNames(w.e.members)
		slices.Sort(names)
		var want []string
		for _, r := range w.recorded() {
			want = append(want, r.name)
			if !bytes.Equal(r.data[:faultySize], w.model) {
				i := 0
				for r.data[i] == w.model[i] {
					i++
				}
				w.t.Errorf("seed %d: member %s differs at %d from what was written: %#x, want %#x", w.seed, r.name, i, r.data[i],
					w.model[i])
			}
		}
		w.sameSnapshots()
		slices.Sort(want)
		if !slices.Equal(names, want) || w.e.epoch != w.epoch {
			w.t.Errorf("seed %d: the engine is at %d %v, the API at %d %v", w.seed, w.e.epoch, names, w.epoch, want)
		}
	})
	closed := make(chan struct{})
	go func() { // Close waits for the last flushes
		defer close(closed)
		_ = w.e.Close()
	}()
	for done := false; !done; time.Sleep(time.Millisecond) {
		w.l.do(func() { w.answers(20) })
		select {
		case <-closed:
			done = true
		default:
		}
	}
	for w.watch.Waits() > 0 { // hanging requests have answers by now, or get them here
		w.l.do(func() { w.answers(20) })
		time.Sleep(time.Millisecond)
	}
	w.watch.Close()
}
