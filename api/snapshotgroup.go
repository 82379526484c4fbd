package api

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SnapshotGroup is the content of several volumes at an instant: a Snapshot of each volume, all cut while writes to all
// volumes were held back. Spec: written by the client that wants the group. Status: by the data role of the node with
// the replica of the first volume. Finalizer: Finalizer, removed by the controller role after the deletion of the
// group's Snapshots, which are deleted with the group.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 100",message="the name of a group of snapshots has at most 100 characters"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=snapgroup,categories=drover
// +kubebuilder:printcolumn:name="Volumes",type=string,JSONPath=`.spec.volumes`
// +kubebuilder:printcolumn:name="Ready",type=boolean,JSONPath=`.status.readyToUse`
// +kubebuilder:printcolumn:name="Created",type=string,JSONPath=`.status.creationTime`
// +kubebuilder:printcolumn:name="Error",type=string,JSONPath=`.status.error`
type SnapshotGroup struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              SnapshotGroupSpec   `json:"spec"`
	Status            SnapshotGroupStatus `json:"status,omitempty"`
}

// SnapshotGroupSpec is the wish and cannot change.
//
// An omitted field equals an empty field, because not every client writes empty fields.
//
// +kubebuilder:validation:XValidation:rule="self.volumes == oldSelf.volumes && (has(self.labels) && size(self.labels) > 0 ? has(oldSelf.labels) && self.labels == oldSelf.labels : !has(oldSelf.labels) || size(oldSelf.labels) == 0)",message="a group of snapshots cannot change: delete it and make a new one"
type SnapshotGroupSpec struct {
	// Volumes to cut at the same instant. Attached volumes are attached on the same node, which cuts all volumes; the
	// single replica of a detached volume is on this node, too.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=128
	// +listType=set
	Volumes []string `json:"volumes"`
	// Labels of the group's snapshots.
	// +kubebuilder:validation:MaxProperties=64
	Labels map[string]string `json:"labels,omitempty"`
}

// SnapshotGroupStatus is the fact.
type SnapshotGroupStatus struct {
	// CreationTime is the instant of the cut, RFC 3339; every Snapshot of the group has the same.
	CreationTime string `json:"creationTime,omitempty"`
	ReadyToUse   bool   `json:"readyToUse,omitempty"`
	// Members are the snapshots, in the order of the volumes.
	Members []SnapshotGroupMember `json:"members,omitempty"`
	Error   string                `json:"error,omitempty"`
}

// SnapshotGroupMember is a snapshot of a group.
type SnapshotGroupMember struct {
	Volume   string `json:"volume"`
	Snapshot string `json:"snapshot"`
}

// SnapshotGroupList is a list of SnapshotGroup.
//
// +kubebuilder:object:root=true
type SnapshotGroupList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SnapshotGroup `json:"items"`
}

// NewSnapshotGroup is the wish for a group of snapshots.
func NewSnapshotGroup(name string, volumes []string) *SnapshotGroup {
	volumes = slices.Compact(slices.Sorted(slices.Values(volumes)))
	return &SnapshotGroup{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{Finalizer}},
		Spec: SnapshotGroupSpec{Volumes: volumes}}
}

// Member is the name of the group's snapshot of a volume.
func (g *SnapshotGroup) Member(volume string) string {
	if name := g.Name + "-" + volume; len(name) <= 63 {
		return name
	}
	sum := sha256.Sum256([]byte(volume))
	return g.Name + "-" + hex.EncodeToString(sum[:8])
}
