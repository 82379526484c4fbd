package restoring

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
)

// begin restores in the background.
func (w *world) begin(f *Fill) (ended chan error) {
	ended = make(chan error, 1)
	go func() {
		_, err := w.restore(f)
		ended <- err
	}()
	return ended
}

// awaitIdle waits until the restore waits for the store, and returns why.
func (w *world) awaitIdle(ended chan error) string {
	w.t.Helper()
	for {
		if why, idle := w.l.Problem(); idle {
			return why
		}
		select {
		case err := <-ended:
			w.t.Fatalf("the restore ends with %v", err)
		default:
			runtime.Gosched()
		}
	}
}

// TestDamagedChunk: the read of a damaged chunk fails and names the chunk, other reads do not. The restore writes all
// other chunks, which need no store then, names the damaged ones, and has them after a heal. With allow-damaged the layer
// has zeros in place of the damaged chunks.
func TestDamagedChunk(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(6*chunk))
	w.damaged[2], w.damaged[4] = true, true
	w.plan()
	src := w.source()
	for range 2 {
		if _, err := src.ReadAt(make([]byte, chunk), 2*chunk); !api.Is(err, api.Corrupt) {
			t.Errorf("the read of a damaged chunk: %v", err)
		}
	}
	w.compare(src, 3)
	if why, idle := w.l.Problem(); idle || !strings.Contains(why, "2 (offset 4194304)") {
		t.Errorf("the problem is %q", why)
	}
	f := w.l.Fill(false)
	var pauses atomic.Int64
	f.Pause = func(ctx context.Context, wait func(context.Context)) error {
		pauses.Add(1)
		wait(ctx)
		return nil
	}
	ended := w.begin(f)
	why := w.awaitIdle(ended)
	if !strings.Contains(why, "2 chunks") || !strings.Contains(why, "4 (offset 8388608)") ||
		!strings.Contains(why, "allow-damaged") {
		t.Errorf("the restore of a damaged backup waits: %s", why)
	}
	w.set.forget(w.l)
	w.change(func() { w.away = true })
	for _, c := range []int64{0, 1, 3, 5} {
		w.compare(src, c)
	}
	w.change(func() {
		if len(w.written) != 4 {
			t.Errorf("the restore wrote %v", w.written)
		}
		w.away, w.damaged = false, map[int64]bool{}
	})
	must(t, <-ended)
	w.compare(w.source(), 2)
	if pauses.Load() == 0 {
		t.Error("the restore waited in its slot")
	}

	w = newWorld(t, newStore(6*chunk))
	w.damaged[2], w.damaged[4] = true, true
	w.plan()
	f = w.l.Fill(true)
	_, err := w.restore(f)
	must(t, err)
	if slices.Sort(f.Damaged); !slices.Equal(f.Damaged, []int64{2, 4}) {
		t.Errorf("the damaged chunks are %v", f.Damaged)
	}
	clear(w.content[2*chunk : 3*chunk])
	clear(w.content[4*chunk : 5*chunk])
	restored, err := w.disk.Open(w.uid())
	must(t, err)
	for c := range int64(6) {
		w.compare(restored, c)
	}
	must(t, restored.Close())
}

// TestHealEndsThePause: a restore and a reader that lack a healed chunk ask for it at once, with a backup that was
// opened after the heal.
func TestHealEndsThePause(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(3*chunk))
	w.set.PauseMin, w.set.HealPauseMax = time.Hour, time.Hour
	w.damaged[1] = true
	w.plan()
	ended := w.begin(w.l.Fill(false))
	w.awaitIdle(ended)
	heal := func() {
		w.change(func() { w.damaged = map[int64]bool{} })
		w.set.Healed()
	}
	heal()
	must(t, <-ended)

	w = newWorld(t, newStore(3*chunk))
	w.set.PauseMin, w.set.HealPauseMax = time.Hour, time.Hour
	w.damaged[1] = true
	w.plan()
	src := w.source()
	read := func() error {
		_, err := src.ReadAt(make([]byte, chunk), chunk)
		return err
	}
	if err := read(); !api.Is(err, api.Corrupt) {
		t.Errorf("the read of a damaged chunk: %v", err)
	}
	heal()
	must(t, read())
	if why, _ := w.l.Problem(); why != "" {
		t.Errorf("afterwards the problem is %q", why)
	}
}

