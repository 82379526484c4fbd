package controller

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// A snapshot of type bak is a Backup. Its handle, bak://VOLUME/BACKUP, also names a Backup that a user made, or that
// was found in a store. The call that creates the snapshot returns after the cut, because an upload may take hours; the
// snapshot is ready to use when the store has the backup.

// backupClass is the rest of a VolumeSnapshotClass of type bak.
type backupClass struct {
	mode, target string
}

func (c *backupClass) setParameter(key, value string) error {
	switch key {
	case "backupMode":
		if c.mode = value; value != "" && value != api.BackupFull && value != api.BackupIncremental {
			return api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %s=%.80q: want %s or %s", key, value,
				api.BackupIncremental, api.BackupFull)
		}
	case api.ParameterBackupTarget:
		if c.target = value; value != "" && !api.CanNameTarget(value) {
			return api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %s=%.80q: want the name of a BackupTarget", key,
				value)
		}
	default:
		return api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %.80q is not known: type bak takes backupMode and %s",
			key, api.ParameterBackupTarget)
	}
	return nil
}

// createBackupSnapshot makes a Backup, and waits until its volume is cut. The backup may have no source for hours then:
// the backup of the volume's image goes first.
func (s *Server) createBackupSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest, class *backupClass) (
	*csi.CreateSnapshotResponse, error) {
	b, err := s.ensureBackup(ctx, req, class)
	if err != nil {
		return nil, err
	}
	var out *csi.Snapshot
	why, uid := "", b.UID
	_, err = await.Until(ctx, s.client, b.Name, func(now *api.Backup) (bool, error) {
		why = string(now.Status.State) + " " + now.Status.Message
		switch {
		case now.UID != uid || now.DeletionTimestamp != nil:
			return false, api.Errorf(api.Busy, "deleted while it was being created: try again")
		case now.Status.State == api.BackupError:
			return false, api.Errorf(api.Other, "the backup failed: %s", now.Status.Message)
		}
		var err error // the planner writes into the status of the Backup when its Snapshot is ready
		out, err = s.describeBackup(ctx, now)
		return out != nil || now.Ended(), err
	})
	if err != nil {
		return nil, api.Explain(err, "snapshot %s of volume %s (%s)", req.GetName(), req.GetSourceVolumeId(), why)
	}
	if out == nil {
		return nil, api.Errorf(api.Busy, "snapshot %s of volume %s is being made: try again", req.GetName(), b.Spec.Volume)
	}
	return &csi.CreateSnapshotResponse{Snapshot: out}, nil
}

// ensureBackup creates the Backup of a snapshot, or verifies that an existing Backup is the same wish.
func (s *Server) ensureBackup(ctx context.Context, req *csi.CreateSnapshotRequest, class *backupClass) (
	*api.Backup, error) {
	name := snapshotName(req.GetName())
	b := &api.Backup{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, b)
	if err == nil {
		return b, verifyBackup(b, req, class)
	}
	if !apierrors.IsNotFound(err) {
		return nil, api.Explain(err, "read backup %s", name)
	}
	vol, err := s.readVolume(ctx, req.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	if vol.DeletionTimestamp != nil {
		return nil, api.Errorf(api.NotFound, "volume %s is being deleted", vol.Name)
	}
	b = &api.Backup{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: api.BackupSpec{Volume: vol.Name,
		BackupMode: class.mode, BackupTargetName: cmp.Or(class.target, vol.BackupTarget())}}
	if name != req.GetName() {
		b.Annotations = map[string]string{annotationName: req.GetName()}
	}
	if err := s.checkTarget(ctx, b.Target()); err != nil {
		return nil, err
	}
	if err = s.client.Create(ctx, b); apierrors.IsAlreadyExists(err) {
		b = &api.Backup{}
		if err = s.client.Get(ctx, client.ObjectKey{Name: name}, b); err == nil {
			return b, verifyBackup(b, req, class)
		}
	}
	return b, api.Explain(err, "create backup %s", name)
}

func verifyBackup(b *api.Backup, req *csi.CreateSnapshotRequest, class *backupClass) error {
	is := b.Annotations[annotationName]
	if is == "" {
		is = b.Name
	}
	switch {
	case b.Spec.Volume != req.GetSourceVolumeId():
		return api.Errorf(api.Exists, "backup %s exists and is one of volume %s", b.Name, b.Spec.Volume)
	case is != req.GetName():
		return api.Errorf(api.Exists, "backup %s exists and is named %q", b.Name, is)
	case class.target != "" && class.target != b.Target():
		return api.Errorf(api.Exists, "backup %s exists and is in target %s", b.Name, b.Target())
	case b.DeletionTimestamp != nil:
		return api.Errorf(api.Busy, "backup %s of the same name is being deleted: try again", b.Name)
	}
	return nil
}

// checkTarget refuses a backup that would wait for a target that does not exist, or takes no backups.
func (s *Server) checkTarget(ctx context.Context, name string) error {
	t := &api.BackupTarget{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, t)
	switch {
	case apierrors.IsNotFound(err):
		return api.Errorf(api.Unavailable, "backup target %s does not exist: make it with `drover target create`", name)
	case err != nil:
		return api.Explain(err, "read backup target %s", name)
	case t.ExplainReadOnly() != "":
		return api.Errorf(api.InUse, "backup target %s: %s in %s", name, t.ExplainReadOnly(), api.ParameterBackupTarget)
	}
	return nil
}

// describeBackup is a backup in the words of CSI; nil: the volume is not cut yet.
func (s *Server) describeBackup(ctx context.Context, b *api.Backup) (*csi.Snapshot, error) {
	if b.Status.SnapshotCreatedAt != "" {
		return backupInCSI(b, nil), nil
	}
	snap := &api.Snapshot{}
	err := s.client.Get(ctx, client.ObjectKey{Name: backupSnapshot(b)}, snap)
	if client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "read snapshot %s", backupSnapshot(b))
	}
	return backupInCSI(b, snap), nil
}

