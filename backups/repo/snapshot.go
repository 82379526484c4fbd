package repo

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// snapshotLimit bounds the sealed and the plain bytes of a snapshot. restic's snapshots list paths and excludes.
const snapshotLimit = 4 << 20

// snapshotReaders is how many snapshots are read at once: the reads of small objects mostly wait for the store.
const snapshotReaders = 16

// Snapshot is a backup in the repository: a folder at a time. Only Tree is necessary; programs group and select
// snapshots by the other fields.
type Snapshot struct {
	ID       blob.ID   `json:"-"`
	Time     time.Time `json:"time"`
	Parent   *blob.ID  `json:"parent,omitempty"` // an earlier snapshot of the same paths
	Tree     *blob.ID  `json:"tree"`
	Paths    []string  `json:"paths"`
	Hostname string    `json:"hostname,omitempty"`
	Username string    `json:"username,omitempty"`
	Tags     []string  `json:"tags,omitempty"`
	Program  string    `json:"program_version,omitempty"`
}

// SnapshotFile is the object of a snapshot in a list.
type SnapshotFile struct {
	ID   blob.ID
	file namedFile
}

// Stored is when the store got the object, by the store's clock; zero: not known.
func (f SnapshotFile) Stored() time.Time { return f.file.Modified }

// SaveSnapshot writes the snapshot, the commit point of a backup: before, the caller has flushed the Writer of all
// blobs, and knows by Blobs.IsCurrent that no sweep hid them.
func (r *Repository) SaveSnapshot(ctx context.Context, s Snapshot) (blob.ID, error) {
	if s.Tree == nil || len(s.Paths) == 0 {
		return blob.ID{}, api.Errorf(api.Invalid, "repository %.8s: a snapshot without tree or paths", r.ID())
	}
	content, err := json.Marshal(s)
	if err != nil {
		return blob.ID{}, err
	}
	if len(content) > snapshotLimit {
		return blob.ID{}, api.Errorf(api.Invalid, "repository %.8s: a snapshot has %d bytes, at most %d are allowed", r.ID(),
			len(content), snapshotLimit)
	}
	id, err := r.saveFile(ctx, snapshotsFolder, content)
	if err != nil {
		return id, api.Errorf(api.KindOf(err), "repository %.8s: a snapshot cannot be written: %w", r.ID(), err)
	}
	return id, nil
}

// ListSnapshots lists the snapshots of all programs, in any order.
func (r *Repository) ListSnapshots(ctx context.Context) ([]SnapshotFile, error) {
	files, err := listFolder(ctx, r.store, snapshotsFolder)
	if err != nil {
		return nil, err
	}
	snapshots := make([]SnapshotFile, len(files))
	for i, f := range files {
		snapshots[i] = SnapshotFile{f.id, f}
	}
	return snapshots, nil
}

// FindSnapshot is ListSnapshots for a single snapshot. A missing snapshot is an error of kind NotFound.
func (r *Repository) FindSnapshot(ctx context.Context, id blob.ID) (SnapshotFile, error) {
	o, err := r.store.Stat(ctx, snapshotsFolder+id.String())
	if err != nil {
		return SnapshotFile{}, api.Errorf(api.KindOf(err), "repository %.8s: snapshot %.8s: %w", r.ID(), id, err)
	}
	return SnapshotFile{id, namedFile{o, id}}, nil
}

// LoadSnapshots reads snapshots, several at once, and calls each with the place of a snapshot in files, also from
// several goroutines. err is that of LoadSnapshot. Errors that each returns end LoadSnapshots.
func (r *Repository) LoadSnapshots(ctx context.Context, files []SnapshotFile,
	each func(place int, s Snapshot, err error) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(snapshotReaders)
	for i, f := range files {
		group.Go(func() error {
			s, err := r.LoadSnapshot(ctx, f)
			return each(i, s, err)
		})
	}
	return group.Wait()
}

// LoadSnapshot reads a snapshot, from the cache if another session of the node read the snapshot before. A snapshot
// that was deleted after the list may be an error of kind NotFound. A damaged snapshot is one of kind Corrupt.
func (r *Repository) LoadSnapshot(ctx context.Context, f SnapshotFile) (Snapshot, error) {
	s := Snapshot{ID: f.ID}
	sealed, err := r.readSnapshot(ctx, f.file)
	if err == nil {
		err = r.openFile(sealed, snapshotLimit, func(plain io.Reader) error {
			if err := json.NewDecoder(plain).Decode(&s); err != nil {
				return api.Errorf(api.Corrupt, "no JSON of a snapshot: %w", err)
			}
			s.Time = api.BoundTime(s.Time)
			return nil
		})
	}
	if err == nil && s.Tree == nil {
		err = api.Errorf(api.Corrupt, "the snapshot has no tree")
	}
	if err != nil {
		return s, api.Errorf(api.KindOf(err), "repository %.8s: snapshot %.8s: %w", r.ID(), f.ID, err)
	}
	return s, nil
}

// readSnapshot reads the sealed bytes of a snapshot. The bytes in the cache count only if they match the name.
func (r *Repository) readSnapshot(ctx context.Context, f namedFile) ([]byte, error) {
	if f.Size > 0 && f.Size <= snapshotLimit {
		b := make([]byte, f.Size)
		if r.snapshots.ReadAt(f.id, b, 0) && blob.Sum(b) == f.id {
			return b, nil
		}
	}
	b, err := readNamed(ctx, r.store, f, snapshotLimit)
	if err == nil {
		r.snapshots.WriteAt(f.id, b, 0)
	}
	return b, err
}

// DeleteSnapshots deletes snapshots, the commit point of the deletion of backups. A sweep frees the space.
func (r *Repository) DeleteSnapshots(ctx context.Context, ids ...blob.ID) error {
	names := make([]string, len(ids))
	for i, id := range ids {
		names[i] = snapshotsFolder + id.String()
	}
	if err := r.store.Delete(ctx, names...); err != nil {
		return api.Errorf(api.KindOf(err), "repository %.8s: %d snapshots cannot be deleted: %w", r.ID(), len(ids), err)
	}
	return nil
}