// TestHeldChunksAreNotDamaged: chunks that the layer has already, or as holes, do not count as damaged, although the
// store lost the list of them.
func TestHeldChunksAreNotDamaged(t *testing.T) {
	t.Parallel()
	s := newStore(4 * chunk)
	clear(s.content[chunk : 2*chunk])
	w := newWorld(t, s)
	w.plan()
	w.damaged[3] = true
	s.lost = []int64{0, 1, 2}
	w.l.openAgain()
	f := w.l.Fill(true)
	_, err := w.restore(f)
	must(t, err)
	if !slices.Equal(f.Damaged, []int64{3}) {
		t.Errorf("the damaged chunks are %v", f.Damaged)
	}
}

// openAgain makes the next use open the backup again.
func (l *Layer) openAgain() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.renew = time.Now()
}

// TestStoreStaysAway: without progress for the time of Stall, the restore is idle, and leaves its slot to others. It
// continues when the store is back.
func TestStoreStaysAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(3*chunk))
	w.set.Stall = time.Nanosecond
	w.plan()
	w.change(func() { w.away = true })
	ended := w.begin(w.l.Fill(false))
	if why := w.awaitIdle(ended); !strings.Contains(why, "the store is away") {
		t.Errorf("the restore waits: %s", why)
	}
	w.change(func() { w.away = false })
	must(t, <-ended)
	if why, idle := w.l.Problem(); idle || why != "" {
		t.Errorf("afterwards the problem is %q", why)
	}
}

// TestOpenAwaitsTheStore: a restore whose store is away from the begin on says so, and begins when the store is back. A
// failed opening for healed chunks takes no backup away that is open.
func TestOpenAwaitsTheStore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(2*chunk))
	w.change(func() { w.away = true })
	ended := make(chan error, 1)
	go func() {
		_, _, readable, err := w.l.Open(t.Context())
		if err == nil && !readable {
			err = api.Errorf(api.Invalid, "the layer cannot be read")
		}
		ended <- err
	}()
	if why := w.awaitIdle(ended); !strings.Contains(why, "the store is away") {
		t.Errorf("the restore waits: %s", why)
	}
	w.change(func() { w.away = false })
	must(t, <-ended)
	if _, idle := w.l.Problem(); idle {
		t.Error("the restore still waits")
	}
	w.change(func() { w.away = true })
	w.l.openAgain()
	o, err := w.l.use(t.Context(), false)
	must(t, err)
	w.l.release(o, nil)
}

// TestPlansAreBounded: backups together that claim more than the memory for digests wait for others.
func TestPlansAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(3*chunk))
	w.set.PlanMemory = planSize(4 * chunk)
	w.plan()
	second := w.set.Add(newDisk(t), w.uid(), newStore(2*chunk).open)
	ended := make(chan error, 1)
	go func() {
		_, _, _, err := second.Open(t.Context())
		ended <- err
	}()
	for idle := false; !idle; runtime.Gosched() {
		var why string
		if why, idle = second.Problem(); idle && !strings.Contains(why, "others have ended") {
			t.Errorf("the restore waits: %s", why)
		}
	}
	w.set.Remove(w.disk.UID(), w.uid())
	must(t, <-ended)
	w.end()
	if n := len(w.set.plans); n != 0 {
		t.Errorf("the digests of %d layers stay", n)
	}
}

