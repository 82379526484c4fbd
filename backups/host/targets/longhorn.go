package targets

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/longhorn/digests"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
	"drover.io/drover/block"
)

// errLonghorn says that the store has backups of Longhorn, and no repository.
var errLonghorn = errors.New("the store is one of Longhorn")

// compareLonghorn is compareBackups for a store of Longhorn. The visit writes nothing into such a store.
func (v *visit) compareLonghorn(ctx context.Context, c *connection, result *visitResult) error {
	is, err := longhorn.IsLonghorn(ctx, c.store)
	if err != nil {
		return storeFault(ctx, err)
	}
	if !is {
		return faultf(api.ReasonLostRepository, "the store has no backups of Longhorn any more; mount or restore the folder "+
			"or bucket, or make the BackupTarget again to use the store for backups of Drover")
	}
	result.format = api.FormatLonghorn
	return v.compareBackups(ctx, &longhornSnapshots{store: v.repositories.longhornStore(c), log: v.log,
		target: v.target.Name, volumes: map[string]func() (longhorn.Volume, error){}}, result)
}

// longhornSnapshots lists the backups of Longhorn as if they were snapshots of a repository.
type longhornSnapshots struct {
	store  *longhorn.Store
	target string
	log    *slog.Logger
	names  map[blob.ID]longhorn.Name
	images map[blob.ID]string // names

	mu      sync.Mutex
	volumes map[string]func() (longhorn.Volume, error) // by name
}

// ListSnapshots implements snapshotLister.
func (l *longhornSnapshots) ListSnapshots(ctx context.Context) ([]repo.SnapshotFile, error) {
	names, err := l.store.ListBackups(ctx)
	if err != nil {
		return nil, err
	}
	images, err := l.store.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	l.names, l.images = make(map[blob.ID]longhorn.Name, len(names)), make(map[blob.ID]string, len(images))
	files := make([]repo.SnapshotFile, 0, len(names)+len(images))
	for _, n := range names {
		files = append(files, repo.SnapshotFile{ID: n.ID()})
		l.names[n.ID()] = n
	}
	for _, name := range images {
		id := blob.ID(longhorn.ImageID(name))
		files = append(files, repo.SnapshotFile{ID: id})
		l.images[id] = name
	}
	return files, nil
}

// Has implements snapshotLister. The lists alone decide about a backup whose name in the store is unknown, because a
// user chose the object's name or the name was cut: Drover deletes nothing in such a store.
func (l *longhornSnapshots) Has(ctx context.Context, b api.StoredBackup) (bool, error) {
	id, _ := snapshotOf(b)
	for _, name := range []string{b.GetName(), strings.TrimSuffix(b.GetName(), nameSuffix(id))} {
		var has bool
		var err error
		switch b := b.(type) {
		case *api.Backup:
			if n := (longhorn.Name{Volume: b.Spec.Volume, Backup: name}); n.ID() == id {
				has, err = l.store.HasBackup(ctx, n)
			}
		case *api.BackupBackingImage:
			if longhorn.ImageID(name) == id {
				has, err = l.store.HasImage(ctx, name)
			}
		}
		if has || err != nil {
			return has, err
		}
	}
	return false, nil
}

// longhornReaders is how many backups are read at once: the reads of small objects mostly wait for the store.
const longhornReaders = 8

// LoadSnapshots implements snapshotLister.
func (l *longhornSnapshots) LoadSnapshots(ctx context.Context, files []repo.SnapshotFile,
	each func(place int, s repo.Snapshot, err error) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(longhornReaders)
	for i, f := range files {
		group.Go(func() error {
			s, err := l.loadSnapshot(ctx, f)
			return each(i, s, err)
		})
	}
	return group.Wait()
}

// loadSnapshot reads a backup as a snapshot. A backup that no Backup can stand for has no tags.
func (l *longhornSnapshots) loadSnapshot(ctx context.Context, f repo.SnapshotFile) (repo.Snapshot, error) {
	if name, is := l.images[f.ID]; is {
		return l.loadImage(ctx, f.ID, name)
	}
	s, n := repo.Snapshot{ID: f.ID}, l.names[f.ID]
	b, err := l.store.ReadBackup(ctx, n)
	var volume longhorn.Volume
	if err == nil {
		volume, err = l.readVolume(ctx, n.Volume)
	}
	if api.Is(err, api.Unsupported) {
		l.log.Warn("a backup of Longhorn's store is skipped", "target", l.target, "err", err)
		return s, nil
	} else if err != nil {
		return s, err
	}
	s.Time, s.Tags = b.Created, longhornFacts(&b, &volume).Tags()
	if _, ok := tags.Parse(s.Tags); !ok {
		l.log.Warn("a backup of Longhorn's store is skipped: no object can have its names", "target", l.target,
			"volume", n.Volume, "backup", n.Backup)
	}
	return s, nil
}

