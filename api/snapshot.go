package api

import (
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Snapshot is the content of a volume at an instant. Spec: written by the client that wants the snapshot, or by the
// data role for a snapshot found on a disk. Status: by the data role of the node with the volume's replica; without
// such a replica, by the controller role. Labels: LabelVolume. Owner: the Volume. Finalizer: Finalizer. The snapshot
// outlives the deletion of its volume, whose object stays until the last snapshot is deleted.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 128",message="the name of a snapshot has at most 128 characters"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=snap,categories=drover
// +kubebuilder:printcolumn:name="Volume",type=string,JSONPath=`.spec.volume`
// +kubebuilder:printcolumn:name="Ready",type=boolean,JSONPath=`.status.readyToUse`
// +kubebuilder:printcolumn:name="Restore",type=string,JSONPath=`.status.restoreSizeText`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="Parent",type=string,JSONPath=`.status.parent`
// +kubebuilder:printcolumn:name="Created",type=string,JSONPath=`.status.creationTime`
// +kubebuilder:printcolumn:name="Error",type=string,JSONPath=`.status.error`
type Snapshot struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              SnapshotSpec   `json:"spec"`
	Status            SnapshotStatus `json:"status,omitempty"`
}

// SnapshotSpec is the wish and cannot change.
//
// An omitted field equals an empty field, because not every client writes empty fields.
//
// +kubebuilder:validation:XValidation:rule="self.volume == oldSelf.volume && (has(self.createSnapshot) ? self.createSnapshot : false) == (has(oldSelf.createSnapshot) ? oldSelf.createSnapshot : false) && (has(self.group) && size(self.group) > 0 ? has(oldSelf.group) && self.group == oldSelf.group : !has(oldSelf.group) || size(oldSelf.group) == 0) && (has(self.labels) && size(self.labels) > 0 ? has(oldSelf.labels) && self.labels == oldSelf.labels : !has(oldSelf.labels) || size(oldSelf.labels) == 0)",message="a snapshot cannot change: delete it and make a new one"
type SnapshotSpec struct {
	// Volume that the snapshot is of.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Volume string `json:"volume"`
	// CreateSnapshot asks for a new snapshot. Without the field, the object stands for an existing snapshot.
	CreateSnapshot bool `json:"createSnapshot,omitempty"`
	// Group is the SnapshotGroup that the snapshot is part of: the group's snapshots are cut and deleted together.
	// +kubebuilder:validation:MaxLength=100
	Group string `json:"group,omitempty"`
	// +kubebuilder:validation:MaxProperties=64
	Labels map[string]string `json:"labels,omitempty"`
}

// SnapshotStatus is the fact.
type SnapshotStatus struct {
	// Parent is the snapshot below; empty: none.
	Parent string `json:"parent,omitempty"`
	// Children are the snapshots with this snapshot as parent, and VolumeHead if the volume itself stands on the snapshot.
	Children    map[string]bool `json:"children,omitempty"`
	MarkRemoved bool            `json:"markRemoved,omitempty"` // being deleted
	// UserCreated is false for Drover's own snapshots, such as to clone a volume.
	UserCreated bool `json:"userCreated,omitempty"`
	// CreationTime is the instant of the cut, RFC 3339.
	CreationTime string            `json:"creationTime,omitempty"`
	Size         int64             `json:"size,omitempty"` // bytes of the snapshot's own layer on the disk
	Labels       map[string]string `json:"labels,omitempty"`
	OwnerID      string            `json:"ownerID,omitempty"` // node that writes the status
	Error        string            `json:"error,omitempty"`
	RestoreSize  int64             `json:"restoreSize,omitempty"` // of the volume at that instant, bytes
	ReadyToUse   bool              `json:"readyToUse,omitempty"`
	// UID of the snapshot in the replica's stack, and of the snapshot's layer.
	UID   UID `json:"uid,omitempty"`
	Layer UID `json:"layer,omitempty"`
	// Checksum is the root digest of the snapshot's own layer, sha256:HEX over the digests of the layer's chunks and the
	// map; empty until computed, a moment after the cut. A merge with another layer changes the checksum.
	Checksum string `json:"checksum,omitempty"`
	// VolumeUID tells the volume from a later volume of the same name.
	VolumeUID       UID    `json:"volumeUID,omitempty"`
	SizeText        string `json:"sizeText,omitempty"`
	RestoreSizeText string `json:"restoreSizeText,omitempty"`
}

// NewSnapshot is the wish for a snapshot of a volume.
func NewSnapshot(v *Volume, name string) *Snapshot {
	s := &Snapshot{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: SnapshotSpec{Volume: v.Name, CreateSnapshot: true}}
	s.Adorn(v)
	return s
}

