package api

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// BackupBackingImage is the content of a backing image in the store of a BackupTarget. Spec: written by the client that
// wants the backup, by the controller role for the image of a volume that is backed up, or by the node role for a
// backup found in a store; spec.source and an empty spec.digest by the controller role; the copy of the image of a
// volume whose backup is copied, by the node role. Status: by the writers of a Backup's status. Labels: LabelImage,
// LabelBackupTarget. Finalizer: Finalizer, removed when the store has no trace of the backup. The backup outlives its
// image.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 128",message="the name of a backup has at most 128 characters"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=bbi,categories=drover
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.backingImageName`
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.backupTargetName`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Progress",type=integer,JSONPath=`.status.progress`
// +kubebuilder:printcolumn:name="Created",type=string,JSONPath=`.status.backupCreatedAt`
// +kubebuilder:printcolumn:name="Checksum",type=string,JSONPath=`.status.checksum`
// +kubebuilder:printcolumn:name="Damaged",type=boolean,JSONPath=`.status.damaged`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.status.cluster`,priority=1
type BackupBackingImage struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              BackupBackingImageSpec   `json:"spec"`
	Status            BackupBackingImageStatus `json:"status,omitempty"`
}

// BackupBackingImageSpec is the wish. Only the source, and a digest that is empty, can change.
//
// +kubebuilder:validation:XValidation:rule="self.backingImageName == oldSelf.backingImageName && self.backupTargetName == oldSelf.backupTargetName",message="a backup cannot change: delete it and make a new one"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.digest) || size(oldSelf.digest) == 0 || has(self.digest) && self.digest == oldSelf.digest",message="digest cannot change once it is set"
// +kubebuilder:validation:XValidation:rule="has(self.snapshotID) && size(self.snapshotID) > 0 ? has(oldSelf.snapshotID) && self.snapshotID == oldSelf.snapshotID : !has(oldSelf.snapshotID) || size(oldSelf.snapshotID) == 0",message="snapshotID cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.copyOf) && size(self.copyOf) > 0 ? has(oldSelf.copyOf) && self.copyOf == oldSelf.copyOf : !has(oldSelf.copyOf) || size(oldSelf.copyOf) == 0",message="copyOf cannot change"
// +kubebuilder:validation:XValidation:rule="!has(self.copyOf) || size(self.copyOf) == 0 || !has(self.source) && (!has(self.snapshotID) || size(self.snapshotID) == 0)",message="a copy has neither a source nor a snapshot"
// +kubebuilder:validation:XValidation:rule="has(self.labels) && size(self.labels) > 0 ? has(oldSelf.labels) && self.labels == oldSelf.labels : !has(oldSelf.labels) || size(oldSelf.labels) == 0",message="labels cannot change: the store has them already"
type BackupBackingImageSpec struct {
	// BackupTargetName is the BackupTarget of the backup.
	// +kubebuilder:default=default
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	BackupTargetName string `json:"backupTargetName,omitempty"`
	// BackingImageName is the image that the backup is of.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	BackingImageName string `json:"backingImageName"`
	// UserCreated is false for a backup that Drover made because a volume with the image was backed up, or that was found
	// in the store.
	UserCreated bool `json:"userCreated,omitempty"`
	// Digest of the content to back up; empty: the content that the image has when the backup begins.
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{64})?$`
	Digest string `json:"digest,omitempty"`
	// Labels are kept in the store with the backup.
	// +kubebuilder:validation:MaxProperties=64
	Labels map[string]string `json:"labels,omitempty"`
	// CopyOf is a completed BackupBackingImage of the same image in another target, which the backup is a copy of.
	// +kubebuilder:validation:MaxLength=128
	CopyOf string `json:"copyOf,omitempty"`
	// Source is the copy whose node makes the backup: written by the controller role.
	Source *ImageSource `json:"source,omitempty"`
	// SnapshotID is the backup's snapshot in the repository: the object stands for a backup that was found in the store.
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{64})?$`
	SnapshotID string `json:"snapshotID,omitempty"`
}

// ImageSource is a copy of an image, with the facts of the image.
type ImageSource struct {
	UUID        UID    `json:"uuid"`
	Layers      []UID  `json:"layers"` // bottom first
	VirtualSize int64  `json:"virtualSize"`
	Checksum    string `json:"checksum,omitempty"`
	Node        string `json:"node"`
	Disk        UID    `json:"disk"`
}

