package targets

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/tags"
)

// foundBackup is a snapshot that is a backup of Drover.
type foundBackup struct {
	snapshot repo.Snapshot
	facts    tags.Facts
	stored   time.Time // by the store's clock; zero: not known
}

// pull gives each backup of Drover in the store an object with a status. known are the objects by snapshot.
func (v *visit) pull(ctx context.Context, r snapshotLister, files []repo.SnapshotFile,
	known map[blob.ID]api.StoredBackup, result *visitResult) error {
	var unknown, started []repo.SnapshotFile // without an object; with one that has no status
	foreign := map[blob.ID]struct{}{}        // without those that the store deleted
	listed := map[blob.ID]api.StoredBackup{} // with an object that has a status
	for _, f := range files {
		if _, is := v.memory.foreign[f.ID]; is {
			foreign[f.ID] = struct{}{}
			continue
		}
		switch b := known[f.ID]; {
		case b == nil:
			unknown = append(unknown, f)
		case b.Common().State == api.BackupNew && b.GetDeletionTimestamp() == nil:
			started = append(started, f)
		default:
			listed[f.ID] = b
			if err := v.correctInstant(ctx, b, f.Stored()); err != nil {
				return err
			}
		}
	}
	v.memory.foreign = foreign
	facts, err := v.describeUnlisted(ctx, r, unknown)
	if err != nil {
		return err
	}
	result.backups, result.counted = len(listed)+len(started)+len(v.memory.unlisted), true
	defer func() { result.unlisted = len(v.memory.unlisted) }() // at an error, too
	create, displaced, err := v.chooseUnlisted(ctx, unknown, listed, len(started), result)
	if err != nil {
		return err
	}
	v.reportProgress(result, len(create))
	if err := v.deleteDisplaced(ctx, displaced); err != nil {
		return err
	}
	for batch := range slices.Chunk(append(started, create...), pullBatch) {
		found, err := v.loadFound(ctx, r, batch, facts)
		if err != nil {
			return err
		}
		if err := v.pullFound(ctx, found, known, result); err != nil {
			return err
		}
		v.reportProgress(result, len(create))
	}
	return nil
}

const (
	// pullBatch bounds the memory of a visit: how many found backups it holds at once.
	pullBatch = 1000
	// pullWorkers is how many objects are made or released at once, so that the API server writes many with one fsync.
	pullWorkers = 16
	// quietPull is how many objects a visit makes before it reports its progress. A target whose store has few backups is
	// available when each has an object.
	quietPull = 100
)

// loadFound returns the found backups of a batch, in its order. facts are read already.
func (v *visit) loadFound(ctx context.Context, r snapshotLister, batch []repo.SnapshotFile,
	facts map[blob.ID]foundBackup) (found []foundBackup, err error) {
	var unread []repo.SnapshotFile
	for _, f := range batch {
		if _, is := facts[f.ID]; !is {
			unread = append(unread, f)
		}
	}
	loaded, err := v.loadFacts(ctx, r, unread)
	if err != nil {
		return nil, err
	}
	read := map[blob.ID]foundBackup{}
	for _, f := range loaded {
		read[f.snapshot.ID] = f
	}
	for _, f := range batch {
		if b, is := facts[f.ID]; is {
			found = append(found, b)
		} else if b, is := read[f.ID]; is {
			found = append(found, b)
		}
	}
	return found, nil
}

// pullFound gives found backups objects with a status, several at once. The backups that got none stay unlisted.
func (v *visit) pullFound(ctx context.Context, found []foundBackup, known map[blob.ID]api.StoredBackup,
	result *visitResult) error {
	listed, created := make([]bool, len(found)), make([]bool, len(found))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(pullWorkers)
	for i, f := range found {
		group.Go(func() (err error) {
			if b := known[f.snapshot.ID]; b != nil {
				return v.describe(ctx, copyOf(b), f)
			}
			listed[i], created[i], err = v.pullBackup(ctx, f)
			return err
		})
	}
	err := group.Wait()
	for i, f := range found {
		if listed[i] {
			delete(v.memory.unlisted, f.snapshot.ID)
		}
		if created[i] {
			result.found++
		}
	}
	return err
}

