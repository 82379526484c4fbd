package targets

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// visit is one look at the store of a target: it opens the repository, or makes it, and compares the snapshots of the
// repository with the Backups of the target.
type visit struct {
	client.Client
	repositories *Repositories
	target       *api.BackupTarget
	claim        *api.TargetClaim // of this node, which may make the repository; nil: none
	memory       *visitMemory
	progress     *visitProgress
	opts         Options
	log          *slog.Logger

	shortErr error // the store's list lacks snapshots; nil: it does not
}

// visitMemory is what the visits of a target remember, one after the other.
type visitMemory struct {
	foreign  map[blob.ID]struct{}  // snapshots that are no backups of Drover
	unlisted map[blob.ID]listing   // backups without an object
	missing  map[blob.ID]time.Time // snapshots of Backups that the last list lacks: end of the first such list
	keys     blob.ID               // passwords and key files that agree
	count    int                   // of key files then
	usageAt  time.Time             // the last measurement of the store's use, or the first visit; zero: no visit yet
}

func newVisitMemory() *visitMemory {
	return &visitMemory{foreign: map[blob.ID]struct{}{}, unlisted: map[blob.ID]listing{}, missing: map[blob.ID]time.Time{}}
}

// visitResult is the outcome of a visit.
type visitResult struct {
	request *metav1.Time // SyncRequestedAt that the visit follows
	reason  string       // of ConditionUnavailable; "": err says nothing about the target
	err     error

	storeFacts
	keyFiles  int              // 0: not known
	shortErr  error            // the store's list lacks snapshots that the store has
	keysErr   error            // why the key files do not follow the passwords; an earlier one opens the repository
	locks     *api.LocksFact   // nil: not requested
	keyFile   *api.KeyFileFact // nil: not requested
	usage     *api.UsageFact   // nil: not measured
	listed    bool             // the fields below are known
	listedAt  time.Time
	found     int       // Backups that the visit created
	tooMany   int       // backups that get no Backup, because the target has too many
	lost      int       // Backups that the visit deleted
	missingAt time.Time // the first missing snapshot may be deleted from then on; zero: none is missing
}

func (v *visit) run(ctx context.Context) visitResult {
	result := visitResult{request: v.target.Spec.SyncRequestedAt}
	result.err = v.visitStore(ctx, &result)
	result.shortErr = v.shortErr
	switch {
	case result.err == nil:
		result.reason = api.ReasonAvailable
	case ctx.Err() == nil:
		result.reason = reasonOf(result.err)
	}
	return result
}

func (v *visit) visitStore(ctx context.Context, result *visitResult) (err error) {
	secret, err := v.repositories.readSecret(ctx, v.target)
	if err != nil {
		return err
	}
	c, err := v.repositories.connect(ctx, v.target, secret)
	if err != nil {
		return err
	}
	defer v.repositories.closeConnection(c)
	if v.target.Status.Format == api.FormatLonghorn {
		return v.compareLonghorn(ctx, c, result)
	}
	r, err := v.openOrInit(ctx, c)
	if errors.Is(err, errLonghorn) {
		return v.compareLonghorn(ctx, c, result)
	} else if err != nil {
		return err
	}
	result.format, result.repositoryID, result.encrypted = api.FormatRestic, r.ID(), c.encrypted
	if result.keysErr = v.updateKeys(ctx, r, c.passwords); result.keysErr == nil {
		result.keyFiles = v.memory.count
	}
	v.followRequests(ctx, r, c.passwords, result)
	if err := v.compareBackups(ctx, repositorySnapshots{r, v}, result); err != nil {
		return err
	}
	v.measure(ctx, r, result)
	return nil
}

// usageInterval is the time between two measurements of the store's use. Each measurement loads the index files that
// the node lacks.
const usageInterval = time.Hour

// measure measures the use of the store, if the last look was long ago; not at the first visit of the process, and not
// while a user waits for the visit: the index of a large repository takes long to read. A failure concerns nothing
// else: the next session that loads the index reports a damaged one.
func (v *visit) measure(ctx context.Context, r *repo.Repository, result *visitResult) {
	now, at := v.opts.Now(), v.memory.usageAt
	if at.IsZero() {
		v.memory.usageAt = now
	}
	asked := v.target.Spec.SyncRequestedAt
	if at.IsZero() || now.Before(at.Add(usageInterval)) || asked != nil && !asked.Equal(v.target.Status.SyncedRequest) {
		return
	}
	v.memory.usageAt = now
	usage, err := measureUsage(ctx, r, now)
	if err != nil {
		v.log.Warn("the use of a backup target is not known", "target", v.target.Name, "err", err)
		return
	}
	result.usage = usage
}

