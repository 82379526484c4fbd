package engine

import (
	"bytes"
	"context"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A returning replica lacks the snapshots of its absence, and has some deleted ones. The content of a snapshot counts,
// not the division of a replica into layers: merges differ between replicas. So the replica forgets deleted snapshots;
// and for each missing snapshot, in the order of their instants, the engine resyncs the replica's head to the snapshot
// and cuts the head. Snapshots do not change: the engine needs no lock, and does all this before the replica gets any
// guest write. After an error the next join continues with the next snapshot.

// layered is the progress through the snapshots.
type layered struct {
	top string   // the snapshot that the head begins with; empty: none yet
	p   Progress // so far
}

// copySnapshots gives the replica the snapshots that the members have.
func (r *joinRun) copySnapshots(ctx context.Context) error {
	to, ok := r.dst.(Cutter)
	if !ok {
		return nil
	}
	for {
		src, cutting, err := r.e.selectMember(ctx)
		if err != nil {
			return err
		}
		if cutting {
			if err := pause(ctx, 50*time.Millisecond); err != nil {
				return err
			}
			continue
		}
		missing, err := snapshotsLike(ctx, src, to)
		if err != nil || len(missing) == 0 {
			return err
		}
		if err := r.cutSnapshots(ctx, src, to, missing); err != nil {
			return err
		}
	}
}

// cutSnapshots resyncs the replica's head to each missing snapshot in turn, and cuts the head.
func (r *joinRun) cutSnapshots(ctx context.Context, src, to Cutter, missing []stack.Snapshot) error {
	at := &r.at
	size, err := r.e.volumeSize(ctx)
	if err != nil {
		return err
	}
	var same []stack.Snapshot // to seal together: no write came between them
	seal := func() error {
		if len(same) == 0 {
			return nil
		}
		same[0].Layer = string(api.NewUID())
		err := to.Seal(ctx, same...)
		same = nil
		return err
	}
	for _, s := range missing {
		regions, region, full, err := r.findSnapshotChanges(ctx, src, s.UID)
		if err != nil {
			return err
		}
		if at.p.Full = at.p.Full || full; full {
			if err := r.wholeTurn(ctx); err != nil {
				return err
			}
		}
		if len(regions) > 0 || at.top == "" {
			if err := seal(); err != nil {
				return err
			}
			c := copier{e: r.e, to: []Mirror{r.dst}, snap: s.UID, polite: true, o: r.o, p: at.p}
			c.bare.Store(full)
			at.p, err = c.copyRegions(ctx, regions, region, size)
			if err != nil {
				return err
			}
		}
		same = append(same, s)
		at.top = s.UID
	}
	return seal()
}

// snapshotsLike makes a replica forget the snapshots that the members lack, and returns the snapshots that the replica
// lacks, the oldest first.
func snapshotsLike(ctx context.Context, src, to Cutter) ([]stack.Snapshot, error) {
	want, err := src.State(ctx)
	if err != nil {
		return nil, err
	}
	have, err := to.State(ctx)
	if err != nil {
		return nil, err
	}
	for _, s := range have.Snapshots {
		if !slices.ContainsFunc(want.Snapshots, s.Same) {
			if err := to.Forget(ctx, s.UID); err != nil {
				return nil, err
			}
		}
	}
	missing := slices.DeleteFunc(want.Snapshots, func(s stack.Snapshot) bool {
		return slices.ContainsFunc(have.Snapshots, s.Same)
	})
	slices.SortStableFunc(missing, func(a, b stack.Snapshot) int { return a.Created.Compare(b.Created) })
	return missing, nil
}

// sameSnapshots makes sure, once a replica gets all writes, that no new snapshot was taken.
func sameSnapshots(ctx context.Context, src, dst Mirror) error {
	from, ok := src.(Cutter)
	to, is := dst.(Cutter)
	if !ok || !is {
		return nil
	}
	missing, err := snapshotsLike(ctx, from, to)
	if err == nil && len(missing) > 0 {
		err = errCutting
	}
	return err
}

// findSnapshotChanges says where the head of the replica and a snapshot may differ: the head begins with the snapshot
// at.top, without a later write.
func (r *joinRun) findSnapshotChanges(ctx context.Context, src Cutter, uid string) (regions []int64, region int64,
	full bool, err error) {
	if r.at.top != "" {
		regions, err = src.Changed(ctx, r.at.top, uid, nil, comparePiece)
		return regions, comparePiece, false, err
	}
	return r.findDifferingRegions(ctx, src, uid)
}

// findLackingRegions says where the replica may differ from the members now.
func (r *joinRun) findLackingRegions(ctx context.Context, src Mirror) (regions []int64, region int64, full bool,
	err error) {
	if r.at.top != "" {
		regions, err = src.(Cutter).Changed(ctx, r.at.top, "", nil, comparePiece)
		return regions, comparePiece, false, err
	}
	return r.findDifferingRegions(ctx, src, "")
}

// findDifferingRegions says where a returning replica may differ: by the intents of both sides, or, if these do not
// name all regions, wherever one of the two replicas holds data.
func (r *joinRun) findDifferingRegions(ctx context.Context, src Mirror, uid string) (regions []int64, region int64,
	full bool, err error) {
	dst := r.dst
	ours, err := src.Intents(ctx)
	if err != nil {
		return nil, 0, false, err
	}
	theirs, err := dst.Intents(ctx)
	if err != nil {
		return nil, 0, false, err
	}
	if ours.Covers(theirs) {
		return union(ours.Regions, theirs.Regions), ours.Region, false, nil
	}
	from, ok := src.(Cutter)
	to, is := dst.(Cutter)
	if !ok || !is {
		size, err := r.e.volumeSize(ctx)
		if err != nil {
			return nil, 0, true, err
		}
		for g := range (size + ours.Region - 1) / ours.Region {
			regions = append(regions, g)
		}
		return regions, ours.Region, true, nil
	}
	base, err := sharedLayers(ctx, from, to)
	if err != nil {
		return nil, 0, true, err
	}
	a, err := from.Changed(ctx, "", uid, base, comparePiece)
	if err != nil {
		return nil, 0, true, err
	}
	b, err := to.Changed(ctx, "", "", base, comparePiece)
	return union(a, b), comparePiece, true, err
}

// sharedLayers returns the lowest layers that both replicas stand on, such as an image's: a uid means one content.
func sharedLayers(ctx context.Context, a, b Cutter) ([]string, error) {
	x, err := a.State(ctx)
	if err != nil {
		return nil, err
	}
	y, err := b.State(ctx)
	if err != nil {
		return nil, err
	}
	n := 0
	for n < min(len(x.Layers), len(y.Layers)) && x.Layers[n] == y.Layers[n] {
		n++
	}
	return x.Layers[:n], nil
}

// Compare reads the layer of a snapshot on all members, and returns an error of kind corrupt if the members hold
// different content, of kind not-found if the snapshot does not exist, and of kind unavailable if the comparison has to
// wait: a single member, a layer that is not finished on all members, or a merge. The guest goes first.
func (e *Engine) Compare(ctx context.Context, uid string, bytesPerSecond int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	var list []Named
	if err := e.runOnLoop(ctx, func() {
		for i, m := range e.cfg.Members {
			if (e.members &^ e.suspect).has(i) {
				list = append(list, m)
			}
		}
	}); err != nil {
		return err
	}
	var all []Cutter
	for _, m := range list {
		x, ok := m.Member.(Cutter)
		if !ok {
			return nil
		}
		all = append(all, x)
	}
	if len(all) < 2 {
		return api.Errorf(api.Unavailable, "snapshot %s: the volume has no second member to compare", uid)
	}
	pieces, err := newPieces(ctx, all, uid)
	if err != nil {
		return err
	}
	defer func() {
		for _, x := range all {
			_ = endSnapshot(ctx, x) // else with the session
		}
	}()
	c := copier{e: e, polite: true, o: JoinOptions{BytesPerSecond: bytesPerSecond}, began: time.Now()}
	size, err := e.volumeSize(ctx)
	if err != nil {
		return err
	}
	for _, k := range pieces {
		began, off := time.Now(), k*comparePiece
		n := min(comparePiece, size-off)
		var first []byte
		for i, x := range all {
			sums, err := x.SnapDigests(ctx, uid, off, n)
			if isDamage(err) { // damage is reported elsewhere, and is no difference
				err = api.Errorf(api.Unavailable, "replica %s: %w", list[i].Name, err)
			}
			if err != nil {
				return err
			}
			if i == 0 {
				first = sums
			} else if !bytes.Equal(sums, first) {
				return api.Errorf(api.Corrupt, "replicas %s and %s differ between bytes %d and %d", list[0].Name, list[i].Name,
					off, off+n)
			}
		}
		c.did += n
		if err := c.yieldToGuest(ctx, time.Since(began)); err != nil {
			return err
		}
	}
	return nil
}

// newPieces lists the pieces in which the layer of a snapshot holds something on any member.
func newPieces(ctx context.Context, all []Cutter, uid string) (pieces []int64, err error) {
	for _, x := range all {
		m, err := x.State(ctx)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(m.Snapshots, func(s stack.Snapshot) bool { return s.UID == uid })
		if i < 0 {
			return nil, api.Errorf(api.NotFound, "snapshot %s does not exist", uid)
		}
		chain, err := m.Chain(m.Snapshots[i].Layer)
		if err != nil {
			return nil, err
		}
		sizes, err := x.Sizes(ctx)
		if err != nil {
			return nil, err
		}
		if sizes[uid].Root == "" { // its map is still the file of the former head: a walk through that takes long
			return nil, api.Errorf(api.Unavailable, "snapshot %s: layer %s is not finished", uid, m.Snapshots[i].Layer)
		}
		some, err := x.Changed(ctx, "", uid, chain[:len(chain)-1], comparePiece)
		if api.Is(err, api.NotFound) {
			return nil, api.Errorf(api.Unavailable, "snapshot %s: its layers are being merged: %w", uid, err)
		} else if err != nil {
			return nil, err
		}
		pieces = union(pieces, some)
	}
	return pieces, nil
}
