package api

import (
	"regexp"
	"strings"

	"github.com/google/uuid"
)

// UID names something on a disk: a layer, a replica, an image, a disk. It is stored in the API before any byte is
// written under it and is never used twice (I7). Text form: a lower-case RFC 4122 UUID.
type UID string

// NewUID returns a fresh random UID.
func NewUID() UID { return UID(uuid.NewString()) }

var uidPattern = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

// Validate refuses everything but the text form, so that a UID is always safe as a path element.
func (u UID) Validate() error {
	if !uidPattern.MatchString(string(u)) {
		return Errorf(Invalid, "%q is not a UID (a lower-case UUID)", string(u))
	}
	return nil
}

// Sizes that hold everywhere, in bytes.
const (
	BlockSize     = 4096            // granularity of maps, heads and replication
	ChunkSize     = 2 << 20         // granularity of digests and backups
	SizeUnit      = 2 << 20         // unit of a volume's size
	MinVolumeSize = 10 << 20        // smallest volume
	MaxVolumeSize = int64(64) << 40 // largest volume
)

// RoundSize rounds a requested size up to a possible size of a volume.
func RoundSize(n int64) int64 {
	if n < MinVolumeSize {
		return MinVolumeSize
	}
	return (n + SizeUnit - 1) / SizeUnit * SizeUnit
}

// LabelValue is a name as the value of a label, which has at most 63 characters and ends in a letter or a digit.
// Several long names may share a value: a caller that lists objects by label also compares the specs.
func LabelValue(name string) string { return strings.TrimRight(name[:min(len(name), 63)], "-._") }

// Labels and finalizers.
const (
	LabelVolume    = "drover.io/volume"
	LabelNode      = "drover.io/node"
	LabelDisk      = "drover.io/disk" // a disk's UID
	LabelImage     = "drover.io/image"
	LabelZone      = "topology.kubernetes.io/zone" // on a Node
	Finalizer      = "drover.io/protect"
	AnnotationMkfs = "drover.io/mkfs"       // on a Volume: a filesystem is being made; value: its type
	AnnotationFS   = "drover.io/filesystem" // on a Volume: a filesystem of this type was made, and is not made again
	AnnotationRaw  = "drover.io/raw"        // on an Attachment: the device was used raw; Blank no longer holds
	AnnotationDoor = "drover.io/door"       // on an Attachment: csi, where only the CSI doors showed the device to anybody
	// AnnotationVerify is on a BackingImage: a new value asks for a verification of all copies.
	AnnotationVerify = "drover.io/verify"
	// AnnotationForce on an Attachment that is deleted: all I/O fails, and the detach does not wait for I/O.
	AnnotationForce = "drover.io/force-detach"
	// AnnotationPrefer is on a Volume: the node of the first use. On a BackingImage: the node of the first copy.
	AnnotationPrefer = "drover.io/prefer-node"
	// AnnotationRetry is on a Volume whose clone failed: a new value starts another try.
	AnnotationRetry = "drover.io/retry-clone"
	TopologyNode    = "topology.drover.io/node"
	DriverName      = "drover.io" // the CSI driver's name
)
