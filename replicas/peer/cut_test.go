package peer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/stack"
)

// counters is a load that counts the issued and the acknowledged writes of each block: block b holds the number of its
// last write.
type counters struct {
	c              *cluster
	issued, acked  []atomic.Uint64
	stop           atomic.Bool
	wg             sync.WaitGroup
	failed, writes atomic.Int64
}

func newCounters(c *cluster) *counters {
	n := c.size / block.Size
	return &counters{c: c, issued: make([]atomic.Uint64, n), acked: make([]atomic.Uint64, n)}
}

func startCounters(c *cluster, writers int) *counters {
	w := newCounters(c)
	w.start(writers)
	return w
}

func (w *counters) start(writers int) {
	c, n := w.c, int64(len(w.issued))
	for i := range writers {
		w.wg.Add(1)
		go func() {
			defer w.wg.Done()
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			buf := block.AlignedBuffer(block.Size)
			for !w.stop.Load() {
				b := rng.Int64N(n/int64(writers))*int64(writers) + int64(i) // a block of this writer
				seq := w.issued[b].Load() + 1
				w.issued[b].Store(seq)
				binary.LittleEndian.PutUint64(buf, uint64(b))
				binary.LittleEndian.PutUint64(buf[8:], seq)
				err := Do(context.Background(), c.loop, c.e, &block.Request{Op: block.OpWrite, Off: b * block.Size,
					Len: block.Size, Buf: buf})
				if err != nil {
					w.failed.Add(1)
					return
				}
				w.acked[b].Store(seq)
				w.writes.Add(1)
			}
		}()
	}
}

func (w *counters) end() {
	w.stop.Store(true)
	w.wg.Wait()
}

func load(list []atomic.Uint64) []uint64 {
	out := make([]uint64, len(list))
	for i := range list {
		out[i] = list[i].Load()
	}
	return out
}

// instant is a reported snapshot, with the oldest and the newest write that each block may hold.
type instant struct {
	stack.Snapshot
	lo, hi []uint64
}

func newSnapshot(name string) stack.Snapshot {
	return stack.Snapshot{UID: string(api.NewUID()), Name: name, Created: time.Now().UTC()}
}

// take takes a snapshot under load.
func (w *counters) take(name string) (instant, error) { return w.cut(newSnapshot(name)) }

// surely takes a snapshot, and tries again while a busy machine is too slow.
func (w *counters) surely(one stack.Snapshot) instant {
	w.c.t.Helper()
	var s instant
	w.c.surely("snapshot "+one.Name, func() (err error) {
		one.Created = time.Now().UTC()
		s, err = w.cut(one)
		return err
	})
	return s
}

// surely repeats fn while a busy machine is too slow.
func (c *cluster) surely(what string, fn func() error) {
	c.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C {
		err := fn()
		if err == nil {
			return
		}
		if !api.Is(err, api.Busy) && !api.Is(err, api.Unavailable) || time.Since(began) > 3*time.Minute {
			c.t.Fatalf("%s: %v", what, err)
		}
		c.t.Logf("%s: %v", what, err)
	}
}

func (w *counters) cut(one stack.Snapshot) (instant, error) {
	s := instant{Snapshot: one, lo: load(w.acked)}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := w.c.e.Cut(ctx, s.Snapshot)
	s.hi = load(w.issued)
	return s, err
}

func (c *cluster) diskOf(uid string) *stack.Disk {
	for _, f := range c.far {
		if f.uid == uid {
			if err := f.s.Release(uid); err != nil {
				c.t.Fatal(err)
			}
			return f.disk
		}
	}
	return c.disk
}

// holds reads the content of a snapshot of a closed replica.
func (c *cluster) holds(replica string, s stack.Snapshot) []byte {
	c.t.Helper()
	disk := c.diskOf(replica)
	m, err := disk.Stack(replica)
	if err != nil {
		c.t.Fatal(err)
	}
	i := slices.IndexFunc(m.Snapshots, s.Same)
	if i < 0 {
		c.t.Fatalf("replica %s has no snapshot %s of %v: %v", replica, s.Name, s.Created, m.Snapshots)
	}
	chain, err := m.Chain(m.Snapshots[i].Layer)
	if err != nil {
		c.t.Fatal(err)
	}
	v, err := disk.OpenStack(chain, c.size)
	if err != nil {
		c.t.Fatal(err)
	}
	defer v.Close()
	b := make([]byte, c.size)
	if _, err := v.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		c.t.Fatal(err)
	}
	return b
}