// loadImage is loadSnapshot for a backing image.
func (l *longhornSnapshots) loadImage(ctx context.Context, id blob.ID, name string) (repo.Snapshot, error) {
	s := repo.Snapshot{ID: id}
	img, err := l.store.ReadImage(ctx, name)
	if err != nil {
		return s, err
	}
	s.Time, s.Tags = img.Completed, longhornImageFacts(&img).Tags()
	if _, ok := tags.Parse(s.Tags); !ok {
		l.log.Warn("an image of Longhorn's store is skipped: no object can have its name, or its checksum is missing",
			"target", l.target, "image", name)
	}
	return s, nil
}

// longhornImageFacts are the facts of a backing image of Longhorn. The digest in a repository names the disk inside the
// image; here it names the file, by a part of the checksum.
func longhornImageFacts(img *longhorn.Image) tags.Facts {
	id := blob.ID(longhorn.ImageID(img.Name))
	return tags.Facts{Backup: img.Name, Image: img.Name, Object: objectOf(id), VolumeSize: img.Size, Labels: img.Labels,
		ImageDigest: imageDigest(img.Checksum), ImageChecksum: img.Checksum}
}

// imageDigest names the file of a backing image by a part of its checksum.
func imageDigest(checksum string) string { return checksum[:min(len(checksum), 2*len(blob.ID{}))] }

// readVolume reads the description of a volume once in a visit.
func (l *longhornSnapshots) readVolume(ctx context.Context, name string) (longhorn.Volume, error) {
	l.mu.Lock()
	read := l.volumes[name]
	if read == nil {
		read = sync.OnceValues(func() (longhorn.Volume, error) { return l.store.ReadVolume(ctx, name) })
		l.volumes[name] = read
	}
	l.mu.Unlock()
	return read()
}

// longhornFacts are the facts of a backup of Longhorn.
func longhornFacts(b *longhorn.Backup, v *longhorn.Volume) tags.Facts {
	f := tags.Facts{Backup: b.Backup, Volume: b.Volume, Object: objectOf(b.ID()), VolumeSize: v.Size,
		Uploaded: b.Uploaded, Mode: api.BackupFull, Labels: b.Labels}
	if b.Incremental {
		f.Mode = api.BackupIncremental
	}
	if !b.SnapshotCreated.IsZero() {
		f.SnapshotCreated = b.SnapshotCreated.UTC().Format(time.RFC3339)
	}
	if isObjectName(b.Snapshot) {
		f.Snapshot = b.Snapshot
	}
	if isObjectName(v.Image) {
		f.Image, f.ImageChecksum = v.Image, v.ImageChecksum
		f.ImageDigest = imageDigest(v.ImageChecksum)
	}
	if isObjectName(v.StorageClass) {
		f.Record = &api.RecordedVolume{StorageClassName: v.StorageClass}
	}
	return f
}

func isObjectName(name string) bool {
	return len(name) <= tags.NameLimit && len(validation.IsDNS1123Subdomain(name)) == 0
}

// objectOf is a UID in place of that of an object, which tags demand: no object has the UID.
func objectOf(id blob.ID) api.UID {
	text := id.String()
	return api.UID(text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:32])
}

// keepLonghorn forgets Backups of a store of Longhorn that a user deleted: the store keeps the backups.
func (r *targetReconciler) keepLonghorn(t *api.BackupTarget, rec *targetRecord, deleted []api.StoredBackup) {
	for _, b := range deleted {
		rec.deleted[b.GetUID()] = false
		r.events.Eventf(t, nil, corev1.EventTypeNormal, "BackupKept", "Delete", "backup %s of %s stays in the store: "+
			"Drover deletes nothing in a store of Longhorn, and lists the backup again", b.GetName(), b.Subject())
	}
}

// Format returns the format of a BackupTarget's store; empty: not known yet.
func (r *Repositories) Format(ctx context.Context, name string) (string, error) {
	t := &api.BackupTarget{}
	err := r.live.Get(ctx, client.ObjectKey{Name: name}, t)
	return t.Status.Format, api.Explain(err, "backup target %s", name)
}

// LonghornBackup is an open backup in a store of Longhorn.
type LonghornBackup struct {
	*longhorn.Opened
	Facts         tags.Facts
	Created       time.Time
	ImageChecksum string // SHA-512 of the volume's image; empty: not known
	close         func()
}

var _ block.ChunkedBackup = (*LonghornBackup)(nil)

