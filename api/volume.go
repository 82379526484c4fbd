package api

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// VolumeState is the volume's activity, in words that users of the field know.
// +kubebuilder:validation:Enum=creating;standby;detached;attaching;attached;detaching;faulted;deleting
type VolumeState string

// Robustness is how many of a volume's replicas are current.
// +kubebuilder:validation:Enum=unknown;healthy;degraded;faulted
type Robustness string

// Values of VolumeState and Robustness.
const (
	VolumeCreating  VolumeState = "creating"
	VolumeStandby   VolumeState = "standby" // follows backups until its activation
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
	// True: reads wait, no source gives a part of a layer.
	ConditionSourceLost = "SourceLost"
	ConditionReady      = "Ready"
	ConditionIntact     = "DataIntact" // False: a scrub found damaged layers
	ConditionEvicted    = "Evicted"    // False while the replica is on a disk that is evicted or drained; otherwise unset
	ConditionExpanded   = "Expanded"   // False while size and status.size differ
	// On an attached volume with data locality best-effort: whether the node has a whole replica.
	ConditionLocal = "DataLocal"
	// On a volume with replicaAutoBalance: False while a replica is to be in a better place.
	ConditionBalanced = "Balanced"
	// True: the volume has more snapshots than the setting snapshot-count-warning-threshold. No limit is near.
	ConditionTooMany = "TooManySnapshots"
	// False: layers of a replica cannot be merged, so that deleted snapshots give no space back.
	ConditionMerged = "LayersMerged"
)