// verify compares a snapshot's content on all members, and with the writes. The engine is closed.
func (c *cluster) verify(s instant) {
	c.t.Helper()
	_, members := c.rec.state()
	var first []byte
	for i, uid := range members {
		have := c.holds(uid, s.Snapshot)
		if i == 0 {
			first = have
		} else if !bytes.Equal(have, first) {
			c.t.Errorf("snapshot %s differs on member %s", s.Name, uid)
		}
		for b := range s.lo {
			seq := binary.LittleEndian.Uint64(have[b*block.Size+8:])
			if seq < s.lo[b] || seq > s.hi[b] {
				c.t.Fatalf("snapshot %s on member %s: block %d holds write %d, %d was acknowledged before and %d was the last "+
					"that was issued", s.Name, uid, b, seq, s.lo[b], s.hi[b])
			}
		}
	}
}

// same compares the whole replicas, and the snapshots by UID and time.
func (c *cluster) same() {
	c.t.Helper()
	_, members := c.rec.state()
	first := c.content(members[0])
	var names []string
	for i, uid := range members {
		m, err := c.diskOf(uid).Stack(uid)
		if err != nil {
			c.t.Fatal(err)
		}
		var have []string
		for _, s := range m.Snapshots {
			have = append(have, s.UID+s.Created.String())
		}
		slices.Sort(have)
		if i == 0 {
			names = have
			continue
		}
		if !slices.Equal(have, names) {
			c.t.Errorf("members have different snapshots: %v and %v", have, names)
		}
		if !bytes.Equal(c.content(uid), first) {
			c.t.Errorf("member %s differs", uid)
		}
	}
}

