package api

import (
	"cmp"
	"net/url"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

// BackupState is the state of a backup, in words that users of the field know.
//
// +kubebuilder:validation:Enum="";Pending;InProgress;Completed;Error;Deleting
type BackupState string

// Backup states.
const (
	BackupNew        BackupState = ""
	BackupPending    BackupState = "Pending"    // waits for the target, the snapshot, a node or a free place of the node
	BackupInProgress BackupState = "InProgress" // a node reads and uploads
	BackupCompleted  BackupState = "Completed"  // the store has the backup
	BackupError      BackupState = "Error"      // for good; the message says why
	BackupDeleting   BackupState = "Deleting"
)

// Backup modes.
const (
	BackupIncremental = "incremental"
	BackupFull        = "full"
)

// Backup is the content of a volume at an instant, in the store of a BackupTarget. Spec: written by the client that
// wants the backup, or by the node role for a backup found in a store; spec.source, and a spec.backupTargetName
// that the client left empty, by the controller role. Status: by
// the controller role while spec.source and spec.snapshotID are empty; then by the node role of spec.source.node until
// the backup is Completed or has an Error; from then on, for backups with spec.snapshotID or spec.copyOf, and for a
// deleted backup that lost its source after its begin, by the node role of the target's owner; of a copy without a
// target by the controller role. Labels: LabelVolume,
// LabelBackupTarget. Finalizer: Finalizer, removed when the store has no trace of the backup. The backup outlives its
// volume and its snapshot.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 128",message="the name of a backup has at most 128 characters"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=bak,categories=drover
// +kubebuilder:printcolumn:name="Volume",type=string,JSONPath=`.spec.volume`
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.backupTargetName`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Progress",type=integer,JSONPath=`.status.progress`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="Uploaded",type=string,JSONPath=`.status.uploadedText`
// +kubebuilder:printcolumn:name="Created",type=string,JSONPath=`.status.snapshotCreatedAt`
// +kubebuilder:printcolumn:name="Damaged",type=boolean,JSONPath=`.status.damaged`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.status.cluster`,priority=1
type Backup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              BackupSpec   `json:"spec"`
	Status            BackupStatus `json:"status,omitempty"`
}