// Adorn adds the required metadata of a snapshot, and reports whether anything was missing.
func (s *Snapshot) Adorn(v *Volume) bool {
	changed := false
	label := LabelValue(v.Name)
	if s.Labels[LabelVolume] != label {
		if s.Labels == nil {
			s.Labels = map[string]string{}
		}
		s.Labels[LabelVolume], changed = label, true
	}
	if !slices.Contains(s.Finalizers, Finalizer) {
		s.Finalizers, changed = append(s.Finalizers, Finalizer), true
	}
	if !slices.ContainsFunc(s.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == v.UID }) {
		s.OwnerReferences, changed = append(s.OwnerReferences, metav1.OwnerReference{
			APIVersion: GroupVersion.String(), Kind: "Volume", Name: v.Name, UID: v.UID}), true
	}
	return changed
}

// Bare reports whether any of Adorn's metadata was taken away.
func (s *Snapshot) Bare() bool {
	return s.Labels[LabelVolume] != LabelValue(s.Spec.Volume) || !slices.Contains(s.Finalizers, Finalizer) ||
		len(s.OwnerReferences) == 0
}

// VolumeHead is, among the children of a snapshot, the volume.
const VolumeHead = "volume-head"

// LabelClone is in the spec's labels of a snapshot that was made to clone a volume; value: the name of the clone. The
// snapshot is deleted when the clone exists.
const LabelClone = "drover.io/clone"

// LabelExport stands beside LabelClone on a snapshot for a backing image; value: the image's name.
const LabelExport = "drover.io/export"

// ConditionKept is True on a deleted Volume that stays, hidden, because snapshots of the volume exist.
const ConditionKept = "KeptForSnapshots"

// SnapshotList is a list of Snapshot.
//
// +kubebuilder:object:root=true
type SnapshotList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Snapshot `json:"items"`
}

// CloneState is the progress of a volume that begins with the content of another volume.
//
// +kubebuilder:validation:Enum=initiated;completed;failed
type CloneState string

// Clone states.
const (
	CloneInitiated CloneState = "initiated"
	CloneCompleted CloneState = "completed"
	CloneFailed    CloneState = "failed"
)

// CloneStatus is about a volume's data source.
type CloneStatus struct {
	State    CloneState `json:"state,omitempty"`
	Source   string     `json:"source,omitempty"`   // the volume
	Snapshot string     `json:"snapshot,omitempty"` // that was, or is being, cloned
	Message  string     `json:"message,omitempty"`
	// Progress is the copied percent of a full copy, or of a linked clone on another disk than its source; a linked
	// clone on the disk of its source has nothing to copy.
	Progress int32 `json:"progress,omitempty"`
	// WaitingSince is the time since which every try found the source unusable.
	WaitingSince *metav1.Time `json:"waitingSince,omitempty"`
	// Retried is the last value of AnnotationRetry that the controller followed.
	Retried string `json:"retried,omitempty"`
}

// RevertWish asks for a revert.
type RevertWish struct {
	Snapshot string `json:"snapshot"`
	// ID tells the wish from an earlier wish: any new value.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	ID string `json:"id"`
}

// RevertFact is the outcome of a revert.
type RevertFact struct {
	Snapshot string     `json:"snapshot,omitempty"`
	ID       string     `json:"id,omitempty"`
	State    CloneState `json:"state,omitempty"`
	Message  string     `json:"message,omitempty"`
}

// Clone modes: CloneLinked shares the source's layers, and is instant at any size; CloneFull copies the layers.
const (
	CloneLinked = "linked"
	CloneFull   = "full-copy"
)

// DataSource is the volume or snapshot that a volume begins with.
//
// +kubebuilder:object:generate=false
type DataSource struct {
	Volume   string
	Snapshot string // empty: the volume's present content
}

// String is the form in Volume.spec.dataSource, and a snapshot's handle in CSI.
func (s DataSource) String() string {
	switch {
	case s.Volume == "":
		return ""
	case s.Snapshot == "":
		return "vol://" + s.Volume
	}
	return "snap://" + s.Volume + "/" + s.Snapshot
}

// ParseDataSource reads vol://VOLUME or snap://VOLUME/SNAPSHOT. Nothing is no source.
func ParseDataSource(text string) (DataSource, error) {
	if text == "" {
		return DataSource{}, nil
	}
	if v, ok := strings.CutPrefix(text, "vol://"); ok && v != "" && !strings.Contains(v, "/") {
		return DataSource{Volume: v}, nil
	}
	if rest, ok := strings.CutPrefix(text, "snap://"); ok {
		v, s, _ := strings.Cut(rest, "/")
		if v != "" && s != "" && !strings.Contains(s, "/") {
			return DataSource{v, s}, nil
		}
	}
	return DataSource{}, Errorf(Invalid, "data source %.200q is neither vol://VOLUME nor snap://VOLUME/SNAPSHOT", text)
}