// objects are the UIDs of the Backups, except those that the cache knows as Backups of other targets, which may have
// the same store. A snapshot of such a Backup which the Backup's status does not name is that of a failed attempt, may
// lack blobs, and becomes no Backup: the deletion of the Backup deletes the snapshot.
//
// The cache may be late, so the UIDs come from the API server, without specs and statuses, which cost the server and
// the node most of the work of such a list.
func (v *visit) objects(ctx context.Context) (map[api.UID]bool, error) {
	uids := map[api.UID]bool{}
	for _, kind := range []client.ObjectList{&api.BackupList{}, &api.BackupBackingImageList{}} {
		gvk, err := v.GroupVersionKindFor(kind)
		if err != nil {
			return nil, api.Explain(err, "list backups")
		}
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(gvk)
		if err := v.repositories.live.List(ctx, list); err != nil {
			return nil, api.Explain(err, "list backups")
		}
		for i := range list.Items {
			uids[api.UID(list.Items[i].UID)] = true
		}
	}
	cached, err := ListBackups(ctx, v.Client, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, err
	}
	for _, b := range cached {
		if b.Target() != v.target.Name {
			delete(uids, api.UID(b.GetUID()))
		}
	}
	return uids, nil
}

// loadFacts reads snapshots, and remembers those that are no backups of Drover. It skips damaged snapshots, and
// snapshots that were deleted since the list.
func (v *visit) loadFacts(ctx context.Context, r snapshotLister, files []repo.SnapshotFile) ([]foundBackup, error) {
	all := make([]*foundBackup, len(files))
	foreign := make([]bool, len(files))
	err := r.LoadSnapshots(ctx, files, func(i int, s repo.Snapshot, err error) error {
		if api.Is(err, api.Busy) { // a later visit looks again
			return nil
		}
		if repo.IsDamage(err) {
			v.log.Warn("a snapshot of the repository is skipped", "target", v.target.Name, "err", err)
			return nil
		}
		if err != nil {
			return err
		}
		facts, ours := tags.Parse(s.Tags)
		if foreign[i] = !ours; ours {
			all[i] = &foundBackup{s, facts, files[i].Stored()}
		}
		return nil
	})
	if err != nil {
		return nil, storeFault(ctx, err)
	}
	var found []foundBackup
	for i, f := range files {
		if foreign[i] {
			v.memory.foreign[f.ID] = struct{}{}
		}
		if all[i] != nil {
			found = append(found, *all[i])
		}
	}
	return found, nil
}

// pullBackup creates the object of a snapshot, and describes it. While an object of the name has not ended, the
// snapshot may be its: a later visit decides.
func (v *visit) pullBackup(ctx context.Context, f foundBackup) (listed, created bool, err error) {
	id := f.snapshot.ID
	for _, name := range pulledNames(f.facts.Backup, id) {
		b := v.newBackup(name, f)
		err := v.Create(ctx, b)
		if created = err == nil; apierrors.IsAlreadyExists(err) {
			b = emptyBackup(f)
			err = v.repositories.live.Get(ctx, client.ObjectKey{Name: name}, b)
		}
		if err != nil {
			return false, false, ignoreRace(api.Explain(err, "backup %s: create the object", name), err)
		}
		existing, ok := snapshotOf(b)
		switch {
		case ok && existing == id && b.Target() == v.target.Name:
			return true, created, v.describe(ctx, b, f)
		case b.Target() == v.target.Name && !b.Ended():
			return false, false, nil
		}
	}
	v.log.Warn("a backup of the store gets no object: other Backups have its names", "target", v.target.Name,
		"backup", f.facts.Backup, "snapshot", id)
	return false, false, nil
}

// pulledNames are the names that the Backup of a snapshot may have, in order of preference.
func pulledNames(name string, id blob.ID) []string {
	suffix := nameSuffix(id)
	// No name has a dot before the suffix.
	return []string{name, strings.TrimRight(name[:min(len(name), tags.NameLimit-len(suffix))], ".") + suffix}
}

// nameSuffix ends the second name of a found backup.
func nameSuffix(id blob.ID) string { return "-" + id.String()[:8] }

func (v *visit) newBackup(name string, f foundBackup) api.StoredBackup {
	if f.facts.IsImage() {
		return &api.BackupBackingImage{
			ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer}, Labels: map[string]string{
				api.LabelImage: api.LabelValue(f.facts.Image), api.LabelBackupTarget: api.LabelValue(v.target.Name)}},
			Spec: api.BackupBackingImageSpec{BackupTargetName: v.target.Name, BackingImageName: f.facts.Image,
				Digest: f.facts.ImageDigest, Labels: maps.Clone(f.facts.Labels), SnapshotID: f.snapshot.ID.String()},
		}
	}
	return &api.Backup{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer}, Labels: map[string]string{
			api.LabelVolume: api.LabelValue(f.facts.Volume), api.LabelBackupTarget: api.LabelValue(v.target.Name)}},
		Spec: api.BackupSpec{BackupTargetName: v.target.Name, Volume: f.facts.Volume, Labels: maps.Clone(f.facts.Labels),
			SnapshotID: f.snapshot.ID.String()},
	}
}

