package api

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// VolumeState is what a volume is doing, in the words that users of the field know.
// +kubebuilder:validation:Enum=creating;detached;attaching;attached;detaching;faulted;deleting
type VolumeState string

// Robustness is how many of a volume's replicas are current.
// +kubebuilder:validation:Enum=unknown;healthy;degraded;faulted
type Robustness string

// Values of VolumeState and Robustness.
const (
	VolumeCreating  VolumeState = "creating"
	VolumeDetached  VolumeState = "detached"
	VolumeAttaching VolumeState = "attaching"
	VolumeAttached  VolumeState = "attached"
	VolumeDetaching VolumeState = "detaching"
	VolumeFaulted   VolumeState = "faulted"
	VolumeDeleting  VolumeState = "deleting"

	RobustUnknown  Robustness = "unknown"
	RobustHealthy  Robustness = "healthy"
	RobustDegraded Robustness = "degraded"
	RobustFaulted  Robustness = "faulted"
)

// Condition types of Volume and Attachment.
const (
	ConditionScheduled = "Scheduled" // every replica has a disk
	ConditionImage     = "BackingImageReady"
	ConditionSpace     = "SpaceAvailable" // False: writes are paused, the disk is full
	// True: reads wait, the disk that the image is borrowed from fails.
	ConditionSourceLost = "SourceLost"
	ConditionReady      = "Ready"
	ConditionExpanded   = "Expanded" // False while size and status.size differ
)

// Volume is a replicated block device. Status: written by the controller role, but for epoch, incarnation and members,
// which the engine changes by compare-and-swap on the object's resourceVersion.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 128",message="the name of a volume has at most 128 characters"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=vol,categories=drover
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Robustness",type=string,JSONPath=`.status.robustness`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.usedText`
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.backingImage`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.attachedNode`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Volume struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              VolumeSpec   `json:"spec"`
	Status            VolumeStatus `json:"status,omitempty"`
}

// VolumeSpec is the wish. The size can only grow; the image is fixed.
//
// +kubebuilder:validation:XValidation:rule="self.size >= oldSelf.size",message="a volume cannot shrink"
// +kubebuilder:validation:XValidation:rule="has(self.backingImage) == has(oldSelf.backingImage) && (!has(self.backingImage) || self.backingImage == oldSelf.backingImage)",message="backingImage cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.dataSource) == has(oldSelf.dataSource) && (!has(self.dataSource) || self.dataSource == oldSelf.dataSource)",message="dataSource cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.cloneMode) == has(oldSelf.cloneMode) && (!has(self.cloneMode) || self.cloneMode == oldSelf.cloneMode)",message="cloneMode cannot change"
type VolumeSpec struct {
	// Size in bytes, a multiple of 2 MiB, at least 10 MiB.
	// +kubebuilder:validation:Minimum=10485760
	// +kubebuilder:validation:MultipleOf=2097152
	Size int64 `json:"size"`
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=20
	NumberOfReplicas int32  `json:"numberOfReplicas,omitempty"`
	BackingImage     string `json:"backingImage,omitempty"`
	// DataSource is what the volume begins with: vol://VOLUME or snap://VOLUME/SNAPSHOT. Its backing image, if it has
	// one, is the volume's too, and need not be named.
	// +kubebuilder:validation:MaxLength=600
	// +kubebuilder:validation:Pattern=`^(vol://[^/]+|snap://[^/]+/[^/]+)?$`
	DataSource string `json:"dataSource,omitempty"`
	// CloneMode says how: linked (default) shares the source's layers; full-copy is not supported yet.
	// +kubebuilder:validation:Enum="";linked;full-copy
	CloneMode string `json:"cloneMode,omitempty"`
	// RevertTo asks for what a snapshot of the volume holds in place of what it holds now, once, if it is detached.
	RevertTo *RevertWish `json:"revertTo,omitempty"`
	// +kubebuilder:validation:Enum=disabled;best-effort;strict-local
	// +kubebuilder:default=disabled
	DataLocality string `json:"dataLocality,omitempty"`
	// StaleReplicaTimeout in minutes.
	// +kubebuilder:default=2880
	StaleReplicaTimeout int32    `json:"staleReplicaTimeout,omitempty"`
	NodeSelector        []string `json:"nodeSelector,omitempty"`
	DiskSelector        []string `json:"diskSelector,omitempty"`
	// Nodes where the volume must be placed (from CSI topology); empty: anywhere.
	Nodes []string `json:"nodes,omitempty"`
	// FSType of the filesystem made on a blank volume; empty: ext4.
	// +kubebuilder:validation:Enum="";ext4;xfs;btrfs
	FSType     string `json:"fsType,omitempty"`
	MkfsParams string `json:"mkfsParams,omitempty"`
	// Parameters as given at CreateVolume, kept to answer a repeat with other ones.
	Parameters map[string]string `json:"parameters,omitempty"`
}

