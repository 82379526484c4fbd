package api

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Node is a machine with disks. The spec is the user's; the status is written by the node role of that machine alone.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,categories=drover
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Seen",type=date,JSONPath=`.status.heartbeat`
// +kubebuilder:printcolumn:name="Disks",type=integer,JSONPath=`.status.diskCount`
// +kubebuilder:printcolumn:name="Capacity",type=string,JSONPath=`.status.capacity`
// +kubebuilder:printcolumn:name="Available",type=string,JSONPath=`.status.available`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Node struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              NodeSpec   `json:"spec,omitempty"`
	Status            NodeStatus `json:"status,omitempty"`
}

// NodeSpec says which folders of the node are disks.
type NodeSpec struct {
	// Schedulable false keeps new replicas and image copies away.
	// +kubebuilder:default=true
	Schedulable *bool    `json:"schedulable,omitempty"`
	Tags        []string `json:"tags,omitempty"`
	// EvictionRequested moves everything to other nodes: what each disk's evictionRequested does.
	EvictionRequested bool `json:"evictionRequested,omitempty"`
	// +listType=map
	// +listMapKey=path
	Disks []DiskSpec `json:"disks,omitempty"`
}

// DiskSpec is one disk: a folder, usually the mount point of a file system of its own.
type DiskSpec struct {
	// +kubebuilder:validation:Pattern=`^/`
	Path string   `json:"path"`
	Tags []string `json:"tags,omitempty"`
	// Schedulable false keeps new replicas and image copies away.
	// +kubebuilder:default=true
	Schedulable *bool `json:"schedulable,omitempty"`
	// EvictionRequested moves everything elsewhere, then the disk can be removed.
	EvictionRequested bool `json:"evictionRequested,omitempty"`
	// ReservedBytes are left to others on the same file system.
	// +kubebuilder:validation:Minimum=0
	ReservedBytes int64 `json:"reservedBytes,omitempty"`
}

// NodeStatus is what the node found.
type NodeStatus struct {
	// Heartbeat is renewed by the node role, every HeartbeatSeconds; 0: 10.
	Heartbeat        metav1.Time `json:"heartbeat,omitempty"`
	HeartbeatSeconds int32       `json:"heartbeatSeconds,omitempty"`
	Addresses        []string    `json:"addresses,omitempty"`
	// DataAddress is where the data process serves this node's replicas to other nodes: host:port. Written by the data
	// role, alone, by patch.
	DataAddress string `json:"dataAddress,omitempty"`
	// LayerAddress is where the node role serves layers: host:port, reachable for other nodes if there may be any.
	LayerAddress string             `json:"layerAddress,omitempty"`
	Kernel       string             `json:"kernel,omitempty"`
	Version      string             `json:"version,omitempty"`
	Resend       bool               `json:"resend,omitempty"` // the kernel can hand devices over after a kill -9
	DiskCount    int32              `json:"diskCount,omitempty"`
	Capacity     string             `json:"capacity,omitempty"`  // sum over disks, for people
	Available    string             `json:"available,omitempty"` // sum over disks, for people
	Disks        []DiskStatus       `json:"disks,omitempty"`
	Conditions   []metav1.Condition `json:"conditions,omitempty"`
}

// DiskStatus is a disk that the node found, or why it could not use it.
type DiskStatus struct {
	Path  string `json:"path"`
	UID   UID    `json:"uid,omitempty"`
	Ready bool   `json:"ready"`
	// Gone: the node has looked where the disk was, and it is not there: nothing, or another disk, is mounted there.
	Gone      bool   `json:"gone,omitempty"`
	Message   string `json:"message,omitempty"`
	FSType    string `json:"fsType,omitempty"`
	Capacity  int64  `json:"capacity,omitempty"`  // bytes of the file system
	Available int64  `json:"available,omitempty"` // bytes free now, less the reserve
}

// NodeList is a list of Node.
//
// +kubebuilder:object:root=true
type NodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Node `json:"items"`
}

