package api

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Node is a machine with disks. The spec is the user's; the status is written by the node role of that machine alone.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,categories=drover
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
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
	// Heartbeat is renewed every 30 s by the node role.
	Heartbeat  metav1.Time        `json:"heartbeat,omitempty"`
	Addresses  []string           `json:"addresses,omitempty"`
	Kernel     string             `json:"kernel,omitempty"`
	Version    string             `json:"version,omitempty"`
	Resend     bool               `json:"resend,omitempty"` // the kernel can hand devices over after a kill -9
	DiskCount  int32              `json:"diskCount,omitempty"`
	Capacity   string             `json:"capacity,omitempty"`  // sum over disks, for people
	Available  string             `json:"available,omitempty"` // sum over disks, for people
	Disks      []DiskStatus       `json:"disks,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// DiskStatus is a disk that the node found, or why it could not use it.
type DiskStatus struct {
	Path      string `json:"path"`
	UID       UID    `json:"uid,omitempty"`
	Ready     bool   `json:"ready"`
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
// +kubebuilder:validation:XValidation:rule="!(self.metadata.name in ['backing-image-cleanup-wait-interval','backing-image-verify-interval','concurrent-image-copies-per-sender','default-replica-count','storage-minimal-available-percentage','storage-over-provisioning-percentage','volume-attach-limit']) || self.value.matches('^[0-9]{1,9}$')",message="the value of this setting is a whole number, in quotes"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'allow-private-image-sources' || self.value in ['true','false']",message="the value of this setting is true or false, in quotes"
// +kubebuilder:validation:XValidation:rule="self.metadata.name != 'default-data-locality' || self.value in ['disabled','best-effort','strict-local']",message="the value of this setting is disabled, best-effort or strict-local"
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
	"storage-over-provisioning-percentage": "200", // sum of volume sizes on a disk, in percent of its capacity
	"storage-minimal-available-percentage": "10",  // no new replica on a disk with less free
	"backing-image-cleanup-wait-interval":  "60",  // minutes until an unused copy goes; 0: never
	"backing-image-verify-interval":        "168", // hours between two verifications of a copy; 0: never
	"concurrent-image-copies-per-sender":   "3",   // copies that are sent from one disk at once
	"allow-private-image-sources":          "false",
	"default-replica-count":                "1",
	"default-data-locality":                "disabled",
	"volume-attach-limit":                  "256", // volumes that one node may have attached
}
