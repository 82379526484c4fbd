package repo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// A sweep deletes the packs that no snapshot needs, in two steps, while sessions run:
//
//  1. Hide. The sweep marks the blobs of all snapshots, copies the needed blobs of packs that are mostly garbage, and
//     writes index files in which the packs without needed blobs are hidden: no new session relies on them.
//  2. Delete. When every session of that moment has ended, the sweep marks again. A hidden pack that a snapshot needs
//     after all goes back into the index; the other ones are deleted. The sweep does not wait for the restore of a
//     snapshot that step 1 marked and nobody deleted: every blob of the snapshot is in a pack that stays, and the
//     session loads the index again when a pack is missing (readMoved).
//
// The store's lists may be short. The sweep refuses a first list that lacks a snapshot of the record, or of the caller,
// and marks every snapshot that one of its lists had, until the store denies the snapshot.
//
// Two belts hold the promise that no session loses a blob. A session of Drover notices that an index file vanished,
// before and after it writes its snapshot, and stores hidden blobs again (Blobs.IsCurrent); the sweep looks for
// snapshots before and after it replaces index files: so one of the two sees the other. And step 2 looks at the
// snapshots after all sessions that may rely on a hidden pack. The packs of a session that runs are neither hidden nor
// deleted: their index files name the session. A session that lost its lock may write an index file nevertheless; the
// session looks for missing packs afterwards, and the sweep looks for late index files after it deleted packs.
//
// Only the store's clock matters, and only for stale locks. A sweep that ends early leaves hidden packs, which the next
// one deletes.

// DefaultThreshold is the percentage of a pack's bytes in use below which a sweep copies the blobs in use.
const DefaultThreshold = 60

// deleteBatch is how many objects a sweep deletes with one call of the store.
const deleteBatch = 1000

// SweepOptions bound a sweep.
type SweepOptions struct {
	// Known are snapshots that the caller knows and nobody deleted. A first list without one of them is wrong, and ends
	// the sweep with an error of kind Unavailable; so does a list without any snapshot, unless Empty is set.
	Known []blob.ID
	Empty bool // the caller knows no snapshot
	// RecordAge is the least age of the snapshot record, unless the record is as old as the repository: until then, a list
	// of the store may be short without being noticed. A younger record ends the sweep with an error of kind Busy.
	RecordAge time.Duration

	// Waits, unless nil, is called after each look at the sessions that delay the sweep, with an error as of IsLocked,
	// which names the oldest session.
	Waits func(why error)

	Threshold int           // percent; 0: DefaultThreshold
	Poll      time.Duration // between two looks at the sessions that the sweep waits for; 0: 5 s
	Writer    WriterOptions // for the packs of copied blobs
}

// SweepStats counts the work of a sweep.
type SweepStats struct {
	Snapshots     int
	HiddenPacks   int   // in step 1
	SessionPacks  int   // that no snapshot needs, of sessions that ran in step 1: a later sweep deletes them
	CopiedBlobs   int64 // from packs that were mostly garbage
	ReturnedPacks int   // hidden packs that a snapshot needs
	DeletedPacks  int   // also of sessions that did not end well
	FreedBytes    int64
}

// sweep is the state of a sweep.
type sweep struct {
	r     *Repository
	o     SweepOptions
	lock  *Lock
	stats SweepStats

	known  map[blob.ID]SnapshotFile // that exist, by the lists of the sweep and the record
	marked map[blob.ID]struct{}     // snapshots that step 1 marked
}

// Sweep deletes the packs that no snapshot needs. An error of kind Busy says that another sweep or another program uses
// the repository, or that a new backup needs garbage; one of kind Corrupt that a snapshot is damaged; one of kind
// Unavailable that the store's lists cannot be right; one of kind Denied that the credentials permit no deletion.
// After an error, packs may be hidden: the next sweep deletes or returns them.
func (r *Repository) Sweep(ctx context.Context, o SweepOptions) (stats SweepStats, err error) {
	if o.Threshold == 0 {
		o.Threshold = DefaultThreshold
	}
	if o.Poll == 0 {
		o.Poll = 5 * time.Second
	}
	lock, err := r.Lock(ctx, Sweeping)
	if err != nil {
		return stats, err
	}
	s := &sweep{r: r, o: o, lock: lock, known: map[blob.ID]SnapshotFile{}}
	s.o.Writer.Lock = lock
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLockTimeout)
		defer cancel()
		stats, err = s.stats, errors.Join(err, lock.Close(ctx))
	}()
	err = s.run(lock.Context())
	if err != nil {
		err = api.Errorf(api.KindOf(err), "repository %.8s: the sweep ended early: %w", r.ID(), err)
	}
	return stats, err
}