// TestCut takes snapshots of three members under load.
func TestCut(t *testing.T) {
	suite.Slow(t)
	const size = 16 << 20
	c := newCluster(t, size, 2, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	w := startCounters(c, 8)
	var list []instant
	var worst time.Duration
	for i := range 20 {
		began := time.Now()
		s := w.surely(newSnapshot("s" + strconv.Itoa(i)))
		worst = max(worst, time.Since(began))
		list = append(list, s)
	}
	w.end()
	if n := w.failed.Load(); n > 0 {
		t.Errorf("%d writes failed", n)
	}
	t.Logf("%d writes, %d snapshots, the slowest took %v", w.writes.Load(), len(list), worst)
	if err := c.e.DropSnapshot(t.Context(), list[3].UID); err != nil {
		t.Fatal(err)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	for i, s := range list {
		if i != 3 {
			c.verify(s)
		}
	}
	c.same()
	if _, members := c.rec.state(); len(members) != 3 {
		t.Errorf("members %v", members)
	}
}

// TestCutSteps ends the engine at each step of a cut. The next engine finds the snapshot on all members or on no
// member, and a second try of the same snapshot succeeds.
func TestCutSteps(t *testing.T) {
	suite.Slow(t)
	const size = 16 << 20
	for _, step := range []string{"prepared", "held", "one sealed", "two sealed", "all sealed"} {
		t.Run(step, func(t *testing.T) {
			c := newCluster(t, size, 2, true)
			if err := c.attach(); err != nil {
				t.Fatal(err)
			}
			w := startCounters(c, 4)
			w.surely(newSnapshot("before"))
			w.end()
			s := newSnapshot("s")
			if step == "prepared" || step == "held" {
				cut, err := c.e.PrepareCut(t.Context(), s)
				if err == nil && step == "held" {
					err = cut.Hold(t.Context())
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			n := map[string]int{"one sealed": 1, "two sealed": 2, "all sealed": 3}[step]
			for _, m := range c.members[:n] {
				one := s
				one.Layer = string(api.NewUID())
				x := m.Member.(engine.Cutter)
				if err := x.PrepareCut(t.Context(), one); err != nil {
					t.Fatal(err)
				}
				if err := x.DoCut(t.Context(), one.Layer); err != nil {
					t.Fatal(err)
				}
			}
			if err := c.e.Close(); err != nil {
				t.Fatal(err)
			}
			if err := c.attach(); err != nil {
				t.Fatal(err)
			}
			st, err := c.e.Snapshots(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if has := slices.ContainsFunc(st.Snapshots, s.Same); has != (n == 3) {
				t.Errorf("the snapshot is there: %v", has)
			}
			again := newCounters(c)
			for i := range again.issued { // continues after the former writes
				again.issued[i].Store(w.issued[i].Load())
				again.acked[i].Store(w.acked[i].Load())
			}
			again.start(4)
			list := []instant{}
			if n < 3 {
				list = append(list, again.surely(s))
			}
			again.end()
			if err := c.e.Close(); err != nil {
				t.Fatal(err)
			}
			for _, s := range list {
				c.verify(s)
			}
			c.same()
		})
	}
}

// TestLayersReturn: a replica is away while snapshots are taken and deleted, and returns with the same snapshots as the
// other members. A new replica gets all snapshots, too.
func TestLayersReturn(t *testing.T) {
	suite.Slow(t)
	const size = 32 << 20
	c := newCluster(t, size, 2, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	w := startCounters(c, 4)
	var list []instant
	take := func(name string) {
		t.Helper()
		list = append(list, w.surely(newSnapshot(name)))
	}
	take("a")
	take("b")
	f := c.far[0]
	f.stop()
	c.proxy[0].cut()
	c.drop(f.uid)
	take("c")
	take("d")
	if err := c.e.DropSnapshot(t.Context(), list[0].UID); err != nil {
		t.Fatal(err)
	}
	if err := c.e.SealAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	list = list[1:]
	f.start()
	p, err := c.back(f.uid)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("back: %+v", p)
	take("e")
	w.end()
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		c.verify(s)
	}
	c.same()

	// A replica is lost, and a new replica takes its place.
	if err := f.s.Release(f.uid); err != nil {
		t.Fatal(err)
	}
	if err := f.disk.RemoveReplica(f.uid); err != nil {
		t.Fatal(err)
	}
	if err := f.disk.CreateReplica(t.Context(), stack.Spec{UID: f.uid, Volume: "v", VolumeUID: f.volume,
		Size: size}); err != nil {
		t.Fatal(err)
	}
	c.rec.members = slices.DeleteFunc(c.rec.members, func(m string) bool { return m == f.uid })
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	if p, err = c.back(f.uid); err != nil {
		t.Fatal(err)
	}
	if t.Logf("new: %+v", p); !p.Full {
		t.Error("a new replica was compared by intents")
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		c.verify(s)
	}
	c.same()
}

// cutFaults takes snapshots while replicas die, hang, are cut off and come back.
func cutFaults(t *testing.T, seed uint64) {
	const size = 16 << 20
	c := newCluster(t, size, 2, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	c.stalls.set(400*time.Millisecond, 2*time.Second) // abandoned members rejoin
	rng := rand.New(rand.NewPCG(seed, 17))
	w := startCounters(c, 6)
	all := slices.Clone(c.rec.members)
	var list []instant
	var dropped []string // perhaps still on some members
	for round := range 6 {
		k, what, wait := rng.IntN(2), rng.IntN(4), time.Duration(rng.IntN(40))*time.Millisecond
		undo := make(chan struct{})
		go func() {
			defer close(undo)
			timer := time.NewTimer(wait)
			<-timer.C
			switch what {
			case 0:
				c.proxy[k].cut()
			case 1:
				c.far[k].stop()
				c.proxy[k].cut()
				c.far[k].start()
			case 2:
				c.far[k].stop()
				c.proxy[k].cut()
				timer.Reset(time.Second)
				<-timer.C
				c.far[k].start()
			case 3:
				c.proxy[k].freeze(true)
				timer.Reset(900 * time.Millisecond)
				<-timer.C
				c.proxy[k].freeze(false)
			}
		}()
		for i := range 3 {
			s, err := w.take(strconv.Itoa(round) + "." + strconv.Itoa(i))
			if err == nil {
				list = append(list, s)
			} else {
				t.Logf("seed %d: snapshot %s: %v", seed, s.Name, err)
			}
		}
		<-undo
		if len(list) > 4 && rng.IntN(2) == 0 {
			i := rng.IntN(len(list))
			if err := c.e.DropSnapshot(t.Context(), list[i].UID); err != nil {
				dropped = append(dropped, list[i].UID)
			}
			list = slices.Delete(list, i, i+1)
		}
		_, members := c.rec.state()
		for _, uid := range all {
			if !slices.Contains(members, uid) {
				if _, err := c.back(uid); err != nil {
					t.Logf("seed %d: %v", seed, err)
				}
			}
		}
		now, members := c.rec.state()
		c.e.SetWhole(now, len(members) == len(all))
	}
	c.stalls.set(endless, endless)
	for deadline := time.Now().Add(5 * time.Minute); ; {
		_, members := c.rec.state()
		if len(members) == len(all) {
			break
		}
		for _, uid := range all {
			if !slices.Contains(members, uid) {
				if _, err := c.back(uid); err != nil && time.Now().After(deadline) {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
		}
	}
	for _, uid := range dropped {
		c.surely("snapshot that was dropped", func() error { return c.e.DropSnapshot(t.Context(), uid) })
	}
	w.end()
	if n := w.failed.Load(); n > 0 {
		t.Errorf("%d writes failed", n)
	}
	// All members are connected again: only then the end can be clean.
	if err := Do(t.Context(), c.loop, c.e, &block.Request{Op: block.OpFlush}); err != nil {
		t.Errorf("seed %d: %v", seed, err)
	}
	if err := c.e.Close(); err != nil {
		t.Errorf("seed %d: %v", seed, err)
	}
	for _, s := range list {
		c.verify(s)
	}
	c.same()
	t.Logf("%d writes, %d snapshots", w.writes.Load(), len(list))
}

// TestCutFaults runs a few random schedules; DROVER_FAULTS sets the number, DROVER_SEED selects a single schedule.
func TestCutFaults(t *testing.T) {
	suite.Slow(t)
	for seed := range suite.Seeds(t, suite.Count(t, "DROVER_FAULTS", 1, 50)) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { cutFaults(t, seed) })
	}
}

// finish finishes the layers of all members.
func (c *cluster) finish() {
	c.t.Helper()
	all := []*stack.Disk{c.disk}
	for _, f := range c.far {
		all = append(all, f.disk)
	}
	for _, disk := range all {
		list, err := disk.ToFinish()
		if err != nil {
			c.t.Fatal(err)
		}
		for _, uid := range list {
			if err := disk.Finish(c.t.Context(), uid); err != nil {
				c.t.Fatal(err)
			}
		}
	}
}

// TestCompare finds a block with other content on one member.
func TestCompare(t *testing.T) {
	c := newCluster(t, 16<<20, 2, true)
	if err := c.attach(); err != nil {
		t.Fatal(err)
	}
	w := startCounters(c, 4)
	one, err := w.take("one")
	if err != nil {
		t.Fatal(err)
	}
	two, err := w.take("two")
	w.end()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.e.Compare(t.Context(), one.UID, 0); !api.Is(err, api.Unavailable) {
		t.Errorf("a snapshot whose layers are not finished: %v", err)
	}
	c.finish()
	for _, s := range []string{one.UID, two.UID} {
		if err := c.e.Compare(t.Context(), s, 0); err != nil {
			t.Errorf("snapshots of equal members: %v", err)
		}
	}
	buf := block.AlignedBuffer(block.Size)
	buf[7] = 1
	if err := Do(t.Context(), c.loop, c.members[1].Member, &block.Request{Op: block.OpWrite, Off: 5 << 20, Len: block.Size,
		Buf: buf}); err != nil {
		t.Fatal(err)
	}
	three := newSnapshot("three")
	if err := c.e.Cut(t.Context(), three); err != nil {
		t.Fatal(err)
	}
	c.finish()
	if err := c.e.Compare(t.Context(), three.UID, 0); !api.Is(err, api.Corrupt) {
		t.Errorf("a member differs, and the comparison says %v", err)
	}
	if err := c.e.Close(); err != nil {
		t.Fatal(err)
	}
}