// Volume is a replicated block device. Status: written by the controller role, but for epoch, incarnation and members,
// which the engine changes by compare-and-swap on the object's resourceVersion.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 128",message="the name of a volume has at most 128 characters"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.spec.standby) || !oldSelf.spec.standby || has(self.spec.standby) && self.spec.standby || has(oldSelf.status) && has(oldSelf.status.isStandby) && oldSelf.status.isStandby",message="Drover has not seen the standby volume yet, and would take it for an ordinary one: activate the volume when status.isStandby is true"
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=vol,categories=drover
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Robustness",type=string,JSONPath=`.status.robustness`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.usedText`
// +kubebuilder:printcolumn:name="Shared",type=string,JSONPath=`.status.sharedText`
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.backingImage`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.status.attachedNode`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Backup",type=date,JSONPath=`.status.lastBackupAt`,priority=1
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
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
// +kubebuilder:validation:XValidation:rule="has(self.fromBackup) == has(oldSelf.fromBackup) && (!has(self.fromBackup) || self.fromBackup == oldSelf.fromBackup)",message="fromBackup cannot change"
// +kubebuilder:validation:XValidation:rule="(has(self.allowDamaged) && self.allowDamaged) == (has(oldSelf.allowDamaged) && oldSelf.allowDamaged)",message="allowDamaged cannot change"
// +kubebuilder:validation:XValidation:rule="!has(self.allowDamaged) || !self.allowDamaged || has(self.fromBackup)",message="allowDamaged needs fromBackup"
// +kubebuilder:validation:XValidation:rule="!has(self.fromBackup) || (!has(self.dataSource) || size(self.dataSource) == 0) && (!has(self.backingImage) || size(self.backingImage) == 0)",message="a volume begins with one of fromBackup, dataSource and backingImage"
// +kubebuilder:validation:XValidation:rule="has(self.importFrom) == has(oldSelf.importFrom) && (!has(self.importFrom) || self.importFrom == oldSelf.importFrom)",message="importFrom cannot change"
// +kubebuilder:validation:XValidation:rule="!has(self.importFrom) || !has(self.fromBackup) && (!has(self.dataSource) || size(self.dataSource) == 0) && (!has(self.backingImage) || size(self.backingImage) == 0)",message="a volume with importFrom begins with neither fromBackup nor dataSource nor backingImage"
// +kubebuilder:validation:XValidation:rule="!has(self.standby) || !self.standby || has(self.fromBackup)",message="a standby volume follows fromBackup: set the URL of a volume's backups"
// +kubebuilder:validation:XValidation:rule="!has(self.standby) || !self.standby || has(oldSelf.standby) && oldSelf.standby",message="a volume cannot become a standby volume after its creation: make another one"
// +kubebuilder:validation:XValidation:rule="!has(self.dataLocality) || self.dataLocality != 'strict-local' || !has(self.numberOfReplicas) || self.numberOfReplicas == 1",message="a volume with dataLocality strict-local has one replica: set numberOfReplicas to 1, or choose best-effort"
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
	// DataSource is the volume or snapshot that the volume begins with: vol://VOLUME or snap://VOLUME/SNAPSHOT. The
	// source's backing image is the volume's too, and need not be named.
	// +kubebuilder:validation:MaxLength=600
	// +kubebuilder:validation:Pattern=`^(vol://[^/]+|snap://[^/]+/[^/]+)?$`
	DataSource string `json:"dataSource,omitempty"`
	// CloneMode is linked (default), which shares the source's layers, or full-copy, which copies their content and shares
	// only the backing image.
	// +kubebuilder:validation:Enum="";linked;full-copy
	CloneMode string `json:"cloneMode,omitempty"`
	// FromBackup is the backup that the volume begins with: status.url of a Backup. A standby volume follows all backups
	// of that backup's volume; its URL may leave out the parameter backup.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=2048
	FromBackup string `json:"fromBackup,omitempty"`
	// AllowDamaged begins the volume with zeros in place of chunks of the backup that its store damaged or lost;
	// restoreStatus lists them. The volume can be used when the whole backup has been restored.
	AllowDamaged bool `json:"allowDamaged,omitempty"`
	// ImportFrom is the file of a disk that the volume begins with. The volume grows to the size of this disk.
	ImportFrom *VolumeImport `json:"importFrom,omitempty"`
	// Standby makes a volume without replicas, which holds the newest backup of a volume. False activates the volume.
	Standby bool `json:"standby,omitempty"`
	// RevertTo asks, once, to replace the content of the detached volume with the content of a snapshot.
	RevertTo *RevertWish `json:"revertTo,omitempty"`
	// Salvage asks, once, to continue with the content of a single replica when no member is left. Writes that only other
	// replicas have are lost.
	Salvage *SalvageWish `json:"salvage,omitempty"`
	// Trim asks, once for each new value, that the file system of the attached volume gives back its unused blocks.
	// +kubebuilder:validation:MaxLength=64
	Trim string `json:"trim,omitempty"`
	// UnmapMarkSnapChainRemoved, enabled: a Trim also deletes the volume's newest snapshot and the snapshots below, down
	// to the first with other users; ignored: the setting remove-snapshots-during-filesystem-trim decides.
	// +kubebuilder:validation:Enum="";ignored;enabled;disabled
	UnmapMarkSnapChainRemoved string `json:"unmapMarkSnapChainRemoved,omitempty"`
	// DataLocality says whether a replica is to be on the node that uses the volume: best-effort makes a replica there
	// after an attach, if possible; strict-local keeps the only replica there, and refuses an attach elsewhere.
	// +kubebuilder:validation:Enum=disabled;best-effort;strict-local
	// +kubebuilder:default=disabled
	DataLocality string `json:"dataLocality,omitempty"`
	// ReplicaAutoBalance moves replicas of a healthy volume: least-effort if more nodes or zones have a replica then,
	// best-effort also for a more even spread, and off disks that are nearly full; ignored: the setting
	// replica-auto-balance decides.
	// +kubebuilder:validation:Enum="";ignored;disabled;least-effort;best-effort
	ReplicaAutoBalance string `json:"replicaAutoBalance,omitempty"`
	// Whether replicas may share a node, a zone or a disk if no other suits; ignored: the setting
	// replica-soft-anti-affinity, replica-zone-soft-anti-affinity or replica-disk-soft-anti-affinity decides.
	// +kubebuilder:validation:Enum="";ignored;enabled;disabled
	ReplicaSoftAntiAffinity string `json:"replicaSoftAntiAffinity,omitempty"`
	// +kubebuilder:validation:Enum="";ignored;enabled;disabled
	ReplicaZoneSoftAntiAffinity string `json:"replicaZoneSoftAntiAffinity,omitempty"`
	// +kubebuilder:validation:Enum="";ignored;enabled;disabled
	ReplicaDiskSoftAntiAffinity string `json:"replicaDiskSoftAntiAffinity,omitempty"`
	// Whether a mounted file system is frozen for the moment of a snapshot; ignored: the setting
	// freeze-filesystem-for-snapshot decides.
	// +kubebuilder:validation:Enum="";ignored;enabled;disabled
	FreezeFilesystemForSnapshot string `json:"freezeFilesystemForSnapshot,omitempty"`
	// SnapshotDataIntegrity says which layers are compared with their digests at intervals: enabled, all; fast-check,
	// layers with touched files; disabled, no layer; ignored: the setting snapshot-data-integrity decides.
	// +kubebuilder:validation:Enum="";ignored;enabled;fast-check;disabled
	SnapshotDataIntegrity string `json:"snapshotDataIntegrity,omitempty"`
	// StaleReplicaTimeout in minutes.
	// +kubebuilder:default=2880
	StaleReplicaTimeout int32    `json:"staleReplicaTimeout,omitempty"`
	NodeSelector        []string `json:"nodeSelector,omitempty"`
	DiskSelector        []string `json:"diskSelector,omitempty"`
	// Nodes for the volume's replicas (from CSI topology); empty: anywhere.
	Nodes []string `json:"nodes,omitempty"`
	// FSType of the filesystem made on a blank volume; empty: ext4.
	// +kubebuilder:validation:Enum="";ext4;xfs;btrfs
	FSType     string `json:"fsType,omitempty"`
	MkfsParams string `json:"mkfsParams,omitempty"`
	// Parameters of the CreateVolume, kept to refuse a repeat with other parameters; backupTargetName names the target
	// of the volume's backups, whoever made the volume.
	Parameters map[string]string `json:"parameters,omitempty"`
}

