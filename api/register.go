package api

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion of all objects here.
var GroupVersion = schema.GroupVersion{Group: "storage.drover.io", Version: "v1alpha1"}

// SchemeBuilder and AddToScheme register the objects with a client's scheme.
var (
	SchemeBuilder = runtime.NewSchemeBuilder(func(s *runtime.Scheme) error {
		s.AddKnownTypes(GroupVersion,
			&Node{}, &NodeList{}, &BackingImage{}, &BackingImageList{}, &ImageCopy{}, &ImageCopyList{},
			&Volume{}, &VolumeList{}, &Replica{}, &ReplicaList{}, &Attachment{}, &AttachmentList{},
			&Snapshot{}, &SnapshotList{}, &SnapshotGroup{}, &SnapshotGroupList{},
			&BackupTarget{}, &BackupTargetList{}, &Backup{}, &BackupList{},
			&BackupBackingImage{}, &BackupBackingImageList{}, &BackupVolume{}, &BackupVolumeList{},
			&Setting{}, &SettingList{}, &NodeCertificate{}, &NodeCertificateList{})
		metav1.AddToGroupVersion(s, GroupVersion)
		return nil
	})
	AddToScheme = SchemeBuilder.AddToScheme
)