// BackupSpec is the wish. Only the source can change.
//
// +kubebuilder:validation:XValidation:rule="self.volume == oldSelf.volume && (!has(oldSelf.backupTargetName) || has(self.backupTargetName) && self.backupTargetName == oldSelf.backupTargetName)",message="a backup cannot change: delete it and make a new one"
// +kubebuilder:validation:XValidation:rule="has(self.snapshotName) && size(self.snapshotName) > 0 ? has(oldSelf.snapshotName) && self.snapshotName == oldSelf.snapshotName : !has(oldSelf.snapshotName) || size(oldSelf.snapshotName) == 0",message="snapshotName cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.snapshotID) && size(self.snapshotID) > 0 ? has(oldSelf.snapshotID) && self.snapshotID == oldSelf.snapshotID : !has(oldSelf.snapshotID) || size(oldSelf.snapshotID) == 0",message="snapshotID cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.backupMode) && size(self.backupMode) > 0 ? has(oldSelf.backupMode) && self.backupMode == oldSelf.backupMode : !has(oldSelf.backupMode) || size(oldSelf.backupMode) == 0",message="backupMode cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.copyOf) && size(self.copyOf) > 0 ? has(oldSelf.copyOf) && self.copyOf == oldSelf.copyOf : !has(oldSelf.copyOf) || size(oldSelf.copyOf) == 0",message="copyOf cannot change"
// +kubebuilder:validation:XValidation:rule="!has(self.copyOf) || size(self.copyOf) == 0 || !has(self.source) && (!has(self.snapshotName) || size(self.snapshotName) == 0) && (!has(self.snapshotID) || size(self.snapshotID) == 0)",message="a copy has neither a source nor a snapshot"
// +kubebuilder:validation:XValidation:rule="has(self.labels) && size(self.labels) > 0 ? has(oldSelf.labels) && self.labels == oldSelf.labels : !has(oldSelf.labels) || size(oldSelf.labels) == 0",message="labels cannot change: the store has them already"
type BackupSpec struct {
	// BackupTargetName is the BackupTarget of the backup; empty: written by the controller role, from the parameter
	// backupTargetName of the volume, else default.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	BackupTargetName string `json:"backupTargetName,omitempty"`
	// Volume that the backup is of.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Volume string `json:"volume"`
	// SnapshotName is the Snapshot of the volume to back up; empty: a new one, which is deleted when a later backup of
	// the volume needs it no more.
	// +kubebuilder:validation:MaxLength=128
	SnapshotName string `json:"snapshotName,omitempty"`
	// BackupMode is incremental (default), which takes what changed since the volume's last backup in the target, or
	// full, which reads and compares everything.
	// +kubebuilder:validation:Enum="";incremental;full
	BackupMode string `json:"backupMode,omitempty"`
	// Labels are kept in the store with the backup.
	// +kubebuilder:validation:MaxProperties=64
	Labels map[string]string `json:"labels,omitempty"`
	// CopyOf is a completed Backup of the same volume in another target, which the backup is a copy of.
	// +kubebuilder:validation:MaxLength=128
	CopyOf string `json:"copyOf,omitempty"`
	// Source is the replica whose node makes the backup: written by the controller role.
	Source *ExportFact `json:"source,omitempty"`
	// SnapshotID is the backup's snapshot in the repository: the object stands for a backup that was found in the store.
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{64})?$`
	SnapshotID string `json:"snapshotID,omitempty"`
}

// CommonBackupStatus is the part of the status that Backups and BackupBackingImages share.
type CommonBackupStatus struct {
	State   BackupState `json:"state,omitempty"`
	Message string      `json:"message,omitempty"`
	OwnerID string      `json:"ownerID,omitempty"` // node that writes the status; empty: the controller
	// Progress in percent, of the bytes below.
	Progress     int32 `json:"progress,omitempty"`
	ByteProgress `json:",inline"`
	// Attempts that failed, and the time of the next one.
	Attempts int32        `json:"attempts,omitempty"`
	NextTry  *metav1.Time `json:"nextTry,omitempty"`

	// URL names the backup for a restore: the target's URL with the backup and the volume or image.
	URL string `json:"url,omitempty"`
	// Cluster is the name of the cluster that made the backup, or of that whose backup was copied; empty: not known.
	Cluster string `json:"cluster,omitempty"`
	// SnapshotID is the backup's snapshot in the repository, which restic lists, too.
	SnapshotID      string `json:"snapshotID,omitempty"`
	BackupCreatedAt string `json:"backupCreatedAt,omitempty"` // end of the backup, RFC 3339
	// StoredAt is when the store got the backup, by the store's clock, RFC 3339; set if the instant of the content was
	// after this and still in the future when the target was listed: the clock of the backup's source was ahead.
	StoredAt string `json:"storedAt,omitempty"`
	// NewlyUploadDataSize is the bytes that the backup added to the store.
	NewlyUploadDataSize int64 `json:"newlyUploadDataSize,omitempty"`
	// SkippedBytes are those of BytesDone that the store had already, of a backup that this cluster made.
	SkippedBytes int64             `json:"skippedBytes,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	LastSyncedAt *metav1.Time      `json:"lastSyncedAt,omitempty"`
	// Damaged says that a verification found bytes of the backup lost or changed in the store.
	Damaged bool `json:"damaged,omitempty"`
	// Digests says how much of the backup of a volume in a store of Longhorn can be read on demand; nil: no verification
	// has read the backup yet.
	Digests      *DigestsFact `json:"digests,omitempty"`
	SizeText     string       `json:"sizeText,omitempty"`
	UploadedText string       `json:"uploadedText,omitempty"`
}

// DigestsFact says which node knows the SHA-256 of the chunks of a backup, which a store of Longhorn does not tell. A
// restore on this node can be used at once if the node knows all.
type DigestsFact struct {
	Node    string `json:"node"`
	Percent int32  `json:"percent"` // of the chunks with data, rounded down
}

// ReadableOn is the node on which the backup at url, in a store of Longhorn, can be read on demand; empty: on none, or
// on every node alike.
func ReadableOn(backups []Backup, url string) string {
	ref, err := ParseBackupURL(url)
	if err != nil {
		return ""
	}
	for i := range backups {
		d := backups[i].Status.Digests
		if d != nil && d.Percent == 100 && ref.Matches(backups[i].Status.URL) {
			return d.Node
		}
	}
	return ""
}

// BackupStatus is the fact.
type BackupStatus struct {
	CommonBackupStatus `json:",inline"`

	// SnapshotName and SnapshotCreatedAt (RFC 3339) are the snapshot of the volume that was backed up.
	SnapshotName      string `json:"snapshotName,omitempty"`
	SnapshotCreatedAt string `json:"snapshotCreatedAt,omitempty"`
	// SnapshotUID is the snapshot in the stack of each replica, which tells a later backup what changed since.
	SnapshotUID UID `json:"snapshotUID,omitempty"`
	// BackupMode that came about: a backup without a usable earlier one is full.
	BackupMode string `json:"backupMode,omitempty"`
	VolumeName string `json:"volumeName,omitempty"`
	VolumeUID  UID    `json:"volumeUID,omitempty"`
	VolumeSize int64  `json:"volumeSize,omitempty"` // bytes
	// VolumeBackingImageName is the volume's image, VolumeBackingImageDigest and -Checksum the digest of the image's
	// content and the SHA-512 of its source's bytes.
	VolumeBackingImageName     string `json:"volumeBackingImageName,omitempty"`
	VolumeBackingImageDigest   string `json:"volumeBackingImageDigest,omitempty"`
	VolumeBackingImageChecksum string `json:"volumeBackingImageChecksum,omitempty"`
	// RecordedVolume is the volume as the backup found it; nil: the volume was deleted, or the record is too large.
	RecordedVolume *RecordedVolume `json:"recordedVolume,omitempty"`
}

