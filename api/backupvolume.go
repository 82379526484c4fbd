package api

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BackupVolume sums up the Backups of a volume in a target; the volume may exist no more. The controller role derives
// the object from the Backups alone, and deletes it with the last of them. A client that deletes a BackupVolume deletes
// all these Backups, also in the store. Spec and status: written by the controller role. Finalizer: Finalizer, removed
// when the Backups of before the deletion are gone. Name: BackupVolumeName.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=bv,categories=drover
// +kubebuilder:printcolumn:name="Volume",type=string,JSONPath=`.spec.volumeName`
// +kubebuilder:printcolumn:name="Target",type=string,JSONPath=`.spec.backupTargetName`
// +kubebuilder:printcolumn:name="Backups",type=integer,JSONPath=`.status.backups`
// +kubebuilder:printcolumn:name="Last",type=string,JSONPath=`.status.lastBackupName`
// +kubebuilder:printcolumn:name="At",type=string,JSONPath=`.status.lastBackupAt`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.status.backingImageName`
type BackupVolume struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              BackupVolumeSpec   `json:"spec"`
	Status            BackupVolumeStatus `json:"status,omitempty"`
}

// BackupVolumeSpec names the Backups.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="a backup volume cannot change"
type BackupVolumeSpec struct {
	BackupTargetName string `json:"backupTargetName"`
	VolumeName       string `json:"volumeName"`
}

// BackupVolumeStatus sums up the completed Backups.
type BackupVolumeStatus struct {
	Backups int32 `json:"backups,omitempty"`
	// LastBackupName and LastBackupAt (RFC 3339) are the backup with the newest snapshot, and the instant of the snapshot.
	LastBackupName string `json:"lastBackupName,omitempty"`
	LastBackupAt   string `json:"lastBackupAt,omitempty"`
	// CreatedAt is the end of the first of the backups that exist, RFC 3339.
	CreatedAt string `json:"createdAt,omitempty"`
	// Size, image and labels are those of the last backup.
	Size                 int64             `json:"size,omitempty"`
	SizeText             string            `json:"sizeText,omitempty"`
	BackingImageName     string            `json:"backingImageName,omitempty"`
	BackingImageChecksum string            `json:"backingImageChecksum,omitempty"`
	Labels               map[string]string `json:"labels,omitempty"`
	// StorageClassName is that of the volume's claim when the last backup was made.
	StorageClassName string `json:"storageClassName,omitempty"`
	// DataStored is the bytes that these backups added to the store. Other backups may need a part of them.
	DataStored int64 `json:"dataStored,omitempty"`
}

// BackupVolumeName names the BackupVolume of a volume in a target.
func BackupVolumeName(volume, target string) string { return volume + "." + target }

// BackupVolumeList is a list of BackupVolume.
//
// +kubebuilder:object:root=true
type BackupVolumeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BackupVolume `json:"items"`
}