// VolumeImport says where the file of a disk comes from, in the words of a BackingImageSpec.
//
// +kubebuilder:validation:XValidation:rule="self.sourceType in ['download', 'upload', 'file', 'registry']",message="a volume is imported with sourceType download, upload, file or registry"
type VolumeImport struct {
	SourceType SourceType `json:"sourceType"`
	// +kubebuilder:validation:MaxProperties=8
	// +kubebuilder:default={}
	SourceParameters map[string]string `json:"sourceParameters"`
	SecretRef        *SecretRef        `json:"secretRef,omitempty"`
	// Checksum is the expected SHA-512 (128 hex digits) of the file's bytes, or empty.
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{128})?$`
	Checksum string `json:"checksum,omitempty"`
}

// VolumeStatus is the fact.
type VolumeStatus struct {
	UID        UID         `json:"uid,omitempty"` // of the content; made by the controller before anything else
	State      VolumeState `json:"state,omitempty"`
	Robustness Robustness  `json:"robustness,omitempty"`
	Message    string      `json:"message,omitempty"`
	Size       int64       `json:"size,omitempty"` // that every member really has
	// Used is the bytes of the volume with its snapshots on the fullest disk: head and layers. Shared is the part in
	// layers that an image or another volume has too: a deletion of the volume would not free this part.
	Used         int64  `json:"used,omitempty"`
	Shared       int64  `json:"shared,omitempty"`
	SharedText   string `json:"sharedText,omitempty"`
	SizeText     string `json:"sizeText,omitempty"`
	UsedText     string `json:"usedText,omitempty"`
	AttachedNode string `json:"attachedNode,omitempty"`
	// Epoch counts changes of the engine or of the members; an engine of an older epoch is fenced.
	Epoch int64 `json:"epoch,omitempty"`
	// EngineNode is the node of this epoch's engine; empty after a clean detach.
	EngineNode string `json:"engineNode,omitempty"`
	// Members are the current replicas (object names): every member has every acknowledged write.
	Members []string `json:"members,omitempty"`
	// CloneStatus is set if the spec has a data source.
	CloneStatus *CloneStatus `json:"cloneStatus,omitempty"`
	// RestoreStatus is set if the spec has a backup or an import.
	RestoreStatus *RestoreStatus `json:"restoreStatus,omitempty"`
	// IsStandby is true from the first status of a standby volume until its activation has ended.
	IsStandby bool `json:"isStandby,omitempty"`
	// LastBackup is the newest whole backup of the volume in any target, or the one that a standby volume holds whole
	// or began with; LastBackupAt is the instant of its content, RFC 3339.
	LastBackup   string         `json:"lastBackup,omitempty"`
	LastBackupAt string         `json:"lastBackupAt,omitempty"`
	Standby      *StandbyStatus `json:"standby,omitempty"`
	// Reverted is the outcome of the last RevertTo.
	Reverted *RevertFact `json:"reverted,omitempty"`
	// RevertedEpoch is the epoch of the last completed revert; 0: never. A member that was not reverted then, and has not
	// joined since, serves in no engine.
	RevertedEpoch int64 `json:"revertedEpoch,omitempty"`
	// Salvaged is the outcome of the last Salvage.
	Salvaged *SalvageFact `json:"salvaged,omitempty"`
	// Trimmed is the outcome of the last Trim.
	Trimmed    *TrimFact          `json:"trimmed,omitempty"`
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

// ReplicaMode says whether a replica can be a member.
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
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.usedText`
// +kubebuilder:printcolumn:name="Copied",type=integer,JSONPath=`.status.copy.progress`
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
	// Layers below the head at creation, bottom first: the image's layers.
	Layers []UID `json:"layers,omitempty"`
	// From is the snapshot whose layers the replica begins with; the image's layers are the lowest.
	From *ReplicaSource `json:"from,omitempty"`
	// Leave asks the engine to take the replica out of the volume's members; the replica is deleted then. While the
	// volume has no members yet, Leave says that the replica never becomes a member.
	Leave bool `json:"leave,omitempty"`
	// Transient: the replica is on its source's node, where it may not stay; it is deleted when whole replicas exist where
	// the volume may be.
	Transient bool `json:"transient,omitempty"`
	// Instead is the name of the replica that is deleted when this replica, in a better place, is whole.
	Instead string `json:"instead,omitempty"`
	// Revert asks for the content of a snapshot in the replica's own stack, once for each ID.
	Revert *ReplicaRevert `json:"revert,omitempty"`
	// Scrub asks for a comparison of the replica's layers with their digests, once for each new value.
	// +kubebuilder:validation:MaxLength=64
	Scrub string `json:"scrub,omitempty"`
}