// openOrInit opens the repository. Without one it makes the repository, if the node has the claim. A store of Longhorn
// without a repository is errLonghorn.
func (v *visit) openOrInit(ctx context.Context, c *connection) (*repo.Repository, error) {
	r, err := c.open(ctx, v.target.Status.RepositoryID)
	if err == nil || reasonOf(err) != "" || !api.Is(err, api.NotFound) {
		return r, err
	}
	if is, err := longhorn.IsLonghorn(ctx, c.store); err != nil {
		return nil, storeFault(ctx, err)
	} else if is {
		return nil, errLonghorn
	}
	if v.target.Spec.ReadOnly {
		return nil, faultf(api.ReasonReadOnlyAndEmpty, "the store has no repository, and the target is read-only; correct "+
			"backupTargetURL, or set readOnly to false: Drover then makes a repository")
	}
	if v.claim == nil {
		return nil, faultf(api.ReasonNotInitialized, "the store has no repository; Drover makes one")
	}
	left := v.claim.Since.Add(initTime).Sub(v.opts.Now())
	initCtx, cancel := context.WithTimeoutCause(ctx, left,
		api.Errorf(api.Unavailable, "the store did not make a repository in %v", initTime))
	defer cancel()
	initErr := repo.Init(initCtx, c.store, c.passwords.Current, c.options)
	if initErr != nil && !api.Is(initErr, api.Exists) {
		return nil, storeFault(ctx, initErr)
	}
	r, err = c.open(ctx, "")
	if api.Is(err, api.NotFound) && reasonOf(err) == "" {
		err = storeFault(ctx, errors.Join(initErr, err))
	}
	return r, err
}

// snapshotLister lists backups as the snapshots of a repository.
type snapshotLister interface {
	ListSnapshots(ctx context.Context) ([]repo.SnapshotFile, error)
	// LoadSnapshots reads the time and the tags of snapshots, several at once, and calls each with the place of a snapshot
	// in files, also from several goroutines. An error of kind Busy: the backup is not complete yet. Errors that each
	// returns end LoadSnapshots.
	LoadSnapshots(ctx context.Context, files []repo.SnapshotFile,
		each func(place int, s repo.Snapshot, err error) error) error
	// Has reports whether the store has the backup of an object. It asks for the very object of the store, because lists
	// may be short.
	Has(ctx context.Context, b api.StoredBackup) (bool, error)
}

// repositorySnapshots is the snapshotLister of a repository.
type repositorySnapshots struct {
	*repo.Repository
	visit *visit
}

// ListSnapshots implements snapshotLister, and adds the snapshots of the repository's record that the list lacks: a
// short list stops sweeps, and nothing else. In a read-only target, which no sweep follows, the list is not compared.
func (r repositorySnapshots) ListSnapshots(ctx context.Context) ([]repo.SnapshotFile, error) {
	if r.visit.target.Spec.ReadOnly {
		return r.Repository.ListSnapshots(ctx)
	}
	list, err := r.ListRecorded(ctx)
	if err != nil {
		return nil, err
	}
	if err := list.Save(ctx); err != nil { // concerns sweeps alone, which write the record, too
		r.visit.log.Warn("the snapshot record of a backup target is not written", "target", r.visit.target.Name, "err", err)
	}
	r.visit.shortErr = list.Check()
	return list.All(), nil
}

