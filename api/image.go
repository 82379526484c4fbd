package api

import (
	"cmp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SourceType says where a backing image's bytes come from.
//
// +kubebuilder:validation:Enum=download;upload;file;export-from-volume;restore;clone;registry
type SourceType string

// Source types. Parameters: download {url}; upload {size}; file {path} (on the node of the first disk);
// export-from-volume {volume-name, snapshot-name} (the volume now, or a snapshot); clone {backingImage}; registry
// {url: docker://host[:port]/repo[:tag|@digest], plainHTTP: true for one without TLS}; restore {backup-url (the
// status.url of a Backup or a BackupBackingImage), allow-damaged: true for zeros in place of damaged chunks, on-demand:
// true for an image of which only the chunks are fetched that volumes read}.
const (
	SourceDownload SourceType = "download"
	SourceUpload   SourceType = "upload"
	SourceFile     SourceType = "file"
	SourceExport   SourceType = "export-from-volume"
	SourceClone    SourceType = "clone"
	SourceRegistry SourceType = "registry"
	SourceRestore  SourceType = "restore"
)

// ImageState is the state of an image, or of its copy on one disk.
//
// +kubebuilder:validation:Enum=pending;starting;in-progress;ready-for-transfer;ready;failed;unknown
type ImageState string

// States as users of the field know them.
const (
	ImagePending    ImageState = "pending"            // not begun
	ImageStarting   ImageState = "starting"           // source is being opened; an upload may be sent now
	ImageInProgress ImageState = "in-progress"        // bytes arrive
	ImageTransfer   ImageState = "ready-for-transfer" // written, being verified and named
	ImageReady      ImageState = "ready"
	ImageFailed     ImageState = "failed"
	ImageUnknown    ImageState = "unknown" // the node or disk does not answer
)

// BackingImage is a named stack of layers that volumes have at the bottom. Status: of the controller role alone.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=bi,categories=drover
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Progress",type=integer,JSONPath=`.status.progress`
// +kubebuilder:printcolumn:name="Source",type=string,JSONPath=`.spec.sourceType`
// +kubebuilder:printcolumn:name="Virtual",type=string,JSONPath=`.status.virtualSizeText`
// +kubebuilder:printcolumn:name="Size",type=string,JSONPath=`.status.sizeText`
// +kubebuilder:printcolumn:name="Copies",type=integer,JSONPath=`.status.readyCopies`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`,priority=1
type BackingImage struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              BackingImageSpec   `json:"spec"`
	Status            BackingImageStatus `json:"status,omitempty"`
}