// BackupBackingImageStatus is the fact.
type BackupBackingImageStatus struct {
	CommonBackupStatus `json:",inline"`

	// BackingImage is the image's name.
	BackingImage string `json:"backingImage,omitempty"`
	// Checksum is the SHA-512 of the image's source, as the BackingImage had it; Digest names the content.
	Checksum string `json:"checksum,omitempty"`
	Digest   string `json:"digest,omitempty"`
	Size     int64  `json:"size,omitempty"` // of the disk inside the image, bytes
	// RecordedImage is the image as the backup found it; nil: the image was deleted, or the record is too large.
	RecordedImage *RecordedImage `json:"recordedImage,omitempty"`
}

// Ended implements StoredBackup.
func (b *BackupBackingImage) Ended() bool { return hasEnded(b) }

// Target implements StoredBackup.
func (b *BackupBackingImage) Target() string {
	return cmp.Or(b.Spec.BackupTargetName, DefaultBackupTarget)
}

// Subject implements StoredBackup.
func (b *BackupBackingImage) Subject() string { return "image " + b.Spec.BackingImageName }

// Common implements StoredBackup.
func (b *BackupBackingImage) Common() *CommonBackupStatus { return &b.Status.CommonBackupStatus }

// Origin implements StoredBackup.
func (b *BackupBackingImage) Origin() string { return b.Spec.CopyOf }

// FoundSnapshot implements StoredBackup.
func (b *BackupBackingImage) FoundSnapshot() string { return b.Spec.SnapshotID }

// SourceDisk implements StoredBackup.
func (b *BackupBackingImage) SourceDisk() (node string, disk UID) {
	if b.Spec.Source == nil {
		return "", ""
	}
	return b.Spec.Source.Node, b.Spec.Source.Disk
}

// BackupLabels implements StoredBackup.
func (b *BackupBackingImage) BackupLabels() map[string]string { return b.Spec.Labels }

// ContentDigest is the digest of the content; empty: not known yet.
func (b *BackupBackingImage) ContentDigest() string { return cmp.Or(b.Status.Digest, b.Spec.Digest) }

// IsOf reports whether the backup is that of an image's content in a target.
func (b *BackupBackingImage) IsOf(target, image, digest string) bool {
	return b.Target() == target && b.Spec.BackingImageName == image && digest != "" && b.ContentDigest() == digest
}

// OtherContent describes a completed backup in list, in the target of b, of an image of the same name with other
// content than digest; empty: none.
func (b *BackupBackingImage) OtherContent(list []BackupBackingImage, digest string) string {
	for i := range list {
		o := &list[i]
		differs := digest != "" && o.ContentDigest() != "" && o.ContentDigest() != digest
		if differs && o.Target() == b.Target() && o.Spec.BackingImageName == b.Spec.BackingImageName &&
			o.Status.State == BackupCompleted && o.DeletionTimestamp == nil {
			return fmt.Sprintf("backup target %s has a backup, %s, of an image %s with other content: digest %.16s instead "+
				"of %.16s; both are kept", b.Target(), o.Name, b.Spec.BackingImageName, o.ContentDigest(), digest)
		}
	}
	return ""
}

// NeedsImageBackup reports whether a restore of the backup's volume brings the image of i back.
func (b *Backup) NeedsImageBackup(i *BackupBackingImage) bool {
	s := &b.Status
	return b.Ended() && s.State != BackupError && i.IsOf(b.Target(), s.VolumeBackingImageName, s.VolumeBackingImageDigest)
}

// AnnotationForceDelete on a BackupBackingImage that is deleted: backups of volumes with the image do not delay the
// deletion.
const AnnotationForceDelete = "drover.io/force-delete"

// ContentDigest names the content of a ready image: equal digests, equal content. It is empty while layers lack
// digests. The Digest of an image of several layers is that of the topmost layer alone; layers never change, so the
// names of all layers name the content.
func (i *BackingImage) ContentDigest() string {
	s := &i.Status
	if len(s.Layers) < 2 || s.Digest == "" {
		return s.Digest
	}
	h := sha256.New()
	for _, uid := range s.Layers {
		h.Write([]byte(uid + "\n"))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// ImageBackupName names the backup of an image's content in a target, if the client names none. Images of the same name
// and with other content, and other targets, have other names.
func ImageBackupName(image, digest, target string) string {
	suffix := "-" + digest[:min(len(digest), 8)] + "." + target
	return strings.TrimRight(image[:min(len(image), 128-len(suffix))], "-.") + suffix
}

// ImageBackupURL is the URL of an image's backup in a target of targetURL.
func ImageBackupURL(targetURL, backup, image string) string {
	return backupURL(targetURL, backup, "backingImage", image)
}

// BackupBackingImageList is a list of BackupBackingImage.
//
// +kubebuilder:object:root=true
type BackupBackingImageList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BackupBackingImage `json:"items"`
}