// Has implements snapshotLister.
func (r repositorySnapshots) Has(ctx context.Context, b api.StoredBackup) (bool, error) {
	id, _ := snapshotOf(b)
	_, err := r.FindSnapshot(ctx, id)
	if api.Is(err, api.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// updateKeys makes the key files follow the passwords of the Secret. To try passwords takes long, so a visit does
// nothing if neither passwords nor key files changed since an earlier visit.
func (v *visit) updateKeys(ctx context.Context, r *repo.Repository, p repo.Passwords) error {
	if v.target.Spec.ReadOnly {
		return nil
	}
	state := func() (blob.ID, error) {
		names, err := r.KeyNames(ctx)
		return blob.Sum(fmt.Appendf(nil, "%q %s", p, names)), err
	}
	now, err := state()
	if err != nil || now == v.memory.keys {
		return err
	}
	if v.memory.count, err = r.UpdateKeys(ctx, p); err != nil {
		return err
	}
	v.memory.keys, err = state()
	return err
}

// compareBackups compares the snapshots of the repository with the Backups, which it reads before: a Backup that ended
// during the list is not missing.
func (v *visit) compareBackups(ctx context.Context, r snapshotLister, result *visitResult) error {
	backups, err := backupsOf(ctx, v.Client, v.target.Name)
	if err != nil {
		return err
	}
	files, err := r.ListSnapshots(ctx)
	if err != nil {
		return storeFault(ctx, err)
	}
	listed := make(map[blob.ID]struct{}, len(files))
	for _, f := range files {
		listed[f.ID] = struct{}{}
	}
	known, missing := map[blob.ID]api.StoredBackup{}, map[blob.ID]api.StoredBackup{}
	for _, b := range backups {
		id, ok := snapshotOf(b)
		if !ok {
			continue
		}
		known[id] = b
		if _, ok := listed[id]; !ok && b.GetDeletionTimestamp() == nil {
			missing[id] = b
		}
	}
	if len(files) == 0 && len(missing) > 0 {
		clear(v.memory.missing)
		return faultf(api.ReasonListIncomplete, "the store lists no snapshot, and %s of the target exist; mount or restore "+
			"the folder or bucket, or delete these Backups if they are lost", api.CountText(len(missing), "Backup"))
	}
	result.listedAt = v.opts.Now()
	if err := v.deleteLost(ctx, r, missing, result); err != nil {
		return err
	}
	if err := v.pull(ctx, r, files, known, result); err != nil {
		return err
	}
	result.listed = true
	return nil
}

// deleteLost deletes the Backups that two lists lack, with a pause of Options.Confirm between the lists, if the
// repository was known before, and the store has not the snapshot of any of them. A store that lost a part of its lists
// still has the snapshots, and a sweep spares only those that Backups name.
func (v *visit) deleteLost(ctx context.Context, r snapshotLister, missing map[blob.ID]api.StoredBackup,
	result *visitResult) error {
	for id := range v.memory.missing {
		if missing[id] == nil {
			delete(v.memory.missing, id)
		}
	}
	var lost []api.StoredBackup
	for id, b := range missing {
		first, again := v.memory.missing[id]
		if !again {
			first = result.listedAt
			v.memory.missing[id] = first
		}
		due := first.Add(v.opts.Confirm)
		if st := &v.target.Status; !again || result.listedAt.Before(due) || st.RepositoryID == "" && st.Format == "" {
			result.missingAt = earlier(result.missingAt, due)
			continue
		}
		lost = append(lost, b)
	}
	if err := v.confirmLost(ctx, r, lost); err != nil {
		return err
	}
	for _, b := range lost {
		if err := v.deleteObject(ctx, b, "the store lacks it"); err != nil {
			return err
		}
		id, _ := snapshotOf(b)
		delete(v.memory.missing, id)
		result.lost++
	}
	return nil
}

// confirmWorkers is how many objects of the store a visit asks for at once.
const confirmWorkers = 16

// confirmLost returns a fault unless the store, asked for each backup, has none of them.
func (v *visit) confirmLost(ctx context.Context, r snapshotLister, lost []api.StoredBackup) error {
	exists := make([]bool, len(lost))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(confirmWorkers)
	for i, b := range lost {
		group.Go(func() (err error) {
			exists[i], err = r.Has(groupCtx, b)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return storeFault(ctx, err)
	}
	first, count := "", 0
	for i, b := range lost {
		if exists[i] {
			first, count = cmp.Or(first, b.GetName()), count+1
		}
	}
	if count == 0 {
		return nil
	}
	return faultf(api.ReasonListIncomplete, "the store has %s that its lists lack, such as %s; repair the lists of the "+
		"folder or bucket, or delete these Backups", api.CountText(count, "backup"), first)
}

// deleteObject deletes a Backup, and nothing in the store, after the finalizer: the deletion of a Backup with a
// finalizer deletes the snapshot in the store, too, and the lists may be wrong. If another program changes the Backup
// meanwhile, the Backup stays, and the next visit finds the Backup again.
func (v *visit) deleteObject(ctx context.Context, cached api.StoredBackup, why string) error {
	b := copyOf(cached)
	controllerutil.RemoveFinalizer(b, api.Finalizer)
	if err := v.Update(ctx, b); err != nil {
		return ignoreRace(api.Explain(err, "backup %s: remove the finalizer", b.GetName()), err)
	}
	uid, version := b.GetUID(), b.GetResourceVersion()
	err := v.Delete(ctx, b, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if err == nil {
		v.log.Info("object of a backup deleted", "backup", b.GetName(), "snapshot", b.Common().SnapshotID, "why", why)
	}
	return ignoreRace(api.Explain(err, "backup %s: delete the object", b.GetName()), err)
}