// TestDigestsOfAttachedVolumesComeFirst: after a restart, the restore of a backup that no attached volume stands on begins
// first, and leaves the memory for digests to the layer below an attached volume. A layer for which the
// memory suffices, too, does not wait.
func TestDigestsOfAttachedVolumesComeFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(3*chunk))
	w.set.PlanMemory = planSize(4 * chunk)
	on, uid := newDisk(t), string(api.NewUID())
	var detached atomic.Bool
	w.set.Attached = func(context.Context) []AttachedLayer {
		if detached.Load() {
			return nil
		}
		return []AttachedLayer{{on.UID(), uid, 2 * chunk}}
	}
	ended := make(chan error, 1)
	go func() {
		_, _, _, err := w.l.Open(t.Context())
		ended <- err
	}()
	for idle := false; !idle; runtime.Gosched() {
		var why string
		if why, idle = w.l.Problem(); idle && !strings.Contains(why, "attached volumes leave 64") {
			t.Errorf("the restore waits: %s", why)
		}
	}
	small := w.set.Add(newDisk(t), string(api.NewUID()), newStore(2*chunk).open)
	_, _, readable, err := small.Open(t.Context())
	must(t, err)
	attached := w.set.Add(on, uid, newStore(2*chunk).open)
	_, _, also, err := attached.Open(t.Context())
	must(t, err)
	if !readable || !also {
		t.Errorf("the layers are readable: %v, %v", readable, also)
	}
	detached.Store(true)
	w.set.Remove(small.on.UID(), small.uid)
	w.set.Remove(on.UID(), uid)
	must(t, <-ended)
}

// TestReadersDoNotWaitForARenewal: while a backup with damage is opened again, which takes long, readers get intact
// chunks from the former one.
func TestReadersDoNotWaitForARenewal(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(3*chunk))
	w.damaged[1] = true
	w.plan()
	src := w.source()
	if _, err := src.ReadAt(make([]byte, chunk), chunk); !api.Is(err, api.Corrupt) {
		t.Fatalf("the read of a damaged chunk: %v", err)
	}
	w.l.mu.Lock()
	w.l.renew, w.l.opening = time.Now(), make(chan struct{}) // an opening that never ends
	w.l.mu.Unlock()
	_, err := src.ReadAt(make([]byte, chunk), 2*chunk)
	must(t, err)
	w.l.mu.Lock()
	close(w.l.opening)
	w.l.opening = nil
	w.l.mu.Unlock()
}

// unsynced is a layer in the making whose Sync fails.
type unsynced struct{}

func (unsynced) WriteAt(p []byte, _ int64) (int, error) { return len(p), nil }
func (unsynced) ZeroAt(int64, int64) error              { return nil }
func (unsynced) Sync(context.Context) error             { return api.Errorf(api.Full, "no space for the blocks") }

// TestRestoreEndsWhenTheLayerCannotBeSynced: a failure of the disk ends the restore, although the store may come back.
func TestRestoreEndsWhenTheLayerCannotBeSynced(t *testing.T) {
	t.Parallel()
	w := newWorld(t, newStore(3*chunk))
	w.set.PauseMin = time.Hour
	w.plan()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := w.l.Fill(false).Restore(ctx, unsynced{}); !api.Is(err, api.Full) {
		t.Errorf("the restore ends with %v", err)
	}
}

// TestBackupOfAnUnfinishedRestoreIsLeft: at the end of the process, the next process continues; a removed layer needs its
// backup no more.
func TestBackupOfAnUnfinishedRestoreIsLeft(t *testing.T) {
	t.Parallel()
	for what, want := range map[string]int{"the end of the process": 1, "the removal of the layer": 0} {
		w := newWorld(t, newStore(3*chunk))
		w.plan()
		if want == 0 {
			w.set.Remove(w.disk.UID(), w.uid())
		}
		w.end()
		w.change(func() {
			if w.left != want {
				t.Errorf("%s leaves %d backups, want %d", what, w.left, want)
			}
		})
	}
}
