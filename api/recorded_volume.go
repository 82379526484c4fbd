package api

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Annotations of a Volume with its names in Kubernetes, if the CSI sidecars tell them.
const (
	AnnotationClaim            = "drover.io/claim"             // NAMESPACE/NAME of the PersistentVolumeClaim
	AnnotationPersistentVolume = "drover.io/persistent-volume" // name
	AnnotationStorageClass     = "drover.io/storage-class"     // name
)

// RecordedVolume is what a backup tells of its volume: the names in Kubernetes for people, and the labels and
// parameters that a volume with the backup's content takes over, in any cluster.
type RecordedVolume struct {
	StorageClassName     string `json:"storageClassName,omitempty"`
	PersistentVolumeName string `json:"persistentVolumeName,omitempty"`
	// Claim is NAMESPACE/NAME of the PersistentVolumeClaim.
	Claim  string            `json:"claim,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`

	NumberOfReplicas            int32    `json:"numberOfReplicas,omitempty"`
	DataLocality                string   `json:"dataLocality,omitempty"`
	ReplicaAutoBalance          string   `json:"replicaAutoBalance,omitempty"`
	ReplicaSoftAntiAffinity     string   `json:"replicaSoftAntiAffinity,omitempty"`
	ReplicaZoneSoftAntiAffinity string   `json:"replicaZoneSoftAntiAffinity,omitempty"`
	ReplicaDiskSoftAntiAffinity string   `json:"replicaDiskSoftAntiAffinity,omitempty"`
	FreezeFilesystemForSnapshot string   `json:"freezeFilesystemForSnapshot,omitempty"`
	SnapshotDataIntegrity       string   `json:"snapshotDataIntegrity,omitempty"`
	UnmapMarkSnapChainRemoved   string   `json:"unmapMarkSnapChainRemoved,omitempty"`
	StaleReplicaTimeout         int32    `json:"staleReplicaTimeout,omitempty"`
	NodeSelector                []string `json:"nodeSelector,omitempty"`
	DiskSelector                []string `json:"diskSelector,omitempty"`
	// BackupTargetName is the parameter for the target of the volume's backups.
	BackupTargetName string `json:"backupTargetName,omitempty"`
}

// recordLimit bounds the JSON of a record, in bytes: a target may have 20,000 Backups.
const recordLimit = 16 << 10

// RecordVolume returns what a backup tells of v.
func RecordVolume(v *Volume) *RecordedVolume {
	s := &v.Spec
	return &RecordedVolume{StorageClassName: v.Annotations[AnnotationStorageClass],
		PersistentVolumeName: v.Annotations[AnnotationPersistentVolume], Claim: v.Annotations[AnnotationClaim],
		Labels: portableLabels(v.Labels), NumberOfReplicas: s.NumberOfReplicas, DataLocality: s.DataLocality,
		ReplicaAutoBalance: s.ReplicaAutoBalance, ReplicaSoftAntiAffinity: s.ReplicaSoftAntiAffinity,
		ReplicaZoneSoftAntiAffinity: s.ReplicaZoneSoftAntiAffinity,
		ReplicaDiskSoftAntiAffinity: s.ReplicaDiskSoftAntiAffinity,
		FreezeFilesystemForSnapshot: s.FreezeFilesystemForSnapshot, SnapshotDataIntegrity: s.SnapshotDataIntegrity,
		UnmapMarkSnapChainRemoved: s.UnmapMarkSnapChainRemoved, StaleReplicaTimeout: s.StaleReplicaTimeout,
		NodeSelector: slices.Clone(s.NodeSelector), DiskSelector: slices.Clone(s.DiskSelector),
		BackupTargetName: s.Parameters[ParameterBackupTarget]}
}

// ApplyTo gives a new volume the labels and parameters.
func (r *RecordedVolume) ApplyTo(v *Volume) {
	for key, value := range r.Labels {
		if v.Labels == nil {
			v.Labels = map[string]string{}
		}
		v.Labels[key] = value
	}
	s := &v.Spec
	s.NumberOfReplicas, s.DataLocality, s.ReplicaAutoBalance = r.NumberOfReplicas, r.DataLocality, r.ReplicaAutoBalance
	s.ReplicaSoftAntiAffinity, s.ReplicaZoneSoftAntiAffinity = r.ReplicaSoftAntiAffinity, r.ReplicaZoneSoftAntiAffinity
	s.ReplicaDiskSoftAntiAffinity = r.ReplicaDiskSoftAntiAffinity
	s.FreezeFilesystemForSnapshot, s.SnapshotDataIntegrity = r.FreezeFilesystemForSnapshot, r.SnapshotDataIntegrity
	s.UnmapMarkSnapChainRemoved, s.StaleReplicaTimeout = r.UnmapMarkSnapChainRemoved, r.StaleReplicaTimeout
	s.NodeSelector, s.DiskSelector = slices.Clone(r.NodeSelector), slices.Clone(r.DiskSelector)
	if r.BackupTargetName != "" {
		if s.Parameters == nil {
			s.Parameters = map[string]string{}
		}
		s.Parameters[ParameterBackupTarget] = r.BackupTargetName
	}
}

// Encode is the JSON that ParseRecordedVolume reads; empty: r is nil, or larger than a store keeps.
func (r *RecordedVolume) Encode() string {
	if r == nil {
		return ""
	}
	return encodeRecord(r)
}

// ParseRecordedVolume reads the JSON of a store, where everybody with the password writes; nil: no Drover wrote the
// JSON. The values are compared with the rules of a Volume when a volume takes them over.
func ParseRecordedVolume(text string) *RecordedVolume {
	return parseRecord(text, func(r *RecordedVolume) {
		r.Labels = portableLabels(r.Labels)
		if !CanNameTarget(r.BackupTargetName) {
			r.BackupTargetName = ""
		}
	})
}

// encodeRecord is the JSON of a record; empty: it is larger than a store keeps.
func encodeRecord(record any) string {
	text, err := json.Marshal(record)
	if err != nil || len(text) > recordLimit {
		return ""
	}
	return string(text)
}

// parseRecord reads the JSON of encodeRecord, and cleans the record of values that no Drover writes; nil: no Drover
// wrote the JSON.
func parseRecord[T any](text string, clean func(*T)) (r *T) {
	for range 2 { // the second time, all that encodeRecord leaves out is gone
		if text == "" || len(text) > recordLimit {
			return nil
		}
		r = new(T)
		if json.Unmarshal([]byte(text), r) != nil {
			return nil
		}
		clean(r)
		text = encodeRecord(r)
	}
	return r
}

// portableLabels are the valid labels that have the same meaning in every cluster. Drover's own say to what an object
// of this cluster belongs.
func portableLabels(labels map[string]string) map[string]string {
	portable := maps.Clone(labels)
	maps.DeleteFunc(portable, func(key, value string) bool {
		return strings.HasPrefix(key, "drover.io/") || len(validation.IsQualifiedName(key)) > 0 ||
			len(validation.IsValidLabelValue(value)) > 0
	})
	return portable
}