// ReplicaRevert names a snapshot to go back to.
type ReplicaRevert struct {
	ID       string `json:"id"`
	Snapshot UID    `json:"snapshot"`
	// Epoch of the volume in which its members are reverted: a replica that is not reverted is out of date.
	Epoch int64 `json:"epoch,omitempty"`
}

// ReplicaSource names a snapshot in the stack of another replica.
type ReplicaSource struct {
	Replica  UID    `json:"replica"`
	Volume   string `json:"volume"` // of the other replica, for people
	Snapshot UID    `json:"snapshot"`
	Name     string `json:"name"` // of the snapshot, for people
	// Disk of the source, if another disk of the node: layers are read there until copied.
	Disk UID `json:"disk,omitempty"`
	// Layer is the uid of the target layer of a full copy; empty: layers are shared.
	Layer UID `json:"layer,omitempty"`
	// Whole: the replica takes the place of the source, with all its snapshots.
	Whole bool `json:"whole,omitempty"`
}

// ReplicaStatus is the fact.
type ReplicaStatus struct {
	Mode    ReplicaMode `json:"mode,omitempty"`
	Message string      `json:"message,omitempty"`
	Size    int64       `json:"size,omitempty"`
	Used    int64       `json:"used,omitempty"`   // bytes of the head and of all layers of the replica
	Shared  int64       `json:"shared,omitempty"` // the part in layers with other references on the disk
	Epoch   int64       `json:"epoch,omitempty"`
	// UsedText is Used for people.
	UsedText string `json:"usedText,omitempty"`
	// Joined is the last epoch in which the replica was a member, LastWrite the time of the head's last change; both are
	// read while no engine has the replica open.
	Joined    int64        `json:"joined,omitempty"`
	LastWrite *metav1.Time `json:"lastWrite,omitempty"`
	Layers    []UID        `json:"layers,omitempty"`
	// Pinned: the layers of spec.from stay until copied, even if the snapshot and its volume are deleted.
	Pinned bool `json:"pinned,omitempty"`
	// Copy is the progress of copying layers to the replica's disk; nil: nothing to copy.
	Copy *CopyStatus `json:"copy,omitempty"`
	// Fetching says which layers the replica's disk still lacks and fetches from elsewhere; empty: the disk has all
	// layers. A replica that fetches is used, and is no redundancy.
	Fetching string `json:"fetching,omitempty"`
	// Reverted is the ID of the last Revert that the data role handled; RevertError says why nothing was done.
	Reverted    string `json:"reverted,omitempty"`
	RevertError string `json:"revertError,omitempty"`
	// Reverting is written before the revert of an ID: the ID and the head at this time.
	Reverting string `json:"reverting,omitempty"`
	// Scrubbed is the last finished Scrub, LastScrubbed the end of the last scrub for any reason.
	Scrubbed     string       `json:"scrubbed,omitempty"`
	LastScrubbed *metav1.Time `json:"lastScrubbed,omitempty"`
	// MergeError says why layers cannot be merged, so that the space of deleted snapshots does not come back. The data
	// role tries again.
	MergeError string `json:"mergeError,omitempty"`
	// Damage lists the ranges whose content does not match the digest, as scrubs and reads found. Another replica answers
	// reads of these ranges, or the reads fail.
	// +kubebuilder:validation:MaxItems=256
	Damage []LayerDamage `json:"damage,omitempty"`
	// BeyondRepair: no other replica has the content of the damaged layers. A new replica replaces this replica.
	BeyondRepair bool `json:"beyondRepair,omitempty"`
}

