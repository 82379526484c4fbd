package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"slices"
	"strconv"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// The snapshots of a faulty replica, and the steps of the schedules with snapshots.

// snapped is a snapshot with its content.
type snapped struct {
	stack.Snapshot
	data []byte
}

// at is the content of a snapshot, or the present content. The caller has mu.
func (r *replica) at(uid string) []byte {
	for _, s := range r.snaps {
		if s.UID == uid {
			return s.data
		}
	}
	return r.data
}

func (r *replica) State(ctx context.Context) (m stack.Meta, err error) {
	if err := r.reach(ctx); err != nil {
		return m, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.snaps {
		m.Snapshots = append(m.Snapshots, s.Snapshot)
	}
	return m, nil
}

func (r *replica) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prepared = &s
	return nil
}

func (r *replica) DoCut(ctx context.Context, layer string) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.prepared == nil || r.prepared.Layer != layer {
		return api.Errorf(api.NotFound, "no such cut is prepared")
	}
	r.snaps = append(r.snaps, snapped{*r.prepared, bytes.Clone(r.data)})
	r.prepared = nil
	return nil
}

func (r *replica) AbortCut(ctx context.Context) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prepared = nil
	return nil
}

func (r *replica) Forget(ctx context.Context, uid string) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.snaps = slices.DeleteFunc(r.snaps, func(s snapped) bool { return s.UID == uid })
	return nil
}

func (r *replica) Seal(ctx context.Context, list ...stack.Snapshot) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range list {
		if s.UID != "" {
			r.snaps = append(r.snaps, snapped{s, bytes.Clone(r.data)})
		}
	}
	return nil
}

func (r *replica) SnapRead(ctx context.Context, uid string, off int64, buf []byte) error {
	if err := r.reach(ctx); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(buf)
	if at := r.at(uid); off < int64(len(at)) {
		copy(buf, at[off:])
	}
	return nil
}

func (r *replica) SnapEnd(context.Context) error { return nil }

func (r *replica) Sizes(ctx context.Context) (map[string]stack.LayerSize, error) {
	return nil, r.reach(ctx)
}

func (r *replica) SnapDigests(ctx context.Context, uid string, off, n int64) ([]byte, error) {
	if err := r.reach(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return sums(r.at(uid), off, n), nil
}

// sums are the digests of the blocks of a range; beyond the end there are zeros.
func sums(data []byte, off, n int64) (list []byte) {
	for b := off; b < off+n; b += block.Size {
		sum := zeroSum
		if b < int64(len(data)) {
			sum = sha256.Sum256(data[b : b+block.Size])
		}
		list = append(list, sum[:digestSize]...)
	}
	return list
}

func (r *replica) Changed(_ context.Context, _, _ string, _ []string, piece int64) (all []int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := int64(0); k*piece < int64(len(r.data)); k++ {
		all = append(all, k)
	}
	return all, nil
}

// unlike has the replicas differ, as after an unclean end, and has some of them away while the engine opens. The engine
// chooses any member as the source of its first copies, and the guest reads this member's content.
func (w *faulty) unlike() {
	for i, name := range w.members {
		r := w.all[name]
		for b := int64(0); b < faultySize; b += block.Size {
			if w.chance(4) {
				copy(r.data[b:b+block.Size], fill(block.Size, byte(1+w.pick(250))))
			}
		}
		r.away = i > 0 && w.chance(3)
	}
	if first := w.all[w.members[0]]; len(w.members) > 1 && w.chance(4) && !w.all[w.members[1]].away {
		first.away = true
	}
}

// open opens the engine, while members answer.
func (w *faulty) open(cfg Config) {
	opened := make(chan error, 1)
	go func() {
		e, err := Open(w.t.Context(), cfg)
		w.mu.Lock()
		w.e = e
		w.mu.Unlock()
		if err == nil {
			w.opened()
		}
		opened <- err
	}()
	for done := false; !done; {
		select {
		case err := <-opened:
			if done = true; err != nil {
				w.t.Fatalf("seed %d: %v", w.seed, err)
			}
		default:
			w.l.do(func() { w.answers(20) })
			time.Sleep(time.Millisecond)
		}
	}
}

// opened sets the guest's model to the content of the adopted members. Missing members come back, some of them just as
// all other members go away. The engine has not resynced the missing members, so they must not serve.
func (w *faulty) opened() {
	missing, others := w.e.Missing(), w.chance(2)
	for _, r := range w.recorded() {
		late := slices.Contains(missing, r.name)
		r.goAway(func(bool) bool { return len(missing) > 0 && !late && others })
		r.mu.Lock()
		if !late {
			w.model = bytes.Clone(r.data)
		}
		r.mu.Unlock()
	}
}

// cut takes a snapshot; only one cut is in progress.
func (w *faulty) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cutting || w.e == nil {
		return
	}
	w.cutting = true
	w.cuts++
	s := stack.Snapshot{UID: "s" + strconv.Itoa(w.cuts), Name: "s" + strconv.Itoa(w.cuts), Created: time.Now()}
	w.joins.Go(func() {
		err := w.e.Cut(w.t.Context(), s)
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.cutting = false; err == nil {
			w.taken = append(w.taken, s)
		}
	})
}

// grow makes the volume longer.
func (w *faulty) grow() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.alone != nil || w.growing || w.size >= 2*faultySize {
		return
	}
	w.growing = true
	size := w.size + 64<<10
	w.joins.Go(func() {
		err := w.e.Expand(w.t.Context(), size)
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.growing = false; err == nil {
			w.size = size
		}
	})
}

// sameSnapshots: every recorded member has all reported snapshots, with the same content.
func (w *faulty) sameSnapshots() {
	for _, s := range w.taken {
		var first []byte
		for _, r := range w.recorded() {
			i := slices.IndexFunc(r.snaps, func(k snapped) bool { return k.Same(s) })
			if i < 0 {
				w.t.Errorf("seed %d: member %s lacks snapshot %s", w.seed, r.name, s.Name)
				continue
			}
			n := min(len(r.snaps[i].data), faultySize) // some snapshots were taken after an expansion
			if first == nil {
				first = r.snaps[i].data[:n]
			}
			if !bytes.Equal(first, r.snaps[i].data[:n]) {
				w.t.Errorf("seed %d: snapshot %s has other content on member %s", w.seed, s.Name, r.name)
			}
		}
	}
}