func (s *sweep) run(ctx context.Context) error {
	if err := s.checkPermission(ctx); err != nil {
		return err
	}
	if err := s.checkRecord(ctx); err != nil {
		return err
	}
	hidden, err := s.hide(ctx)
	if err != nil {
		return err
	}
	if len(hidden) == 0 {
		return nil
	}
	if err := s.waitForSessions(ctx); err != nil {
		return err
	}
	return s.deleteHidden(ctx, hidden)
}

// checkPermission deletes an object of its own: a store without permission to delete would keep all old index files.
func (s *sweep) checkPermission(ctx context.Context) error {
	id, err := s.lock.save(ctx)
	if err != nil {
		return err
	}
	if err := s.r.store.Delete(ctx, locksFolder+id.String()); err != nil {
		s.lock.deleteLater(locksFolder + id.String())
		return err
	}
	return nil
}

// checkRecord compares the first list of snapshots with the record, and brings the record up to date.
func (s *sweep) checkRecord(ctx context.Context) error {
	list, err := s.r.ListRecorded(ctx)
	if err != nil {
		return err
	}
	if err := list.Check(); err != nil {
		return err
	}
	for _, f := range list.Files {
		s.known[f.ID] = f
	}
	if err := list.Save(ctx); err != nil {
		return err
	}
	own, err := s.lock.own(ctx)
	if err != nil {
		return err
	}
	if age := list.age(own); age < s.o.RecordAge {
		return api.Errorf(api.Busy, "Drover lists the snapshots of the repository since %v, and first sweeps after %v; "+
			"try again later", age.Truncate(time.Second), s.o.RecordAge)
	}
	return nil
}

// listSnapshots lists the snapshots, and those that an earlier list had and the store still has.
func (s *sweep) listSnapshots(ctx context.Context) ([]SnapshotFile, error) {
	files, err := s.r.ListSnapshots(ctx)
	if err != nil {
		return nil, err
	}
	unlisted, _, err := s.r.findUnlisted(ctx, files, slices.Collect(maps.Keys(s.known)))
	if err != nil {
		return nil, err
	}
	files = append(files, unlisted...)
	clear(s.known)
	for _, f := range files {
		s.known[f.ID] = f
	}
	return files, nil
}

// hide is step 1. hidden are the packs that step 2 deletes if no snapshot needs them: hidden ones, and packs that no
// index file names.
func (s *sweep) hide(ctx context.Context) (hidden map[blob.ID]struct{}, err error) {
	v, err := s.view(ctx)
	if err != nil {
		return nil, err
	}
	defer v.close(&err)
	if err := s.checkKnown(v); err != nil {
		return nil, err
	}
	for _, other := range v.sessions {
		if !other.drover {
			return nil, lockedf("%s uses the repository; try again later", other.holder)
		}
	}
	changes, err := s.plan(ctx, v)
	if err != nil {
		return nil, err
	}
	added, old, err := s.writeIndex(ctx, v, changes)
	if err != nil {
		return nil, err
	}
	if needed, err := v.newlyNeeded(ctx, changes); err != nil || len(needed) > 0 {
		if err == nil {
			err = api.Errorf(api.Busy, "a new snapshot needs %d packs that were about to be hidden; try again", len(needed))
		}
		return nil, errors.Join(err, s.deleteObjects(ctx, added))
	}
	if err := s.deleteObjects(ctx, old); err != nil {
		return nil, err
	}
	if err := s.returnNeeded(ctx, v, changes); err != nil {
		return nil, err
	}
	s.marked = v.marker.snapshots
	hidden = map[blob.ID]struct{}{}
	for id, change := range changes {
		if change == hidePack {
			hidden[id] = struct{}{}
		}
	}
	for p := range v.packs.all() {
		if !p.indexed {
			hidden[p.id] = struct{}{}
		}
	}
	return hidden, nil
}

// newlyNeeded are the packs to hide that a snapshot needs which came after the plan.
func (v *view) newlyNeeded(ctx context.Context, changes map[blob.ID]packChange) (map[blob.ID]packChange, error) {
	if err := v.countUse(ctx); err != nil {
		return nil, err
	}
	needed := map[blob.ID]packChange{}
	for id, change := range changes {
		if p := v.packs.find(id); change == hidePack && p.used > p.planned {
			needed[id] = returnPack
		}
	}
	return needed, nil
}