// CopyStatus is the progress of a copy.
type CopyStatus struct {
	From     UID   `json:"from,omitempty"` // the disk
	Progress int32 `json:"progress"`       // percent
	Done     int64 `json:"done"`           // bytes of data
	Total    int64 `json:"total"`
}

// LayerDamage is a range of a layer, in bytes; the offset in the volume is the same.
type LayerDamage struct {
	Layer  UID   `json:"layer"`
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// ReplicaList is a list of Replica.
//
// +kubebuilder:object:root=true
type ReplicaList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Replica `json:"items"`
}

// Values of dataLocality. A strict-local volume has its only replica on the node that uses the volume, and attaches
// nowhere else. For best-effort the planner adds a replica on the node after an attach, and removes the surplus replica
// when the new one is a member.
const (
	LocalityDisabled   = "disabled"
	LocalityBestEffort = "best-effort"
	LocalityStrict     = "strict-local"
)

// OfVolume returns the replicas of a volume: other volumes may share the label's value in the list.
func (l *ReplicaList) OfVolume(volume string) []Replica {
	return slices.DeleteFunc(l.Items, func(r Replica) bool { return r.Spec.Volume != volume })
}

// Holders are the members of a volume, whose snapshots agree. A dropped member may have a snapshot of the same uid
// and of another instant: the engine gave the cut up, and repeated the cut without the member.
func (l *ReplicaList) Holders(v *Volume, s *Snapshot) []Replica {
	return slices.DeleteFunc(l.Items, func(r Replica) bool {
		return r.Spec.VolumeUID != s.Status.VolumeUID || !slices.Contains(v.Status.Members, r.Name)
	})
}

// Attachment asks for a volume's device on a node. A workload's Attachment has the volume's name, so that a volume has
// at most a single Attachment (I10). Spec: written by the door or the CLI. Status: by the data role of spec.node alone.
// Finalizer: Finalizer, removed when the device is gone.
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
// An omitted field equals an empty field, because not every client writes empty fields.
//
// +kubebuilder:validation:XValidation:rule="self.volume == oldSelf.volume && self.node == oldSelf.node && (has(self.readOnly) ? self.readOnly : false) == (has(oldSelf.readOnly) ? oldSelf.readOnly : false) && (has(self.purpose) && size(self.purpose) > 0 ? has(oldSelf.purpose) && self.purpose == oldSelf.purpose : !has(oldSelf.purpose) || size(oldSelf.purpose) == 0)",message="an attachment cannot change: delete it and make a new one"
type AttachmentSpec struct {
	Volume   string `json:"volume"`
	Node     string `json:"node"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// Purpose: workload. Other purposes come with backups.
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
	// Blank: the map proves that nothing was ever written, when the device was made. Only then may mkfs run.
	Blank bool `json:"blank,omitempty"`
	// Trimmed is the outcome of the volume's last Trim.
	Trimmed *TrimFact `json:"trimmed,omitempty"`
	// Rebuilds are the replicas that the engine rebuilds.
	Rebuilds   []RebuildStatus    `json:"rebuilds,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// RebuildStatus is the progress of a replica's rebuild.
type RebuildStatus struct {
	Replica string `json:"replica"`
	// Kind says which data is copied: delta, the writes made meanwhile, or full.
	Kind    string `json:"kind,omitempty"`
	Done    int64  `json:"done,omitempty"`  // bytes looked at
	Total   int64  `json:"total,omitempty"` // bytes to look at
	Sent    int64  `json:"sent,omitempty"`  // bytes that differed and travelled
	Message string `json:"message,omitempty"`
}

// AttachmentList is a list of Attachment.
//
// +kubebuilder:object:root=true
type AttachmentList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Attachment `json:"items"`
}

// SalvageWish names the replica whose content is to be the volume's.
type SalvageWish struct {
	Replica string `json:"replica"`
	// ID tells the wish from an earlier wish: any new value.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	ID string `json:"id"`
}

// SalvageFact is the outcome of a salvage.
type SalvageFact struct {
	Replica string `json:"replica,omitempty"`
	ID      string `json:"id,omitempty"`
	Done    bool   `json:"done,omitempty"`
	Message string `json:"message,omitempty"`
}

// TrimFact is the outcome of a Trim.
type TrimFact struct {
	ID      string     `json:"id,omitempty"` // the value of Trim
	State   CloneState `json:"state,omitempty"`
	Message string     `json:"message,omitempty"`
	Bytes   int64      `json:"bytes,omitempty"` // that the file system has given back
	// Snapshots that the Trim deleted; the space of their own layers comes back in the background.
	Snapshots []string `json:"snapshots,omitempty"`
}