// BackingImageSpec is the wish. Source and checksum cannot change once set.
//
// +kubebuilder:validation:XValidation:rule="self.sourceType == oldSelf.sourceType",message="sourceType cannot change"
// +kubebuilder:validation:XValidation:rule="self.sourceParameters == oldSelf.sourceParameters",message="sourceParameters cannot change"
// +kubebuilder:validation:XValidation:rule="has(self.secretRef) == has(oldSelf.secretRef) && (!has(self.secretRef) || self.secretRef == oldSelf.secretRef)",message="secretRef cannot change"
type BackingImageSpec struct {
	SourceType SourceType `json:"sourceType"`
	// +kubebuilder:default={}
	SourceParameters map[string]string `json:"sourceParameters"`
	// SecretRef names what the source (download, registry) asks for: see SecretUsername and its neighbours.
	SecretRef *SecretRef `json:"secretRef,omitempty"`
	// Checksum is the expected SHA-512 (128 hex digits) of the source's bytes as the user knows them, or empty.
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{128})?$`
	Checksum string `json:"checksum,omitempty"`
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	MinNumberOfCopies int32    `json:"minNumberOfCopies,omitempty"`
	NodeSelector      []string `json:"nodeSelector,omitempty"`
	DiskSelector      []string `json:"diskSelector,omitempty"`
	// CleanupDisks asks for the removal of unused copies on these disks (UIDs), ahead of the wait interval.
	CleanupDisks []UID `json:"cleanupDisks,omitempty"`
}

// SecretRef names a Secret.
type SecretRef struct {
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$`
	Name string `json:"name"`
	// +kubebuilder:default=default
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`
	Namespace string `json:"namespace,omitempty"`
}

// DefaultSecretNamespace is the namespace of a SecretRef that names none.
const DefaultSecretNamespace = "default"

// Keys of an image's Secret. A missing key is not used.
const (
	SecretUsername = "username" // with password: basic authentication, or the registry's account
	SecretPassword = "password"
	SecretToken    = "token"             // bearer token (download)
	SecretCA       = "ca.crt"            // PEM: authorities that are trusted besides the system's
	SecretHeader   = "header."           // followed by a name: an extra header (download)
	SecretDocker   = ".dockerconfigjson" // accounts of registries
)

// ConditionStalled is True on a BackingImage, and on the Volume of a hidden image, while reads of chunks that no node
// has wait for the store of the backup; the message says why. With progress the condition is False, and the end of the
// restore removes it.
const ConditionStalled = "HydrationStalled"

// Reasons of ConditionStalled.
const (
	ReasonReadsWait = "ReadsWait"
	ReasonHydrating = "Hydrating"
)

// BackingImageStatus is the fact.
type BackingImageStatus struct {
	// UUID exists before any byte is written, and tells this image from an older one of the same name.
	UUID UID `json:"uuid,omitempty"`
	// Layers from bottom to top, known as soon as the UUID is.
	Layers  []UID      `json:"layers,omitempty"`
	State   ImageState `json:"state,omitempty"`
	Message string     `json:"message,omitempty"`
	// Readable: volumes can use the image before it is ready. A node serves its content while a restore fetches it.
	Readable bool `json:"readable,omitempty"`
	// Progress of the most advanced copy, percent; its bytes are those when the percentage changed last.
	Progress     int32 `json:"progress,omitempty"`
	ByteProgress `json:",inline"`
	// Size is what the image takes on one disk, bytes.
	Size int64 `json:"size,omitempty"`
	// VirtualSize is the size of the disk inside the image, bytes; a volume from it is at least as large.
	VirtualSize int64 `json:"virtualSize,omitempty"`
	// BackupURL is the URL of the backup that the image is restored from, if the parameter backup-url names none of
	// several: the controller chooses the backup once.
	BackupURL string `json:"backupURL,omitempty"`
	// Export is there for an image that was made of a volume: what it was made of.
	Export *ExportFact `json:"export,omitempty"`
	// Format that was found, and how it was packed: raw, qcow2, vmdk, vhd or vhdx, and .gz, .xz or .zst behind it.
	// +kubebuilder:validation:Pattern=`^((raw|qcow2|vmdk|vhd|vhdx)(\.(gz|xz|zst))?)?$`
	Format string `json:"format,omitempty"`
	// Checksum is the SHA-512 of the source's bytes; Digest the root digest of the content.
	Checksum        string             `json:"checksum,omitempty"`
	Digest          string             `json:"digest,omitempty"`
	ReadyCopies     int32              `json:"readyCopies,omitempty"`
	SizeText        string             `json:"sizeText,omitempty"`
	VirtualSizeText string             `json:"virtualSizeText,omitempty"`
	Copies          []ImageCopySummary `json:"copies,omitempty"`
	Conditions      []metav1.Condition `json:"conditions,omitempty"`
}

// ExportFact names a snapshot in the stack of a replica.
type ExportFact struct {
	Volume      string `json:"volume"`
	VolumeUID   UID    `json:"volumeUID"`
	Snapshot    string `json:"snapshot"`
	SnapshotUID UID    `json:"snapshotUID"`
	Replica     UID    `json:"replica"`
	Node        string `json:"node"`
	Disk        UID    `json:"disk"`
	// CreationTime is the instant of the cut, RFC 3339.
	CreationTime string `json:"creationTime"`
}

// ImageCopySummary mirrors one ImageCopy into the image, as the field's users expect it there.
type ImageCopySummary struct {
	Disk     UID         `json:"disk"`
	Node     string      `json:"node"`
	State    ImageState  `json:"state"`
	Progress int32       `json:"progress,omitempty"`
	Message  string      `json:"message,omitempty"`
	LastUsed metav1.Time `json:"lastUsed,omitempty"`
}

// BackingImageList is a list of BackingImage.
//
// +kubebuilder:object:root=true
type BackingImageList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []BackingImage `json:"items"`
}

// ImageCopy is an image on a disk. Spec: written by the controller role. Status: by the node role of spec.node alone.
// Labels: LabelImage, LabelNode, LabelDisk. Name: <image uuid>.<first 8 of the disk's uid>.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,categories=drover
// +kubebuilder:printcolumn:name="Image",type=string,JSONPath=`.spec.image`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.node`
// +kubebuilder:printcolumn:name="State",type=string,JSONPath=`.status.state`
// +kubebuilder:printcolumn:name="Progress",type=integer,JSONPath=`.status.progress`
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.message`
type ImageCopy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              ImageCopySpec   `json:"spec"`
	Status            ImageCopyStatus `json:"status,omitempty"`
}

// ImageCopySpec says which image is wanted on which disk. Deleting the object removes the copy (finalizer).
type ImageCopySpec struct {
	Image  string `json:"image"` // BackingImage name
	UUID   UID    `json:"uuid"`
	Layers []UID  `json:"layers"`
	Node   string `json:"node"`
	Disk   UID    `json:"disk"`
	// From is the disk of a ready copy to take the layers from; empty: from the image's source.
	From UID `json:"from,omitempty"`
	// Export says that the layers are those of a snapshot; on its own disk the image names them, and they are not its own
	// alone. Until they are known Layers is empty.
	Export *ExportFact `json:"export,omitempty"`
	// Verify is a token; a new one asks for a verification of all that the copy has on its disk.
	Verify string `json:"verify,omitempty"`
}

// CanRead reports whether volumes can use the image: it is ready, or is restored and readable meanwhile.
func (i *BackingImage) CanRead() bool { return i.Status.State == ImageReady || i.Status.Readable }

// RestoredURL is the URL of the backup that the image is restored from.
func (i *BackingImage) RestoredURL() string {
	return cmp.Or(i.Status.BackupURL, i.Spec.SourceParameters[RestoreBackupURL])
}

// UploadPath is the path of Drover's own API server for uploads to a waiting node.
func UploadPath(image string) string {
	return "/apis/" + GroupVersion.String() + "/backingimages/" + image + "/upload"
}

// CopyNotRemoved begins the message of an image copy that the copy's node failed to remove.
const CopyNotRemoved = "the copy cannot be removed yet: "

// ImageCopyStatus is how far it is.
type ImageCopyStatus struct {
	State ImageState `json:"state,omitempty"`
	// Readable: the node serves the layers although the copy is not ready, because it reads them in a backup meanwhile.
	Readable     bool  `json:"readable,omitempty"`
	Progress     int32 `json:"progress,omitempty"` // percent
	ByteProgress `json:",inline"`
	Message      string      `json:"message,omitempty"`
	Attempts     int32       `json:"attempts,omitempty"`
	NextTry      metav1.Time `json:"nextTry,omitempty"`
	// TriedFrom is where the last try that failed was to take it from, as spec.from was then.
	TriedFrom UID `json:"triedFrom,omitempty"`
	// UploadURL is where an upload is expected, and continued where it was cut off (source type upload). UploadCA is the
	// authority (PEM) by which the server there is known.
	UploadURL string `json:"uploadURL,omitempty"`
	UploadCA  string `json:"uploadCA,omitempty"`
	// Layers of a snapshot that is exported, once they are found and held.
	Layers         []UID       `json:"layers,omitempty"`
	Format         string      `json:"format,omitempty"`
	Size           int64       `json:"size,omitempty"`
	VirtualSize    int64       `json:"virtualSize,omitempty"`
	Checksum       string      `json:"checksum,omitempty"`
	Digest         string      `json:"digest,omitempty"`
	LastTransition metav1.Time `json:"lastTransition,omitempty"`
	// Verified is the token (spec.verify) of the last verification that was asked for and done; LastVerified the time of
	// the last one of any kind.
	Verified     string      `json:"verified,omitempty"`
	LastVerified metav1.Time `json:"lastVerified,omitempty"`
	// Notice is what a user may want to know of a transfer that is well, such as how much scratch room it takes.
	Notice string `json:"notice,omitempty"`
}

// ImageCopyList is a list of ImageCopy.
//
// +kubebuilder:object:root=true
type ImageCopyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []ImageCopy `json:"items"`
}