// Setting is one cluster-wide setting; its name is the setting's (see Settings for the known ones and defaults).
//
// +kubebuilder:validation:XValidation:rule="!(self.metadata.name in ['backing-image-cleanup-wait-interval','backing-image-verify-interval','concurrent-image-copies-per-sender','concurrent-replica-copies-per-node','replica-copy-rate-limit','clone-stall-timeout','all-replicas-lost-timeout','default-replica-count','replica-replenishment-wait-interval','storage-minimal-available-percentage','storage-over-provisioning-percentage','merge-rate-limit','snapshot-count-warning-threshold','volume-scrub-interval','volume-scrub-rate-limit','volume-attach-limit','replica-auto-balance-wait-interval','replica-auto-balance-disk-pressure-percentage','concurrent-backups-per-node','failed-backup-ttl','backup-guest-speed-percentage']) || self.value.matches('^[0-9]{1,9}$')",message="the value of this setting is a whole number, in quotes"
// +kubebuilder:validation:XValidation:rule="!(self.metadata.name in ['allow-private-image-sources','replica-soft-anti-affinity','replica-zone-soft-anti-affinity','replica-disk-soft-anti-affinity','freeze-filesystem-for-snapshot','remove-snapshots-during-filesystem-trim']) || self.value in ['true','false']",message="the value of this setting is true or false, in quotes"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'default-data-locality' || self.value in ['disabled','best-effort','strict-local']",message="the value of this setting is disabled, best-effort or strict-local"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'replica-auto-balance' || self.value in ['disabled','least-effort','best-effort']",message="the value of this setting is disabled, least-effort or best-effort"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'snapshot-data-integrity' || self.value in ['enabled','fast-check','disabled']",message="the value of this setting is enabled, fast-check or disabled"
// +kubebuilder:validation:XValidation:rule="self.metadata.name in ['all-replicas-lost-timeout','allow-private-image-sources','backing-image-cleanup-wait-interval','backing-image-verify-interval','backup-guest-speed-percentage','clone-stall-timeout','cluster-name','concurrent-backups-per-node','concurrent-image-copies-per-sender','concurrent-replica-copies-per-node','default-data-locality','default-replica-count','failed-backup-ttl','freeze-filesystem-for-snapshot','merge-rate-limit','remove-snapshots-during-filesystem-trim','replica-auto-balance','replica-auto-balance-disk-pressure-percentage','replica-auto-balance-wait-interval','replica-copy-rate-limit','replica-disk-soft-anti-affinity','replica-replenishment-wait-interval','replica-soft-anti-affinity','replica-zone-soft-anti-affinity','snapshot-count-warning-threshold','snapshot-data-integrity','storage-minimal-available-percentage','storage-over-provisioning-percentage','volume-attach-limit','volume-scrub-interval','volume-scrub-rate-limit']",message="unknown setting; the known ones are all-replicas-lost-timeout, allow-private-image-sources, backing-image-cleanup-wait-interval, backing-image-verify-interval, backup-guest-speed-percentage, clone-stall-timeout, cluster-name, concurrent-backups-per-node, concurrent-image-copies-per-sender, concurrent-replica-copies-per-node, default-data-locality, default-replica-count, failed-backup-ttl, freeze-filesystem-for-snapshot, merge-rate-limit, remove-snapshots-during-filesystem-trim, replica-auto-balance, replica-auto-balance-disk-pressure-percentage, replica-auto-balance-wait-interval, replica-copy-rate-limit, replica-disk-soft-anti-affinity, replica-replenishment-wait-interval, replica-soft-anti-affinity, replica-zone-soft-anti-affinity, snapshot-count-warning-threshold, snapshot-data-integrity, storage-minimal-available-percentage, storage-over-provisioning-percentage, volume-attach-limit, volume-scrub-interval, volume-scrub-rate-limit"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'cluster-name' || self.value.matches('^[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?$')",message="the value of this setting is a name of at most 63 lower-case letters, digits, hyphens and dots"
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,categories=drover
// +kubebuilder:printcolumn:name="Value",type=string,JSONPath=`.value`
type Setting struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Value             string `json:"value"`
}

