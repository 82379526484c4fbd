package controller

import (
	"context"
	"net/url"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// A snapshot of type bi is a backing image of the volume. The handle of the snapshot names the image, and, where a
// user wrote the handle by hand, tells how to make the image.

const (
	imageScheme = "bi://backing?"
	// annotationSnapshot is on a BackingImage that was made as a CSI snapshot; value: the requested name.
	annotationSnapshot = "drover.io/csi-snapshot"
	// annotationContent is on a Volume that began with such a snapshot; value: the snapshot's handle.
	annotationContent = "drover.io/csi-content-source"
)

// imageClass is the rest of a VolumeSnapshotClass of type bi.
type imageClass struct {
	format string
	nodes  []string
	disks  []string
}

func (c *imageClass) setParameter(key, value string) (err error) {
	switch key {
	case "exportType", api.ExportFormat:
		if c.format = value; value != "" && value != "raw" && value != "qcow2" {
			err = api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %s=%.80q: want raw or qcow2", key, value)
		}
	case "nodeSelector":
		err = setTags(&c.nodes, value)
	case "diskSelector":
		err = setTags(&c.disks, value)
	default:
		return api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %.80q is not known: type bi takes exportType, "+
			"nodeSelector and diskSelector", key)
	}
	if err != nil && api.KindOf(err) == api.Other {
		err = api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %s=%.80q: %w", key, value, err)
	}
	return err
}

// imageHandle is the CSI id of an image of a volume.
func imageHandle(img *api.BackingImage) string {
	p := img.Spec.SourceParameters
	format := p[api.ExportFormat]
	if format == "" {
		format = "raw"
	}
	return imageScheme + url.Values{"backingImage": {img.Name}, "backingImageDataSourceType": {string(api.SourceExport)},
		api.ExportFormat: {format}, api.ExportVolume: {p[api.ExportVolume]}}.Encode()
}

// parseImageHandle reads the handle of an image; false: another kind of handle, or a malformed one.
func parseImageHandle(id string) (w imageWish, ok bool) {
	rest, is := strings.CutPrefix(id, imageScheme)
	q, err := url.ParseQuery(rest)
	if !is || err != nil || q.Get("backingImage") == "" || api.ValidateImageName(q.Get("backingImage")) != nil {
		return w, false
	}
	w.name = q.Get("backingImage")
	switch w.source = api.SourceType(q.Get("backingImageDataSourceType")); w.source {
	case api.SourceDownload, api.SourceRegistry:
		w.parameters = map[string]string{"url": q.Get("url")}
		w.checksum = strings.ToLower(q.Get("backingImageChecksum"))
	case "", api.SourceExport: // the image exists, or no handle makes it
		w.source = ""
	default:
		return w, false
	}
	return w, true
}

// createImageSnapshot makes a backing image of a volume, and waits until the image exists.
func (s *Server) createImageSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest, class *imageClass) (
	*csi.CreateSnapshotResponse, error) {
	name, of := snapshotName(req.GetName()), req.GetSourceVolumeId()
	img := &api.BackingImage{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, img)
	if apierrors.IsNotFound(err) {
		var vol *api.Volume
		if vol, err = s.readVolume(ctx, of); err != nil {
			return nil, err
		}
		if vol.DeletionTimestamp != nil {
			return nil, api.Errorf(api.NotFound, "volume %s is being deleted", vol.Name)
		}
		if err := s.checkTopology(ctx, vol, req.GetAccessibilityRequirements()); err != nil {
			return nil, err
		}
		img = &api.BackingImage{
			ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{annotationSnapshot: req.GetName()}},
			Spec: api.BackingImageSpec{SourceType: api.SourceExport, MinNumberOfCopies: 1, NodeSelector: class.nodes,
				DiskSelector: class.disks, SourceParameters: map[string]string{api.ExportVolume: vol.Name}}}
		if class.format != "" {
			img.Spec.SourceParameters[api.ExportFormat] = class.format
		}
		if err := img.Spec.Validate(); err != nil {
			return nil, api.Errorf(api.Invalid, "backing image %s: %w", name, err)
		}
		if err = s.client.Create(ctx, img); apierrors.IsAlreadyExists(err) {
			img = &api.BackingImage{}
			err = s.client.Get(ctx, client.ObjectKey{Name: name}, img)
		}
	}
	if err != nil {
		return nil, api.Explain(err, "backing image %s", name)
	}
	switch {
	case img.Spec.SourceType != api.SourceExport || img.Annotations[annotationSnapshot] != req.GetName():
		return nil, api.Errorf(api.Exists, "backing image %s exists and is no snapshot of this name", name)
	case img.Spec.SourceParameters[api.ExportVolume] != of:
		return nil, api.Errorf(api.Exists, "snapshot %s exists and is one of volume %s", req.GetName(),
			img.Spec.SourceParameters[api.ExportVolume])
	}
	why, uid := "", img.UID
	img, err = await.Until(ctx, s.client, name, func(now *api.BackingImage) (bool, error) {
		why = string(now.Status.State) + " " + now.Status.Message
		switch {
		case now.UID != uid || now.DeletionTimestamp != nil:
			return false, api.Errorf(api.Busy, "deleted while it was being created: try again")
		case now.Status.State == api.ImageFailed:
			return false, api.Errorf(api.Unavailable, "the image cannot be made: %s", now.Status.Message)
		}
		return now.Status.State == api.ImageReady, nil
	})
	if err != nil {
		return nil, api.Explain(err, "snapshot %s of volume %s (%s)", req.GetName(), of, why)
	}
	return &csi.CreateSnapshotResponse{Snapshot: imageInCSI(img, imageHandle(img))}, nil
}

