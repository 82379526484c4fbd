package api

import (
	"cmp"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// RestoreStatus is about a volume that begins with the content of a backup or of an imported file.
type RestoreStatus struct {
	// State is completed when every replica has all data; failed: the message says why, and the restore is tried again.
	State CloneState `json:"state,omitempty"`
	// Backup is the name of the backup in its target; empty: the volume is imported.
	Backup string `json:"backup,omitempty"`
	// Message says why the restore failed or waits; or of a completed one, which chunks of the backup are zeros.
	Message      string `json:"message,omitempty"`
	Progress     int32  `json:"progress,omitempty"` // percent
	ByteProgress `json:",inline"`
	// BackingImage is the hidden image that brings the data; empty: the volume needs none any more.
	BackingImage string `json:"backingImage,omitempty"`
}

// LabelHidden is on a BackingImage that Drover made for the volume of a backup or of an import, and deletes itself, and
// on the image's copies; value: the name of the volume. Lists of images leave it out.
const LabelHidden = "drover.io/restored-volume"

// LabelBackupMount is on the Volume that `drover backup mount` made to show the files of a backup, and on its replicas;
// value: the name of the backup. Only the chunks that are read are fetched, so no size is promised for the volume.
const LabelBackupMount = "drover.io/backup-mount"

// AnnotationMountedAt is on a Volume with LabelBackupMount: the folder of the mount, on the node of AnnotationPrefer.
const AnnotationMountedAt = "drover.io/mounted-at"

// PromisedSize is how many bytes a disk promises to a replica of the volume.
func (v *Volume) PromisedSize() int64 { return promisedSize(v, v.Spec.Size) }

// PromisedSize is how many bytes the disk promises to the replica.
func (r *Replica) PromisedSize() int64 { return promisedSize(r, r.Spec.Size) }

func promisedSize(o metav1.Object, size int64) int64 {
	if o.GetLabels()[LabelBackupMount] != "" {
		return 0
	}
	return size
}

// restoreImagePrefix begins the names of hidden images.
const restoreImagePrefix = "restore-"

// UsesHiddenImage reports whether a hidden image brings the content that the volume begins with.
func (v *Volume) UsesHiddenImage() bool { return v.Spec.FromBackup != "" || v.Spec.ImportFrom != nil }

// RestoreImage names the hidden image of a volume; empty: the volume uses none, has no UID yet, or is a standby volume
// that holds no backup.
func (v *Volume) RestoreImage() string {
	switch st := v.Status.Standby; {
	case !v.UsesHiddenImage() || v.Status.UID == "":
		return ""
	case st != nil && st.Held != nil:
		return st.Held.BackingImage
	case v.FollowsBackups():
		return ""
	}
	return restoreImagePrefix + string(v.Status.UID)
}

// BaseImage names the image that new replicas of the volume begin with; empty: none, or that of the data source.
func (v *Volume) BaseImage() string {
	if st := v.Status.RestoreStatus; st != nil {
		return st.BackingImage
	}
	return v.Spec.BackingImage
}

// IsHidden reports whether Drover made the image for a volume of a backup or of an import.
func (i *BackingImage) IsHidden() bool { return i.Labels[LabelHidden] != "" }

// WaitsForRestore reports whether a volume from a backup has no content yet.
func (v *Volume) WaitsForRestore() bool {
	return v.Spec.FromBackup != "" && !v.FollowsBackups() && v.DeletionTimestamp == nil &&
		(v.Status.State == "" || v.Status.State == VolumeCreating)
}

// backupScheme begins the handle of a backup in CSI: bak://VOLUME/BACKUP, as Longhorn's.
const backupScheme = "bak://"

// Handle names the backup in CSI.
func (b *Backup) Handle() string { return backupScheme + b.Spec.Volume + "/" + b.Name }

// IsBackupHandle reports whether a handle of CSI names a backup.
func IsBackupHandle(handle string) bool { return strings.HasPrefix(handle, backupScheme) }

// ParseBackupHandle reads the handle of a backup; false: the text is none.
func ParseBackupHandle(handle string) (volume, backup string, ok bool) {
	rest, is := strings.CutPrefix(handle, backupScheme)
	volume, backup, two := strings.Cut(rest, "/")
	return volume, backup, is && two && volume != "" && backup != "" && !strings.Contains(backup, "/")
}

// RestorableBackup returns an error unless a volume can begin with the backup.
func RestorableBackup(b *Backup) error {
	switch st := &b.Status; {
	case b.DeletionTimestamp != nil:
		return Errorf(NotFound, "backup %s is being deleted", b.Name)
	case st.State == BackupError:
		return Errorf(NotFound, "backup %s failed: %s", b.Name, st.Message)
	case st.State != BackupCompleted || st.URL == "" || st.VolumeSize == 0:
		return Errorf(Unavailable, "backup %s is not completed: it is %s", b.Name, cmp.Or(st.State, "new"))
	}
	return nil
}