// backupSnapshot names the Snapshot that a backup is made of.
func backupSnapshot(b *api.Backup) string {
	if b.Spec.SnapshotName != "" {
		return b.Spec.SnapshotName
	}
	return b.OwnSnapshotName()
}

// backupInCSI is a backup in the words of CSI. Until the backup is completed, its Snapshot has the size and the
// instant; nil: they are not known yet.
func backupInCSI(b *api.Backup, snap *api.Snapshot) *csi.Snapshot {
	when, size := b.Status.SnapshotCreatedAt, b.Status.VolumeSize
	if when == "" && snap != nil && snap.Spec.Volume == b.Spec.Volume {
		when, size = snap.Status.CreationTime, snap.Status.RestoreSize
	}
	t, err := time.Parse(time.RFC3339Nano, when)
	if err != nil {
		return nil
	}
	return &csi.Snapshot{SnapshotId: b.Handle(), SourceVolumeId: b.Spec.Volume, SizeBytes: size,
		CreationTime: timestamppb.New(t), ReadyToUse: b.Status.State == api.BackupCompleted && b.DeletionTimestamp == nil}
}

// listBackups is all backups whose volume was cut, in the words of CSI.
func (s *Server) listBackups(ctx context.Context, snaps []api.Snapshot) (all []*csi.Snapshot, _ error) {
	list := &api.BackupList{}
	if err := s.client.List(ctx, list); err != nil {
		return nil, api.Explain(err, "list backups")
	}
	byName := map[string]*api.Snapshot{}
	for i := range snaps {
		byName[snaps[i].Name] = &snaps[i]
	}
	for i := range list.Items {
		b := &list.Items[i]
		if out := backupInCSI(b, byName[backupSnapshot(b)]); out != nil {
			all = append(all, out)
		}
	}
	return all, nil
}

// readBackup reads the backup of a handle; an unknown handle is an error of kind not found.
func (s *Server) readBackup(ctx context.Context, id string) (*api.Backup, error) {
	none := api.Errorf(api.NotFound, "snapshot %.200q does not exist", id)
	volume, name, ok := api.ParseBackupHandle(id)
	if !ok || !validID(volume) || !validID(name) {
		return nil, none
	}
	b := &api.Backup{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, b)
	if apierrors.IsNotFound(err) || err == nil && b.Spec.Volume != volume {
		return nil, none
	}
	return b, api.Explain(err, "read backup %s", name)
}