// SettingList is a list of Setting.
//
// +kubebuilder:object:root=true
type SettingList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Setting `json:"items"`
}

// Settings known today, with their defaults.
var Settings = map[string]string{
	"storage-over-provisioning-percentage": "200",   // sum of volume sizes on a disk, in percent of its capacity
	"storage-minimal-available-percentage": "10",    // no new replica on a disk with less free
	"backing-image-cleanup-wait-interval":  "60",    // minutes until an unused copy goes; 0: never
	"backing-image-verify-interval":        "168",   // hours between two verifications of a copy; 0: never
	"concurrent-image-copies-per-sender":   "3",     // simultaneous copies from one disk
	"concurrent-replica-copies-per-node":   "2",     // simultaneous copies of clones and replicas on one node; 0: 1
	"replica-copy-rate-limit":              "0",     // MiB per second that such a copy reads at most; 0: no limit
	"clone-stall-timeout":                  "60",    // minutes without progress after which a clone has failed
	"replica-replenishment-wait-interval":  "600",   // seconds that a replica of a silent node is waited for
	"replica-soft-anti-affinity":           "false", // replicas of a volume may be on one node where no other suits
	"replica-zone-soft-anti-affinity":      "true",  // the same for zones: nodes of one label topology.kubernetes.io/zone
	"replica-disk-soft-anti-affinity":      "false", // and for disks
	"allow-private-image-sources":          "false",
	"default-replica-count":                "1",
	"all-replicas-lost-timeout":            "0", // seconds that I/O waits where no replica is reached; 0: for ever
	"default-data-locality":                "disabled",
	"replica-auto-balance":                 "disabled", // for volumes that do not say
	// Seconds that a volume must have been healthy, and badly placed, before a replica moves.
	"replica-auto-balance-wait-interval": "60",
	// With best-effort replicas leave a disk of which more than that is in use; 0: never.
	"replica-auto-balance-disk-pressure-percentage": "90",
	"merge-rate-limit":               "200",   // MiB per second that a merge of layers copies at most; 0: no limit
	"volume-scrub-interval":          "168",   // hours between two comparisons of a replica with digests; 0: never
	"volume-scrub-rate-limit":        "50",    // MiB per second that a comparison reads at most; 0: no limit
	"freeze-filesystem-for-snapshot": "false", // mounted file systems are frozen while they are cut
	// A trim also deletes the snapshots below the volume, for volumes that do not say.
	"remove-snapshots-during-filesystem-trim": "false",
	// Snapshots of a volume above which its condition TooManySnapshots is True; 0: never. There is no limit.
	"snapshot-count-warning-threshold": "100",
	"snapshot-data-integrity":          "enabled", // kind of comparison at these intervals, for volumes that do not say
	"volume-attach-limit":              "256",     // attached volumes on one node at most
	"concurrent-backups-per-node":      "2",       // backups that one node makes at once; 0: 1
	// Percent of its speed that the I/O of volumes keeps at a node that makes backups; 0: backups never pause.
	"backup-guest-speed-percentage": "90",
	"failed-backup-ttl":             "1440", // minutes until a failed backup is deleted; 0: never
	// Name of the cluster in stores of backups. The first backup creates the setting with a generated name.
	"cluster-name": "",
}

// DefaultHeartbeat is the interval of the heartbeat of a node that does not name another.
const DefaultHeartbeat = 10 * time.Second

// SilentAfter is how old the node's heartbeat may be.
func (n *Node) SilentAfter() time.Duration {
	every := DefaultHeartbeat
	if s := n.Status.HeartbeatSeconds; s > 0 {
		every = time.Duration(s) * time.Second
	}
	return 4 * every
}