// StoredBackup is an object that stands for a backup in a store: a Backup or a BackupBackingImage.
//
// +kubebuilder:object:generate=false
type StoredBackup interface {
	metav1.Object
	runtime.Object
	// Target is the name of the backup's target.
	Target() string
	// Subject names the volume or image that the backup is of, for people.
	Subject() string
	// Common is the part of the status that all backups have.
	Common() *CommonBackupStatus
	// FoundSnapshot is the snapshot in the repository of a backup that was found in the store; empty: made here.
	FoundSnapshot() string
	// Origin is the name of the backup, of the same kind, that the backup is a copy of; empty: it is no copy.
	Origin() string
	// SourceDisk is the node that makes the backup, and the disk that it reads; empty: no source is chosen.
	SourceDisk() (node string, disk UID)
	// CutAt is the instant of the content; zero, older than all others: not known.
	CutAt() time.Time
	// BackupLabels are the labels that the store keeps with the backup.
	BackupLabels() map[string]string
	// Ended reports whether no node works at the backup any more. A completed backup has a SnapshotID, also as Deleting.
	Ended() bool
}

var (
	_ StoredBackup = (*Backup)(nil)
	_ StoredBackup = (*BackupBackingImage)(nil)
)

// IsCopy reports whether a backup copies another target's backup.
func IsCopy(b StoredBackup) bool { return b.Origin() != "" }

func hasEnded(b StoredBackup) bool {
	s := b.Common()
	return b.FoundSnapshot() != "" || s.SnapshotID != "" || s.State == BackupCompleted || s.State == BackupError
}

// HasBegun reports whether a node began a backup that has not ended, or failed: the store may have packs of it, and a
// snapshot that the status does not name.
func HasBegun(b StoredBackup) bool {
	s := b.Common()
	return s.Attempts > 0 || s.State == BackupInProgress || s.State == BackupDeleting
}

// Ended implements StoredBackup.
func (b *Backup) Ended() bool { return hasEnded(b) }

// Target implements StoredBackup.
func (b *Backup) Target() string { return cmp.Or(b.Spec.BackupTargetName, DefaultBackupTarget) }

// Subject implements StoredBackup.
func (b *Backup) Subject() string { return "volume " + b.Spec.Volume }

// Common implements StoredBackup.
func (b *Backup) Common() *CommonBackupStatus { return &b.Status.CommonBackupStatus }

// Origin implements StoredBackup.
func (b *Backup) Origin() string { return b.Spec.CopyOf }

// FoundSnapshot implements StoredBackup.
func (b *Backup) FoundSnapshot() string { return b.Spec.SnapshotID }

// SourceDisk implements StoredBackup.
func (b *Backup) SourceDisk() (node string, disk UID) {
	if b.Spec.Source == nil {
		return "", ""
	}
	return b.Spec.Source.Node, b.Spec.Source.Disk
}

// BackupLabels implements StoredBackup.
func (b *Backup) BackupLabels() map[string]string { return b.Spec.Labels }

// LabelBackupTarget on a Backup is the name of its target.
const LabelBackupTarget = "drover.io/backup-target"

// LabelBackup marks a snapshot that the planner took for a backup, which has LabelClone, too; value: the backup's name.
const LabelBackup = "drover.io/backup"

// OwnSnapshotName names the Snapshot that is taken for the backup if spec.snapshotName is empty.
func (b *Backup) OwnSnapshotName() string { return ownSnapshotPrefix + string(b.UID) }

const ownSnapshotPrefix = "backup-"

// OfBackup is the UID of the Backup that the snapshot was taken for; empty: the snapshot was not taken for a backup.
func (s *Snapshot) OfBackup() types.UID {
	uid, named := strings.CutPrefix(s.Name, ownSnapshotPrefix)
	if !named || s.Spec.Labels[LabelBackup] == "" {
		return ""
	}
	return types.UID(uid)
}

// BackupURL is the URL of a volume's backup in a target of targetURL.
func BackupURL(targetURL, backup, volume string) string {
	return backupURL(targetURL, backup, "volume", volume)
}

func backupURL(targetURL, backup, kind, name string) string {
	u, err := url.Parse(targetURL)
	if err != nil {
		return ""
	}
	q := u.Query()
	q.Set("backup", backup)
	q.Set(kind, name)
	u.RawQuery = q.Encode()
	return u.String()
}

// BackupList is a list of Backup.
//
// +kubebuilder:object:root=true
type BackupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Backup `json:"items"`
}