// emptyBackup is an empty object of the kind of a backup.
func emptyBackup(f foundBackup) api.StoredBackup {
	if f.facts.IsImage() {
		return &api.BackupBackingImage{}
	}
	return &api.Backup{}
}

// copyOf is a deep copy.
func copyOf(b api.StoredBackup) api.StoredBackup { return b.DeepCopyObject().(api.StoredBackup) }

// describe writes the status of an object whose backup was found in the store.
func (v *visit) describe(ctx context.Context, b api.StoredBackup, f foundBackup) error {
	if b.FoundSnapshot() == "" || b.Common().State != api.BackupNew {
		return nil
	}
	v.setStatus(b, f)
	err := v.Status().Update(ctx, b)
	return ignoreRace(api.Explain(err, "backup %s: write the status", b.GetName()), err)
}

// setStatus sets the status of an object whose backup was found in the store.
func (v *visit) setStatus(b api.StoredBackup, f foundBackup) {
	f.facts.Backup = b.GetName() // the name of the tag may be that of another object, which a restore would take instead
	url, id, now := v.target.Spec.BackupTargetURL, f.snapshot.ID.String(), v.opts.Now()
	switch b := b.(type) {
	case *api.Backup:
		b.Status = f.facts.Status(url, id, f.snapshot.Time, now)
	case *api.BackupBackingImage:
		b.Status = f.facts.ImageStatus(url, id, f.snapshot.Time, now)
	}
	v.setStored(b, f.stored)
}

// setStored notes when the store got a backup of a source whose clock is ahead.
func (v *visit) setStored(b api.StoredBackup, stored time.Time) {
	if v.isAhead(b, stored) {
		b.Common().StoredAt = stored.UTC().Format(time.RFC3339)
	}
}

// isAhead reports whether a backup claims an instant after its object in the store and after now, by two clocks. The
// store's clock alone may be behind, and would order new backups below old ones.
func (v *visit) isAhead(b api.StoredBackup, stored time.Time) bool {
	at := b.CutAt()
	return !stored.IsZero() && stored.Before(at) && at.After(v.opts.Now())
}

// correctInstant is setStored for an object with a status: the source may be this cluster.
func (v *visit) correctInstant(ctx context.Context, cached api.StoredBackup, stored time.Time) error {
	if cached.Common().State != api.BackupCompleted || cached.GetDeletionTimestamp() != nil || !v.isAhead(cached, stored) {
		return nil
	}
	b := copyOf(cached)
	v.setStored(b, stored)
	err := v.Status().Update(ctx, b)
	return ignoreRace(api.Explain(err, "backup %s: write the status", b.GetName()), err)
}

// backupsOf returns the Backups and BackupBackingImages of a target. The caller does not change them.
func backupsOf(ctx context.Context, c client.Reader, target string) ([]api.StoredBackup, error) {
	all, err := ListBackups(ctx, c, client.UnsafeDisableDeepCopy)
	return slices.Clip(slices.DeleteFunc(all, func(b api.StoredBackup) bool { return b.Target() != target })), err
}

// ListBackups lists the Backups and BackupBackingImages of all targets.
func ListBackups(ctx context.Context, c client.Reader, o ...client.ListOption) (all []api.StoredBackup, err error) {
	var volumes api.BackupList
	var images api.BackupBackingImageList
	if err := errors.Join(c.List(ctx, &volumes, o...), c.List(ctx, &images, o...)); err != nil {
		return nil, api.Explain(err, "list backups")
	}
	all = make([]api.StoredBackup, 0, len(volumes.Items)+len(images.Items))
	for i := range volumes.Items {
		all = append(all, &volumes.Items[i])
	}
	for i := range images.Items {
		all = append(all, &images.Items[i])
	}
	return all, nil
}

// snapshotOf returns the snapshot of the repository that a backup names: the backup has ended.
func snapshotOf(b api.StoredBackup) (blob.ID, bool) {
	id, err := blob.Parse(cmp.Or(b.FoundSnapshot(), b.Common().SnapshotID))
	return id, err == nil
}

// ignoreRace returns explained, or nil if cause says that another program changed or deleted the object meanwhile: the
// change brings an event or the next visit looks again.
func ignoreRace(explained, cause error) error {
	if apierrors.IsConflict(cause) || apierrors.IsNotFound(cause) {
		return nil
	}
	return explained
}