// imageInCSI is an image as a snapshot in the words of CSI.
func imageInCSI(img *api.BackingImage, id string) *csi.Snapshot {
	out := &csi.Snapshot{SnapshotId: id, SourceVolumeId: img.Spec.SourceParameters[api.ExportVolume],
		SizeBytes: img.Status.VirtualSize, ReadyToUse: img.Status.State == api.ImageReady}
	when, text := img.CreationTimestamp.Time, img.Annotations[api.AnnotationCut]
	if x := img.Status.Export; x != nil {
		text = x.CreationTime
	}
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		when = t
	}
	out.CreationTime = timestamppb.New(when)
	return out
}

// isCut reports whether the instant of an image's content is past. An image that was rebuilt from a disk has no Export
// any more.
func isCut(img *api.BackingImage) bool {
	return img.Spec.SourceType != api.SourceExport || img.Status.Export != nil || img.Status.State == api.ImageReady ||
		img.Annotations[api.AnnotationCut] != ""
}

// snapshotImage is the image that a handle names; an error of kind not found: no such image.
func (s *Server) snapshotImage(ctx context.Context, id string) (*api.BackingImage, error) {
	none := api.Errorf(api.NotFound, "snapshot %.200q does not exist", id)
	w, ok := parseImageHandle(id)
	if !ok {
		return nil, none
	}
	img := &api.BackingImage{}
	err := s.client.Get(ctx, client.ObjectKey{Name: w.name}, img)
	if apierrors.IsNotFound(err) {
		return nil, none
	}
	return img, api.Explain(err, "read backing image %s", w.name)
}

// deleteImageSnapshot removes the image of a handle and waits until the image is gone.
func (s *Server) deleteImageSnapshot(ctx context.Context, id string) error {
	img, err := s.snapshotImage(ctx, id)
	if api.Is(err, api.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	vols := &api.VolumeList{}
	if err := s.client.List(ctx, vols); err != nil {
		return api.Explain(err, "list volumes")
	}
	for i := range vols.Items {
		if v := &vols.Items[i]; v.Spec.BackingImage == img.Name {
			return api.Errorf(api.InUse, "backing image %s is in use by volume %s: delete that first", img.Name, v.Name)
		}
	}
	reps := &api.ReplicaList{} // a clone stands on the image of its source, named or not
	if err := s.client.List(ctx, reps, client.MatchingLabels{api.LabelImage: api.LabelValue(img.Name)}); err != nil {
		return api.Explain(err, "list replicas")
	}
	if len(reps.Items) > 0 {
		return api.Errorf(api.InUse, "backing image %s is in use by volume %s: delete that first", img.Name,
			reps.Items[0].Spec.Volume)
	}
	uid := img.UID
	if err := s.client.Delete(ctx, img, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return api.Explain(err, "delete backing image %s", img.Name)
	}
	why := ""
	if err := await.Gone(ctx, s.client, img, func(now *api.BackingImage) { why = now.Status.Message }); err != nil {
		return api.Explain(err, "delete backing image %s (%s)", img.Name, why)
	}
	return nil
}

// fromImage makes a volume begin with the image of a handle. fromImage first makes a missing image where the handle
// tells how.
func (s *Server) fromImage(ctx context.Context, w *wish, id string) (int64, error) {
	image, ok := parseImageHandle(id)
	if !ok {
		return 0, api.Errorf(api.NotFound, "snapshot %.200q does not exist", id)
	}
	if w.image.name != "" && w.image.name != image.name {
		return 0, api.Errorf(api.Invalid, "parameter backingImage is %s, but the source is backing image %s", w.image.name,
			image.name)
	}
	if image.source == "" { // the class's words on the image are for volumes without a source
		if _, err := s.snapshotImage(ctx, id); err != nil {
			return 0, err
		}
	}
	size, err := s.imageSize(ctx, &wish{image: image})
	if err != nil {
		return 0, err
	}
	w.spec.BackingImage, w.content = image.name, id
	return size, nil
}
