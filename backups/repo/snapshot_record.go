package repo

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
)

// The snapshot record names the snapshots that lists of the repository had. A reader gets the record by its own name,
// so the record holds when a list of the store is short, after a restart, and for other nodes and clusters. A snapshot
// of the record that a list lacks was deleted only if the store, asked for this snapshot, does not have it.
//
// The record cannot tell of a snapshot that no list had. Two sessions that write the record at once may lose the names
// that the list of only one had. The next list has these names, unless it is short, too.

// recordName is the name of the record, which other programs ignore.
const recordName = "drover-snapshots"

// recordLimit bounds the sealed and the plain bytes of the record.
const recordLimit = 32 << 20

// snapshotRecord is the JSON of the record.
type snapshotRecord struct {
	// First is when the store got the first record, by the store's clock: sinceInit in a record of Init, and zero in
	// the first record of a repository that had snapshots before.
	First     time.Time `json:"first,omitzero"`
	Snapshots []blob.ID `json:"snapshots"`
}

// sinceInit is the First of a record that is as old as the repository.
var sinceInit = time.Unix(0, 0).UTC()

// SnapshotList is a list of snapshots, compared with the record.
type SnapshotList struct {
	Files    []SnapshotFile // in the store's list
	Unlisted []SnapshotFile // in the record and in the store, but not in the store's list: the list is short

	r          *Repository
	recorded   bool      // there was a record
	unanswered []blob.ID // in the record alone, and the store does not say whether it has them
	why        error     // of the first one
	first      time.Time // of the record
	changed    bool      // there was no record, or the record has other names
}

// ListRecorded is ListSnapshots, and asks the store for each snapshot of the record that the list lacks: one request
// for each snapshot that was deleted since the last Save. A snapshot of which the store does not say whether it exists
// stays in the record.
func (r *Repository) ListRecorded(ctx context.Context) (*SnapshotList, error) {
	record, err := r.readRecord(ctx) // before the list, which has all that the record has
	if err != nil {
		return nil, err
	}
	l := &SnapshotList{r: r, recorded: record != nil}
	if l.Files, err = r.ListSnapshots(ctx); err != nil {
		return nil, err
	}
	var recorded []blob.ID
	if l.recorded {
		l.first, recorded = record.First, record.Snapshots
	}
	l.Unlisted, l.unanswered, l.why = r.findUnlisted(ctx, l.Files, recorded)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	was, is := map[blob.ID]struct{}{}, map[blob.ID]struct{}{}
	for _, id := range recorded {
		was[id] = struct{}{}
	}
	for _, f := range l.All() {
		is[f.ID] = struct{}{}
	}
	for _, id := range l.unanswered {
		is[id] = struct{}{}
	}
	l.changed = !l.recorded || !maps.Equal(was, is)
	return l, nil
}

// All are the snapshots in the store.
func (l *SnapshotList) All() []SnapshotFile { return slices.Concat(l.Files, l.Unlisted) }

// Check returns an error of kind Unavailable if the list is short, or may be.
func (l *SnapshotList) Check() error {
	if len(l.unanswered) > 0 {
		return api.Errorf(api.Unavailable, "the store does not say whether it has snapshot %.8s, which its lists lack: %w",
			l.unanswered[0], l.why)
	}
	if len(l.Unlisted) == 0 {
		return nil
	}
	return api.Errorf(api.Unavailable, "the store has %s that its lists lack, such as %s; repair the lists of the folder "+
		"or bucket, or delete these snapshots", api.CountText(len(l.Unlisted), "snapshot"), l.Unlisted[0].file.Name)
}

// Save writes the record, unless it has the names of the list.
func (l *SnapshotList) Save(ctx context.Context) error {
	if !l.changed {
		return nil
	}
	record := snapshotRecord{First: l.first, Snapshots: []blob.ID{}}
	for _, f := range l.All() {
		record.Snapshots = append(record.Snapshots, f.ID)
	}
	record.Snapshots = append(record.Snapshots, l.unanswered...)
	if err := l.r.saveRecord(ctx, record); err != nil {
		return api.Errorf(api.KindOf(err), "repository %.8s: the snapshot record cannot be written: %w", l.r.ID(), err)
	}
	return nil
}