// VolumeStatus is the fact.
type VolumeStatus struct {
	UID          UID         `json:"uid,omitempty"` // of the content; made by the controller before anything else
	State        VolumeState `json:"state,omitempty"`
	Robustness   Robustness  `json:"robustness,omitempty"`
	Message      string      `json:"message,omitempty"`
	Size         int64       `json:"size,omitempty"` // that every member really has
	Used         int64       `json:"used,omitempty"` // bytes on the fullest disk, without shared layers
	SizeText     string      `json:"sizeText,omitempty"`
	UsedText     string      `json:"usedText,omitempty"`
	AttachedNode string      `json:"attachedNode,omitempty"`
	// Epoch counts changes of the engine or of the members; an engine of an older epoch is fenced.
	Epoch int64 `json:"epoch,omitempty"`
	// EngineNode is where the engine of this epoch runs, empty after a clean detach.
	EngineNode string `json:"engineNode,omitempty"`
	// Members are the replicas (object names) that are current: every one of them has every acknowledged write.
	Members []string `json:"members,omitempty"`
	// CloneStatus is there where the spec has a data source.
	CloneStatus *CloneStatus `json:"cloneStatus,omitempty"`
	// Reverted is what became of the last RevertTo.
	Reverted   *RevertFact        `json:"reverted,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// VolumeList is a list of Volume.
//
// +kubebuilder:object:root=true
type VolumeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Volume `json:"items"`
}

// ReplicaMode says what a replica is good for.
//
// +kubebuilder:validation:Enum=creating;current;stale;failed
type ReplicaMode string

// Replica modes.
const (
	ReplicaCreating ReplicaMode = "creating"
	ReplicaCurrent  ReplicaMode = "current"
	ReplicaStale    ReplicaMode = "stale"
	ReplicaFailed   ReplicaMode = "failed"
)

// Replica is a volume on a disk. Spec: written by the controller role. Status: by the data role of spec.node alone.
// Labels: LabelVolume, LabelNode, LabelDisk. Name: <volume name>.<first 8 of its uid>. Finalizer: Finalizer.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=rep,categories=drover
// +kubebuilder:printcolumn:name="Volume",type=string,JSONPath=`.spec.volume`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Mode",type=string,JSONPath=`.status.mode`
// +kubebuilder:printcolumn:name="Used",type=integer,JSONPath=`.status.used`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`
type Replica struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ReplicaSpec   `json:"spec"`
	Status            ReplicaStatus `json:"status,omitempty"`
}

// ReplicaSpec is the wish.
type ReplicaSpec struct {
	UID       UID    `json:"uid"` // folder on the disk
	Volume    string `json:"volume"`
	VolumeUID UID    `json:"volumeUID"`
	Node      string `json:"node"`
	Disk      UID    `json:"disk"`
	Size      int64  `json:"size"`
	// Layers below the head at creation, bottom first (the image's).
	Layers []UID `json:"layers,omitempty"`
	// From is the snapshot on the same disk whose layers the replica shares; those of the image are the lowest of them.
	From *ReplicaSource `json:"from,omitempty"`
	// Revert asks for what a snapshot in the replica's own stack holds, once for each ID.
	Revert *ReplicaRevert `json:"revert,omitempty"`
}

// ReplicaRevert names a snapshot to go back to.
type ReplicaRevert struct {
	ID       string `json:"id"`
	Snapshot UID    `json:"snapshot"`
}

// ReplicaSource names a snapshot in the stack of another replica.
type ReplicaSource struct {
	Replica  UID    `json:"replica"`
	Volume   string `json:"volume"` // of that replica, for people
	Snapshot UID    `json:"snapshot"`
	Name     string `json:"name"` // of the snapshot, for people
}

// ReplicaStatus is the fact.
type ReplicaStatus struct {
	Mode    ReplicaMode `json:"mode,omitempty"`
	Message string      `json:"message,omitempty"`
	Size    int64       `json:"size,omitempty"`
	Used    int64       `json:"used,omitempty"` // bytes of head and own layers
	Epoch   int64       `json:"epoch,omitempty"`
	Layers  []UID       `json:"layers,omitempty"`
	// Reverted is the ID of the last Revert that was looked at; RevertError says why nothing was done.
	Reverted    string `json:"reverted,omitempty"`
	RevertError string `json:"revertError,omitempty"`
	// Reverting is written before the revert of an ID: the ID and the head of then. Another head: it was done.
	Reverting string `json:"reverting,omitempty"`
}

// ReplicaList is a list of Replica.
//
// +kubebuilder:object:root=true
type ReplicaList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Replica `json:"items"`
}

// Attachment asks for a volume's device on a node. A workload's Attachment has the volume's name, so that there is one
// at most (I10). Spec: written by the door or the CLI. Status: by the data role of spec.node alone. Finalizer:
// Finalizer, removed when the device is gone.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=att,categories=drover
// +kubebuilder:printcolumn:name="Volume",type=string,JSONPath=`.spec.volume`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="Ready",type=boolean,JSONPath=`.status.ready`
// +kubebuilder:printcolumn:name="Device",type=string,JSONPath=`.status.device`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`
type Attachment struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              AttachmentSpec   `json:"spec"`
	Status            AttachmentStatus `json:"status,omitempty"`
}

// AttachmentSpec is the wish and cannot change.
//
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="an attachment cannot change: delete it and make a new one"
type AttachmentSpec struct {
	Volume   string `json:"volume"`
	Node     string `json:"node"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// Purpose: workload. Others come with backups.
	// +kubebuilder:validation:Enum=workload
	// +kubebuilder:default=workload
	Purpose string `json:"purpose,omitempty"`
}

// AttachmentStatus is the fact.
type AttachmentStatus struct {
	Ready   bool   `json:"ready,omitempty"`
	Device  string `json:"device,omitempty"` // /dev/loopN
	Size    int64  `json:"size,omitempty"`   // of the device, bytes
	Message string `json:"message,omitempty"`
	Epoch   int64  `json:"epoch,omitempty"`
	// Blank: nothing was ever written, the map proves it; taken when the device was made. Only then may mkfs run.
	Blank      bool               `json:"blank,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// AttachmentList is a list of Attachment.
//
// +kubebuilder:object:root=true
type AttachmentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Attachment `json:"items"`
}