// getBackupSnapshot is the snapshot of a handle; an error of kind not found: the backup does not exist, or not yet.
func (s *Server) getBackupSnapshot(ctx context.Context, id string) (*csi.Snapshot, error) {
	b, err := s.readBackup(ctx, id)
	if err != nil {
		return nil, err
	}
	out, err := s.describeBackup(ctx, b)
	if err == nil && out == nil {
		err = api.Errorf(api.NotFound, "snapshot %.200q does not exist yet", id)
	}
	return out, err
}

// deleteBackupSnapshot deletes the backup of a handle, and waits until the store has no trace of the backup.
func (s *Server) deleteBackupSnapshot(ctx context.Context, id string) error {
	b, err := s.readBackup(ctx, id)
	if api.Is(err, api.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	uid := b.UID
	if err := s.client.Delete(ctx, b, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return api.Explain(err, "delete backup %s", b.Name)
	}
	why := ""
	if err := await.Gone(ctx, s.client, b, func(now *api.Backup) { why = now.Status.Message }); err != nil {
		return api.Explain(err, "delete backup %s (%s)", b.Name, why)
	}
	return nil
}

// beginWithBackup makes a volume begin with a backup, and returns the size of the backup. A class for such volumes may
// name the image below the backup's volume, as Longhorn's do. The volume needs no image: a backup of Drover has the
// image's bytes, too, and the restore of a backup of Longhorn finds them.
func (s *Server) beginWithBackup(w *wish, b *api.Backup) (int64, error) {
	if err := api.RestorableBackup(b); err != nil {
		return 0, err
	}
	if of := b.Status.VolumeBackingImageName; w.image.name != "" && w.image.name != of {
		return 0, api.Errorf(api.Invalid, "parameter backingImage is %s, but backup %s is of a volume on %q", w.image.name,
			b.Name, of)
	}
	w.spec.FromBackup, w.spec.BackingImage, w.spec.CloneMode = b.Status.URL, "", ""
	return b.Status.VolumeSize, nil
}

// restoreBackup makes a volume begin with the backup of a handle.
func (s *Server) restoreBackup(ctx context.Context, w *wish, id string) (int64, error) {
	b, err := s.readBackup(ctx, id)
	if err != nil {
		return 0, err
	}
	w.content = id
	return s.beginWithBackup(w, b)
}

// mayBeUnlisted reports whether a backup may be one of those in the store of a target that have no object, because the
// store has too many.
func (s *Server) mayBeUnlisted(ctx context.Context, ref api.BackupRef) (bool, error) {
	list := &api.BackupTargetList{}
	if err := s.client.List(ctx, list); err != nil {
		return false, api.Explain(err, "list backup targets")
	}
	return slices.ContainsFunc(list.Items, func(t api.BackupTarget) bool {
		name, _ := ref.NameIn(t.Spec.BackupTargetURL)
		return name != "" && t.HasUnlisted()
	}), nil
}

// seekBackup makes a volume begin with a backup without an object: the backup gets one because the volume names its
// URL. Until then nobody knows the backup's size.
func (w *wish) seekBackup() error {
	if w.required == 0 {
		return api.Errorf(api.Invalid, "parameter fromBackup: the backup has no object, so its size is not known: request "+
			"a size")
	}
	w.spec.FromBackup, w.spec.BackingImage, w.spec.CloneMode = w.fromBackup, "", ""
	return nil
}

// namedBackup makes a volume begin with the backup that the class names, by its URL or its name.
func (s *Server) namedBackup(ctx context.Context, w *wish) (int64, error) {
	list := &api.BackupList{}
	if err := s.client.List(ctx, list); err != nil {
		return 0, api.Explain(err, "list backups")
	}
	ref, refErr := api.ParseBackupURL(w.fromBackup)
	i := slices.IndexFunc(list.Items, func(b api.Backup) bool {
		return refErr == nil && ref.Matches(b.Status.URL) ||
			b.Name == w.fromBackup && (w.target == "" || w.target == b.Target())
	})
	if i < 0 && refErr == nil {
		unlisted, err := s.mayBeUnlisted(ctx, ref)
		if err != nil {
			return 0, err
		}
		if unlisted {
			return 0, w.seekBackup()
		}
	}
	if i < 0 {
		return 0, api.Errorf(api.NotFound, "no Backup has the name or URL that parameter fromBackup has: make a "+
			"BackupTarget for the store, and compare with `drover backup list`")
	}
	return s.beginWithBackup(w, &list.Items[i])
}