// returnNeeded returns the packs that a snapshot needs which came while the sweep hid the packs.
func (s *sweep) returnNeeded(ctx context.Context, v *view, hidden map[blob.ID]packChange) (err error) {
	needed, err := v.newlyNeeded(ctx, hidden)
	if err != nil || len(needed) == 0 {
		return err
	}
	s.stats.ReturnedPacks += len(needed)
	now, err := s.view(ctx)
	if err != nil {
		return err
	}
	defer now.close(&err)
	return s.rewriteIndex(ctx, now, needed)
}

// waitForSessions waits for the end of all running sessions that may read a hidden pack.
func (s *sweep) waitForSessions(ctx context.Context) error {
	waiting, err := s.lock.otherSessions(ctx)
	if err != nil {
		return err
	}
	for name, other := range waiting {
		kept, err := s.keepsReadsOf(ctx, other)
		if err != nil {
			return err
		}
		if kept {
			delete(waiting, name)
		}
	}
	for len(waiting) > 0 {
		s.reportWait(waiting)
		timer := time.NewTimer(s.o.Poll)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		now, err := s.lock.otherSessions(ctx)
		if api.Is(err, api.Unavailable) && ctx.Err() == nil {
			continue // the store may answer again; without the lock, ctx ends
		}
		if err != nil {
			return err
		}
		for name := range waiting {
			if _, ok := now[name]; !ok {
				delete(waiting, name)
			}
		}
	}
	return nil
}

// keepsReadsOf reports whether a session only reads a snapshot that step 1 marked. A snapshot that somebody deleted
// meanwhile may lack the mark.
func (s *sweep) keepsReadsOf(ctx context.Context, other runningSession) (bool, error) {
	id, err := blob.Parse(other.lock.Restore)
	if _, marked := s.marked[id]; err != nil || !marked {
		return false, nil
	}
	_, err = s.r.FindSnapshot(ctx, id)
	if api.Is(err, api.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// reportWait names the session that waits longest.
func (s *sweep) reportWait(waiting map[string]runningSession) {
	if s.o.Waits == nil {
		return
	}
	name := slices.MinFunc(slices.Collect(maps.Keys(waiting)), func(a, b string) int {
		return cmp.Or(waiting[a].lock.begin().Compare(waiting[b].lock.begin()), strings.Compare(a, b))
	})
	first, more, reads := waiting[name], "", ""
	if n := len(waiting) - 1; n > 0 {
		more = fmt.Sprintf(" and for %s", api.CountText(n, "further session"))
	}
	if first.lock.Restore != "" {
		reads = fmt.Sprintf(", which restores the deleted snapshot %.8q", first.lock.Restore)
	}
	s.o.Waits(lockedf("repository %.8s: the sweep waits for %s%s%s; deleted backups keep their space until then", s.r.ID(),
		first.holder, reads, more))
}

// deleteHidden is step 2.
func (s *sweep) deleteHidden(ctx context.Context, hidden map[blob.ID]struct{}) (err error) {
	v, err := s.view(ctx)
	if err != nil {
		return err
	}
	defer v.close(&err)
	changes := map[blob.ID]packChange{}
	var names []string
	for id := range hidden {
		p := v.packs.find(id)
		indexed := p != nil && p.indexed
		switch {
		case indexed && !p.hidden: // a session wrote the index file since
			continue
		case indexed && p.used > 0:
			changes[id] = returnPack
			s.stats.ReturnedPacks++
			continue
		case indexed:
			changes[id] = dropPack
		}
		names = append(names, packName(id))
		if p != nil {
			s.stats.FreedBytes += p.size
		}
	}
	if err := s.rewriteIndex(ctx, v, changes); err != nil {
		return err
	}
	s.stats.DeletedPacks = len(names)
	if err := s.deleteObjects(ctx, names); err != nil {
		return err
	}
	return s.dropLate(ctx, v, hidden)
}

func (s *sweep) deleteObjects(ctx context.Context, names []string) error {
	for len(names) > 0 {
		n := min(len(names), deleteBatch)
		// After a long pause of the machine, others may have taken the sweep for dead, and changed the index.
		if err := s.lock.Confirm(ctx); err != nil {
			return err
		}
		if err := s.r.store.Delete(ctx, names[:n]...); err != nil {
			return err
		}
		names = names[n:]
	}
	return nil
}

// view is the index of a moment, with the use of each pack.
type view struct {
	blobs    *Blobs // with hidden packs
	files    []namedFile
	young    map[blob.ID]struct{} // files of sessions that run
	sessions map[string]runningSession
	marker   *marker
	packs    *packUses
}

func (v *view) close(err *error) { *err = errors.Join(*err, v.blobs.Close()) }

// view lists the packs, then the index files, then the locks, then the snapshots. A pack is in the store before an
// index file names the pack, and the session of an index file holds its lock until after its snapshot.
func (s *sweep) view(ctx context.Context) (v *view, err error) {
	v = &view{young: map[blob.ID]struct{}{}}
	if v.packs, err = s.r.listPacks(ctx); err != nil {
		return nil, err
	}
	authors, err := s.readIndex(ctx, v)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			v.close(&err)
			v = nil
		}
	}()
	if v.sessions, err = s.lock.otherSessions(ctx); err != nil {
		return v, err
	}
	for i, f := range v.files {
		if _, runs := v.sessions[authors[i]]; runs {
			v.young[f.id] = struct{}{}
		}
	}
	for p := range v.packs.indexed() {
		for i := range v.packs.filesOf(p) {
			_, young := v.young[v.files[i].id]
			p.young = p.young || young
		}
	}
	v.marker = newMarker(s.r, s.listSnapshots, v.blobs, v.files)
	if err := v.countUse(ctx); err != nil {
		return v, err
	}
	s.stats.Snapshots = len(v.marker.snapshots)
	return v, s.checkLists(v)
}

