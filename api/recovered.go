package api

import (
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// AnnotationRecovered is on a Volume or BackingImage that was rebuilt from disks: the facts with which the status
// begins. The controller role takes the facts in place of new ones, once, and removes the annotation.
const AnnotationRecovered = "drover.io/recovered"

// AnnotationCut is in a disk's record of a BackingImage that was made of a volume, and on a BackingImage that was
// rebuilt from the record; value: the time of the volume's cut, as in ExportFact.
const AnnotationCut = "drover.io/cut"

// RecoveredVolume is the annotation's value on a Volume.
//
// +kubebuilder:object:generate=false
type RecoveredVolume struct {
	UID     UID      `json:"uid"`
	Epoch   int64    `json:"epoch"`
	Size    int64    `json:"size"`
	Members []string `json:"members"` // names of Replica objects
	// RevertedEpoch is the epoch of the last revert of a replica that has not joined since.
	RevertedEpoch int64 `json:"revertedEpoch,omitempty"`
}

// RecoveredImage is the annotation's value on a BackingImage.
//
// +kubebuilder:object:generate=false
type RecoveredImage struct {
	UUID        UID             `json:"uuid"`
	Layers      []UID           `json:"layers"`
	Format      string          `json:"format,omitempty"`
	VirtualSize int64           `json:"virtualSize,omitempty"`
	Checksum    string          `json:"checksum,omitempty"`
	Digest      string          `json:"digest,omitempty"`
	Copies      []RecoveredCopy `json:"copies"`
}

// RecoveredCopy is a disk that has the image.
//
// +kubebuilder:object:generate=false
type RecoveredCopy struct {
	Node string `json:"node"`
	Disk UID    `json:"disk"`
}

// Recovered reads the annotation of a Volume that has no status yet; nil: not rebuilt.
func (v *Volume) Recovered() (*RecoveredVolume, error) {
	var r RecoveredVolume
	if there, err := recovered(v.Annotations, &r); !there || err != nil {
		return nil, err
	}
	if err := r.UID.Validate(); err != nil || r.Epoch < 1 || r.Size <= 0 || len(r.Members) == 0 {
		return nil, Errorf(Invalid, "annotation %s of volume %s lacks uid, epoch, size or members",
			AnnotationRecovered, v.Name)
	}
	return &r, nil
}

// Recovered reads the annotation of a BackingImage that has no status yet; nil: not rebuilt.
func (i *BackingImage) Recovered() (*RecoveredImage, error) {
	var r RecoveredImage
	if there, err := recovered(i.Annotations, &r); !there || err != nil {
		return nil, err
	}
	if err := r.UUID.Validate(); err != nil || len(r.Layers) == 0 {
		return nil, Errorf(Invalid, "annotation %s of image %s lacks uuid or layers", AnnotationRecovered, i.Name)
	}
	for _, l := range r.Layers {
		if err := l.Validate(); err != nil {
			return nil, Errorf(Invalid, "annotation %s of image %s: %w", AnnotationRecovered, i.Name, err)
		}
	}
	return &r, nil
}

func recovered(annotations map[string]string, into any) (bool, error) {
	text, there := annotations[AnnotationRecovered]
	if !there {
		return false, nil
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return true, Errorf(Invalid, "annotation %s: %w", AnnotationRecovered, err)
	}
	return true, nil
}

// VolumeRecord is what a disk keeps of a Volume object.
//
// +kubebuilder:object:generate=false
type VolumeRecord struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Spec        VolumeSpec        `json:"spec"`
}

// ImageRecord is what a disk keeps of a BackingImage object.
//
// +kubebuilder:object:generate=false
type ImageRecord struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Spec        BackingImageSpec  `json:"spec"`
}

// Record is a disk's record of v, as JSON.
func (v *Volume) Record() (json.RawMessage, error) {
	return json.Marshal(VolumeRecord{v.Labels, lasting(v.ObjectMeta), v.Spec})
}

// Record is a disk's record of i, as JSON.
func (i *BackingImage) Record() (json.RawMessage, error) {
	annotations := lasting(i.ObjectMeta)
	if x := i.Status.Export; x != nil {
		annotations[AnnotationCut] = x.CreationTime
	}
	return json.Marshal(ImageRecord{i.Labels, annotations, i.Spec})
}

// lasting leaves out annotations on passing states. A file system that was being made then may hold data by now.
func lasting(m metav1.ObjectMeta) map[string]string {
	keep := map[string]string{}
	for k, v := range m.Annotations {
		switch k {
		case AnnotationMkfs, AnnotationRecovered, "kubectl.kubernetes.io/last-applied-configuration":
		default:
			keep[k] = v
		}
	}
	return keep
}