// Close implements block.Backup.
func (b *LonghornBackup) Close() error {
	err := b.Opened.Close()
	b.close()
	return err
}

// OpenLonghorn opens the backup with an ID in a store of Longhorn. The context ends the use of the backup, too. Errors
// have the kinds of Open, and those of package longhorn; NotFound: the store has no such backup, or the backing image
// of the volume is missing.
func (r *Repositories) OpenLonghorn(ctx context.Context, name, volume string, id blob.ID) (
	o *LonghornBackup, err error) {
	release, err := r.withLonghorn(ctx, name, func(store *longhorn.Store) (err error) {
		o, err = openLonghorn(ctx, store, volume, id, r.images)
		return err
	})
	if err != nil {
		return nil, err
	}
	o.close = release
	return o, nil
}

// OpenLonghornImage is OpenLonghorn for the backing image of a name, whose ID is id.
func (r *Repositories) OpenLonghornImage(ctx context.Context, name, image string, id blob.ID) (
	block.FileBackup, error) {
	if longhorn.ImageID(image) != id {
		return nil, api.Errorf(api.NotFound, "the store of Longhorn has no image %s with the ID %.8s", image, id)
	}
	o := &longhornImage{}
	release, err := r.withLonghorn(ctx, name, func(store *longhorn.Store) (err error) {
		o.Opened, err = store.OpenImage(ctx, image)
		return err
	})
	if err != nil {
		return nil, err
	}
	o.close = release
	return o, nil
}

// digestsFile is the table of digests in the folder for index tables.
const digestsFile = "longhorn-digests"

// openDigests opens the table of digests on the first call.
func (r *Repositories) openDigests() func() *digests.Table {
	return sync.OnceValue(func() *digests.Table {
		t, err := digests.Open(filepath.Join(r.cache, digestsFile))
		if err != nil {
			r.log.Warn("digests of Longhorn's backups cannot be kept, so their restores begin late", "err", err)
		}
		return t
	})
}

// longhornStore is the store of a connection as Longhorn's.
func (r *Repositories) longhornStore(c *connection) *longhorn.Store {
	return longhorn.New(c.store, longhorn.Options{Cache: c.options.Cache, Digests: r.digests(), Memory: r.blocks,
		Reads: r.memory.Reads})
}

// withLonghorn calls open with the store of Longhorn behind a target, and returns what releases the store after the
// use.
func (r *Repositories) withLonghorn(ctx context.Context, name string, open func(*longhorn.Store) error) (
	release func(), err error) {
	t := &api.BackupTarget{}
	if err := r.live.Get(ctx, client.ObjectKey{Name: name}, t); err != nil {
		return nil, api.Explain(err, "backup target %s", name)
	}
	return r.withLonghornOf(ctx, t, open)
}

// withLonghornOf is withLonghorn for a target that was read.
func (r *Repositories) withLonghornOf(ctx context.Context, t *api.BackupTarget, open func(*longhorn.Store) error) (
	release func(), err error) {
	secret, err := r.readSecret(ctx, t)
	if err != nil {
		return nil, openError(t, err)
	}
	c, err := r.connect(ctx, t, secret)
	if err != nil {
		return nil, openError(t, err)
	}
	if err := open(r.longhornStore(c)); err != nil {
		r.closeConnection(c)
		return nil, openError(t, err)
	}
	return sync.OnceFunc(func() { r.closeConnection(c) }), nil
}

// longhornImage is the file of a backing image.
type longhornImage struct {
	*longhorn.Opened
	close func()
}

// File implements block.FileBackup.
func (i *longhornImage) File() io.ReaderAt { return i.Opened }

// Close implements block.Backup.
func (i *longhornImage) Close() error {
	err := i.Opened.Close()
	i.close()
	return err
}

func openLonghorn(ctx context.Context, store *longhorn.Store, volume string, id blob.ID, images *longhorn.Images) (
	*LonghornBackup, error) {
	names, err := store.ListBackupsOf(ctx, volume)
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		if n.ID() != id {
			continue
		}
		b, err := store.ReadBackup(ctx, n)
		if err != nil {
			return nil, err
		}
		v, err := store.ReadVolume(ctx, n.Volume)
		if err != nil {
			return nil, err
		}
		opened, err := store.OpenBackup(ctx, n, images)
		if err != nil {
			return nil, err
		}
		return &LonghornBackup{Opened: opened, Facts: longhornFacts(&b, &v), Created: b.Created,
			ImageChecksum: v.ImageChecksum}, nil
	}
	return nil, api.Errorf(api.NotFound, "the store of Longhorn has no backup %.8s of volume %s", id, volume)
}