// checkKnown refuses a list without a known snapshot. Later lists may lack snapshots that were deleted since.
func (s *sweep) checkKnown(v *view) error {
	for _, id := range s.o.Known {
		if _, ok := v.marker.snapshots[id]; !ok {
			return api.Errorf(api.Unavailable, "the store's list of snapshots lacks snapshot %.8s; "+
				"check the folder or bucket of the target", id)
		}
	}
	return nil
}

// checkLists refuses lists that a store with a fault may return: a sweep would delete every pack.
func (s *sweep) checkLists(v *view) error {
	if n := v.packs.countListed(); len(v.marker.snapshots) == 0 && n > 0 && !s.o.Empty {
		return api.Errorf(api.Unavailable, "the store lists %d packs, %d index files and %d snapshots; "+
			"check the folder or bucket of the target", n, len(v.files), len(v.marker.snapshots))
	}
	return nil
}

// readIndex reads all index files, and returns the session that wrote each.
func (s *sweep) readIndex(ctx context.Context, v *view) (authors []string, err error) {
	if v.files, err = listFolder(ctx, s.r.store, indexFolder); err != nil {
		return nil, err
	}
	b, err := index.NewTableBuilder(s.r.cacheFolder(), s.r.tableOwner(), nil, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	b.WithHidden()
	authors = make([]string, len(v.files))
	var marks []blob.ID
	for i, f := range v.files {
		authors[i], err = s.r.scanIndexFile(ctx, f, func(p index.Pack) error {
			if p.Damaged {
				marks = append(marks, p.ID)
				return b.Add(p)
			}
			use, first := v.packs.addFile(p.ID, i)
			if first {
				if use.lost, err = s.isLost(ctx, use); err != nil {
					return err
				}
			}
			sealed := int64(0)
			for _, e := range p.Entries {
				sealed += int64(e.Length)
			}
			use.sealed = max(use.sealed, sealed)
			use.hidden = use.hidden && p.Hidden
			if use.lost { // other packs may have the blobs
				return nil
			}
			return b.Add(p)
		})
		if err != nil {
			return nil, err
		}
	}
	for _, id := range marks {
		if use := v.packs.findIndexed(id); use != nil {
			use.marked = true
		}
	}
	t, err := b.Finish("")
	if err != nil {
		return nil, err
	}
	v.blobs = s.r.blobsOf(t)
	v.blobs.limit = math.MaxInt // the marks belong to this table
	return authors, nil
}

// isLost reports whether the store does not have a pack. A pack that is younger than the list of packs is not in the
// list.
func (s *sweep) isLost(ctx context.Context, p *packUse) (bool, error) {
	if p.listed {
		return false, nil
	}
	_, err := s.r.store.Stat(ctx, packName(p.id))
	if api.Is(err, api.NotFound) {
		return true, nil
	}
	return false, err
}

// countUse counts the bytes of each pack that the snapshots of now need.
func (v *view) countUse(ctx context.Context) error {
	if err := v.marker.catchUp(ctx); err != nil {
		return err
	}
	for p := range v.packs.all() {
		p.used = 0
	}
	packs, err := v.packsByNumber()
	if err != nil {
		return err
	}
	return v.marker.table.Each(func(row index.Row) error {
		if v.marker.marks.has(row.Number) {
			packs[row.Pack].used += int64(row.Length)
		}
		return nil
	})
}

// packsByNumber are the packs of the table by their numbers there.
func (v *view) packsByNumber() (packs []*packUse, err error) {
	return packs, v.marker.table.EachPack(func(id blob.ID) { packs = append(packs, v.packs.find(id)) })
}