// age is the age of the first record when the store got the object now. A clock of the store that was set back, or that
// the store does not tell, does not make a record young for ever.
func (l *SnapshotList) age(now target.Object) time.Duration {
	switch {
	case !l.recorded:
		return 0
	case l.first.IsZero() || now.Modified.IsZero():
		return math.MaxInt64
	}
	return now.Modified.Sub(l.first).Abs()
}

func (r *Repository) saveRecord(ctx context.Context, record snapshotRecord) error {
	slices.SortFunc(record.Snapshots, func(a, b blob.ID) int { return bytes.Compare(a[:], b[:]) })
	plain, err := json.Marshal(record)
	if err != nil {
		return err
	}
	_, sealed := r.sealFile(plain)
	// Others may have replaced the record before a Put ends late, so such a Put takes nothing back.
	ctx = target.WithUndo(ctx, func(context.Context, target.Store) error { return nil })
	return r.store.Put(ctx, recordName, sealed)
}

// readRecord returns nil without a record, and in place of a damaged one: then the list is the first one. Another
// session may replace the record during a read, so a record counts as damaged after several reads.
func (r *Repository) readRecord(ctx context.Context) (record *snapshotRecord, err error) {
	for range 3 {
		if record, err = r.tryReadRecord(ctx); !api.Is(err, api.Corrupt) {
			break
		}
	}
	switch {
	case api.Is(err, api.NotFound), api.Is(err, api.Corrupt):
		return nil, nil //nolint:nilnil // no record
	case err != nil:
		return nil, api.Errorf(api.KindOf(err), "repository %.8s: the snapshot record cannot be read: %w", r.ID(), err)
	}
	return record, nil
}

func (r *Repository) tryReadRecord(ctx context.Context) (*snapshotRecord, error) {
	record := &snapshotRecord{}
	o, err := r.store.Stat(ctx, recordName)
	var sealed []byte
	if err == nil {
		sealed, err = readObject(ctx, r.store, o, recordLimit)
	}
	if err == nil {
		err = r.openFile(sealed, recordLimit, func(plain io.Reader) error {
			if err := json.NewDecoder(plain).Decode(record); err != nil {
				return api.Errorf(api.Corrupt, "no JSON of a snapshot record: %w", err)
			}
			return nil
		})
	}
	if err != nil {
		return nil, err
	}
	if record.First.IsZero() {
		record.First = o.Modified
	}
	return record, nil
}

// findUnlisted asks the store for each known snapshot that a list lacks, and returns those that exist, and those of
// which the store does not say so, with the first error.
func (r *Repository) findUnlisted(ctx context.Context, files []SnapshotFile, known []blob.ID) (existing []SnapshotFile,
	unanswered []blob.ID, why error) {
	listed := make(map[blob.ID]struct{}, len(files))
	for _, f := range files {
		listed[f.ID] = struct{}{}
	}
	lacking := slices.DeleteFunc(slices.Clone(known), func(id blob.ID) bool {
		_, is := listed[id]
		return is
	})
	found, errs := make([]SnapshotFile, len(lacking)), make([]error, len(lacking))
	var group errgroup.Group
	group.SetLimit(snapshotReaders)
	for i, id := range lacking {
		group.Go(func() error {
			found[i], errs[i] = r.FindSnapshot(ctx, id)
			return nil
		})
	}
	_ = group.Wait() // errs has all
	for i, err := range errs {
		switch {
		case err == nil:
			existing = append(existing, found[i])
		case !api.Is(err, api.NotFound):
			unanswered, why = append(unanswered, lacking[i]), cmp.Or(why, err)
		}
	}
	return existing, unanswered, why
}
