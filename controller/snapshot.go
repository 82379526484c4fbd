package controller

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// snapshotClass is what a VolumeSnapshotClass asks for: a snapshot, or what is not nil.
type snapshotClass struct {
	image  *imageClass  // type bi
	backup *backupClass // type bak
}

// parseSnapshotClass checks the parameters of a VolumeSnapshotClass.
func parseSnapshotClass(given map[string]string) (c snapshotClass, err error) {
	set := func(key, _ string) error {
		return api.Errorf(api.Invalid, "VolumeSnapshotClass parameter %.80q is not known, or not for type snap: type is; "+
			"exportType, nodeSelector and diskSelector are for type bi, backupMode and backupTargetName for type bak", key)
	}
	switch given["type"] {
	case "", "snap":
	case "bi":
		c.image = &imageClass{}
		set = c.image.setParameter
	case "bak", "bs":
		c.backup = &backupClass{}
		set = c.backup.setParameter
	default:
		return c, api.Errorf(api.Invalid, "VolumeSnapshotClass parameter type %.80q is not known: snap, bak and bi are",
			given["type"])
	}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if key == "type" || strings.HasPrefix(key, sidecarPrefix) {
			continue
		}
		if err := set(key, given[key]); err != nil {
			return c, err
		}
	}
	return c, nil
}

// snapshotName is the name of the object for a snapshot's name: as objectName.
func snapshotName(name string) string {
	if len(validation.IsDNS1123Label(name)) == 0 {
		return name
	}
	return "snap-" + strings.TrimPrefix(objectName(name), "vol-")
}

// snapshotID returns the CSI id of a snapshot.
func snapshotID(s *api.Snapshot) string {
	return api.DataSource{Volume: s.Spec.Volume, Snapshot: s.Name}.String()
}

// readSnapshot reads a snapshot by CSI id; an unknown id is an error of kind not found.
func (s *Server) readSnapshot(ctx context.Context, id string) (*api.Snapshot, error) {
	none := api.Errorf(api.NotFound, "snapshot %.200q does not exist", id)
	from, err := api.ParseDataSource(id)
	if err != nil || from.Snapshot == "" || !validID(from.Volume) || !validID(from.Snapshot) {
		return nil, none
	}
	snap := &api.Snapshot{}
	err = s.client.Get(ctx, client.ObjectKey{Name: from.Snapshot}, snap)
	if apierrors.IsNotFound(err) || err == nil && snap.Spec.Volume != from.Volume {
		return nil, none
	}
	return snap, api.Explain(err, "read snapshot %s", id)
}

// CreateSnapshot creates the Snapshot, or verifies that an existing Snapshot of the name is of the same volume, and
// waits until the snapshot can be used.
func (s *Server) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (
	*csi.CreateSnapshotResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if err := checkName(req.GetName()); err != nil {
		return nil, err
	}
	if req.GetSourceVolumeId() == "" {
		return nil, api.Errorf(api.Invalid, "snapshot %.80q: the request names no volume", req.GetName())
	}
	class, err := parseSnapshotClass(req.GetParameters())
	switch {
	case err != nil:
		return nil, err
	case class.image != nil:
		return s.createImageSnapshot(ctx, req, class.image)
	case class.backup != nil:
		return s.createBackupSnapshot(ctx, req, class.backup)
	}
	snap, err := s.ensureSnapshot(ctx, req)
	if err != nil {
		return nil, err
	}
	why := ""
	uid := snap.UID
	snap, err = await.Until(ctx, s.client, snap.Name, func(now *api.Snapshot) (bool, error) {
		if why = now.Status.Error; why != "" {
			why = " (" + why + ")"
		}
		switch {
		case now.UID != uid || now.DeletionTimestamp != nil:
			return false, api.Errorf(api.Busy, "deleted while it was being created: try again")
		case strings.HasPrefix(now.Status.Error, "lost"):
			return false, api.Errorf(api.Corrupt, "%s", now.Status.Error)
		}
		return now.Status.ReadyToUse, nil
	})
	if err != nil {
		return nil, api.Explain(err, "snapshot %s of volume %s%s", req.GetName(), req.GetSourceVolumeId(), why)
	}
	out := snapshotInCSI(snap)
	if len(req.GetAccessibilityRequirements().GetRequisite()) == 1 {
		// The field is optional, and a caller that names the one required place knows it. csi-sanity names a place,
		// and compares the answer's message with its own as Go structures, including the encoder's notes: no answer
		// is equal.
		out.AccessibleTopology = nil
	}
	return &csi.CreateSnapshotResponse{Snapshot: out}, nil
}

func (s *Server) ensureSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*api.Snapshot, error) {
	name := snapshotName(req.GetName())
	verify := func(snap *api.Snapshot) (*api.Snapshot, error) {
		is := snap.Annotations[annotationName]
		if is == "" {
			is = snap.Name
		}
		switch {
		case snap.Spec.Volume != req.GetSourceVolumeId():
			return nil, api.Errorf(api.Exists, "snapshot %s exists and is one of volume %s", req.GetName(), snap.Spec.Volume)
		case is != req.GetName():
			return nil, api.Errorf(api.Exists, "snapshot %s exists and is named %q", name, is)
		case snap.DeletionTimestamp != nil:
			return nil, api.Errorf(api.Busy, "snapshot %s of the same name is being deleted: try again", name)
		}
		return snap, nil
	}
	snap := &api.Snapshot{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, snap)
	if err == nil {
		return verify(snap)
	}
	if !apierrors.IsNotFound(err) {
		return nil, api.Explain(err, "read snapshot %s", name)
	}
	vol, err := s.readVolume(ctx, req.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	if vol.DeletionTimestamp != nil {
		return nil, api.Errorf(api.NotFound, "volume %s is being deleted", vol.Name)
	}
	if err := vol.RefuseStandby(); err != nil {
		return nil, err
	}
	if err := s.checkTopology(ctx, vol, req.GetAccessibilityRequirements()); err != nil {
		return nil, err
	}
	snap = api.NewSnapshot(vol, name)
	if name != req.GetName() {
		snap.Annotations = map[string]string{annotationName: req.GetName()}
	}
	if err = s.client.Create(ctx, snap); apierrors.IsAlreadyExists(err) {
		snap = &api.Snapshot{}
		if err = s.client.Get(ctx, client.ObjectKey{Name: name}, snap); err == nil {
			return verify(snap)
		}
	}
	return snap, api.Explain(err, "create snapshot %s", name)
}

// checkTopology refuses a topology without any of the volume's replicas: the snapshots lie with the replicas.
func (s *Server) checkTopology(ctx context.Context, vol *api.Volume, r *csi.TopologyRequirement) error {
	if len(r.GetRequisite()) == 0 {
		return nil
	}
	nodes, err := topologyNodes(r)
	if err != nil {
		return err
	}
	reps := &api.ReplicaList{}
	if err := s.client.List(ctx, reps, client.MatchingLabels{api.LabelVolume: api.LabelValue(vol.Name)}); err != nil {
		return api.Explain(err, "list the replicas of volume %s", vol.Name)
	}
	for _, r := range reps.OfVolume(vol.Name) {
		if slices.Contains(nodes, r.Spec.Node) {
			return nil
		}
	}
	return api.Errorf(api.Full, "volume %s has no replica on %s, and a snapshot is on the nodes of the volume's "+
		"replicas", vol.Name,
		strings.Join(nodes, ", "))
}

// snapshotInCSI is a snapshot in the words of CSI.
func snapshotInCSI(snap *api.Snapshot) *csi.Snapshot {
	out := &csi.Snapshot{SnapshotId: snapshotID(snap), SourceVolumeId: snap.Spec.Volume,
		SizeBytes: snap.Status.RestoreSize, ReadyToUse: snap.Status.ReadyToUse}
	if snap.Spec.Group != "" {
		out.GroupSnapshotId = groupScheme + snap.Spec.Group
	}
	if n := snap.Status.OwnerID; n != "" {
		out.AccessibleTopology = []*csi.Topology{{Segments: map[string]string{api.TopologyNode: n}}}
	}
	if t, err := time.Parse(time.RFC3339Nano, snap.Status.CreationTime); err == nil {
		out.CreationTime = timestamppb.New(t)
	}
	return out
}

// DeleteSnapshot removes a snapshot and waits until the snapshot is gone. An id of nothing is no error.
func (s *Server) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (
	*csi.DeleteSnapshotResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetSnapshotId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no snapshot")
	}
	if strings.HasPrefix(req.GetSnapshotId(), imageScheme) {
		return &csi.DeleteSnapshotResponse{}, s.deleteImageSnapshot(ctx, req.GetSnapshotId())
	}
	if api.IsBackupHandle(req.GetSnapshotId()) {
		return &csi.DeleteSnapshotResponse{}, s.deleteBackupSnapshot(ctx, req.GetSnapshotId())
	}
	snap, err := s.readSnapshot(ctx, req.GetSnapshotId())
	if api.Is(err, api.NotFound) {
		return &csi.DeleteSnapshotResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	if g := snap.Spec.Group; g != "" && snap.DeletionTimestamp == nil {
		err := s.client.Get(ctx, client.ObjectKey{Name: g}, &api.SnapshotGroup{})
		switch {
		case err == nil:
			return nil, api.Errorf(api.Invalid, "snapshot %s is part of snapshot group %s%s: delete that",
				snap.Name, groupScheme, g)
		case !apierrors.IsNotFound(err):
			return nil, api.Explain(err, "read snapshot group %s", g)
		}
	}
	uid := snap.UID
	if err := s.client.Delete(ctx, snap, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "delete snapshot %s", snap.Name)
	}
	why := ""
	see := func(now *api.Snapshot) { why = now.Status.Error }
	if err := await.Gone(ctx, s.client, snap, see); err != nil {
		return nil, api.Explain(err, "delete snapshot %s (%s)", snap.Name, why)
	}
	return &csi.DeleteSnapshotResponse{}, nil
}

// GetSnapshot is one entry of ListSnapshots.
func (s *Server) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if req.GetSnapshotId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no snapshot")
	}
	if id := req.GetSnapshotId(); strings.HasPrefix(id, imageScheme) {
		img, err := s.snapshotImage(ctx, id)
		if err == nil && !isCut(img) {
			err = api.Errorf(api.NotFound, "snapshot %.200q does not exist yet", id)
		}
		if err != nil {
			return nil, err
		}
		return &csi.GetSnapshotResponse{Snapshot: imageInCSI(img, id)}, nil
	} else if api.IsBackupHandle(id) {
		snap, err := s.getBackupSnapshot(ctx, id)
		if err != nil {
			return nil, err
		}
		return &csi.GetSnapshotResponse{Snapshot: snap}, nil
	}
	snap, err := s.readSnapshot(ctx, req.GetSnapshotId())
	if err == nil && !isVisible(snap) {
		err = api.Errorf(api.NotFound, "snapshot %.200q does not exist yet", req.GetSnapshotId())
	}
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: snapshotInCSI(snap)}, nil
}

// isVisible reports whether a snapshot was made, and not for Drover's own purposes.
func isVisible(s *api.Snapshot) bool {
	return s.Status.CreationTime != "" && s.Spec.Labels[api.LabelClone] == ""
}

// ListSnapshots lists the finished snapshots: all, a volume's, or the snapshot of an id.
func (s *Server) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (
	*csi.ListSnapshotsResponse, error) {
	all, err := s.findSnapshots(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	all = slices.DeleteFunc(all, func(snap *csi.Snapshot) bool {
		of := req.GetSourceVolumeId()
		return of != "" && snap.SourceVolumeId != of
	})
	some, next, err := selectPage(all, snapshotKey, req.GetStartingToken(), req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	res := &csi.ListSnapshotsResponse{NextToken: next}
	for _, snap := range some {
		res.Entries = append(res.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: snap})
	}
	return res, nil
}

// snapshotKey is a name for every snapshot, in which tokens of lists are written.
func snapshotKey(s *csi.Snapshot) string {
	if w, ok := parseImageHandle(s.SnapshotId); ok {
		return "bi." + w.name
	}
	if _, name, ok := api.ParseBackupHandle(s.SnapshotId); ok {
		return "bak." + name
	}
	return "snap." + s.SnapshotId[strings.LastIndexByte(s.SnapshotId, '/')+1:]
}

// findSnapshots returns all finished snapshots, or the snapshot of an id, if any.
func (s *Server) findSnapshots(ctx context.Context, id string) (all []*csi.Snapshot, err error) {
	switch {
	case strings.HasPrefix(id, imageScheme):
		img, err := s.snapshotImage(ctx, id)
		if err == nil && isCut(img) {
			all = append(all, imageInCSI(img, id))
		}
		if api.Is(err, api.NotFound) {
			err = nil
		}
		return all, err
	case api.IsBackupHandle(id):
		snap, err := s.getBackupSnapshot(ctx, id)
		if api.Is(err, api.NotFound) {
			return nil, nil
		}
		return []*csi.Snapshot{snap}, err
	case id != "":
		snap, err := s.readSnapshot(ctx, id)
		if err == nil && isVisible(snap) {
			all = append(all, snapshotInCSI(snap))
		}
		if api.Is(err, api.NotFound) {
			err = nil
		}
		return all, err
	}
	snaps, imgs := &api.SnapshotList{}, &api.BackingImageList{}
	if err := s.client.List(ctx, snaps); err != nil {
		return nil, api.Explain(err, "list snapshots")
	}
	if err := s.client.List(ctx, imgs); err != nil {
		return nil, api.Explain(err, "list backing images")
	}
	if all, err = s.listBackups(ctx, snaps.Items); err != nil {
		return nil, err
	}
	for i := range snaps.Items {
		if isVisible(&snaps.Items[i]) {
			all = append(all, snapshotInCSI(&snaps.Items[i]))
		}
	}
	for i := range imgs.Items {
		img := &imgs.Items[i]
		if img.Annotations[annotationSnapshot] != "" && isCut(img) {
			all = append(all, imageInCSI(img, imageHandle(img)))
		}
	}
	return all, nil
}

// initialContent returns the initial content of a new volume: the form in the spec, the number of bytes, and the
// backing image under the content.
func (s *Server) initialContent(ctx context.Context, req *csi.VolumeContentSource) (_ string, size int64, image string,
	err error) {
	var from api.DataSource
	var vol *api.Volume
	switch {
	case req == nil:
		return "", 0, "", nil
	case req.GetSnapshot() != nil:
		snap, err := s.readSnapshot(ctx, req.GetSnapshot().GetSnapshotId())
		if err != nil {
			return "", 0, "", err
		}
		from, size = api.DataSource{Volume: snap.Spec.Volume, Snapshot: snap.Name}, snap.Status.RestoreSize
		if !snap.Status.ReadyToUse {
			return "", 0, "", api.Errorf(api.Unavailable, "snapshot %s is not ready: %s", snapshotID(snap), snap.Status.Error)
		}
		vol = &api.Volume{} // a deleted volume still has its snapshots
		if err := s.client.Get(ctx, client.ObjectKey{Name: from.Volume}, vol); err != nil {
			return "", 0, "", api.Explain(err, "read volume %s", from.Volume)
		}
	case req.GetVolume() != nil:
		if vol, err = s.readVolume(ctx, req.GetVolume().GetVolumeId()); err != nil {
			return "", 0, "", err
		}
		if vol.DeletionTimestamp != nil {
			return "", 0, "", api.Errorf(api.NotFound, "volume %s, which is to be cloned, is being deleted", vol.Name)
		}
		from, size = api.DataSource{Volume: vol.Name}, vol.Spec.Size
	default:
		return "", 0, "", api.Errorf(api.Invalid, "the content source is neither a snapshot nor a volume")
	}
	return from.String(), size, vol.Spec.BackingImage, nil
}

// isKept reports whether a volume is deleted and kept for its snapshots alone: for CSI the volume is gone.
func isKept(v *api.Volume) bool {
	return v.DeletionTimestamp != nil && meta.IsStatusConditionTrue(v.Status.Conditions, api.ConditionKept)
}

// requestedSource returns the data source of a request by the request's words alone, for comparison with an existing
// volume.
func requestedSource(req *csi.VolumeContentSource) string {
	if v := req.GetVolume(); v != nil {
		return api.DataSource{Volume: v.GetVolumeId()}.String()
	}
	return req.GetSnapshot().GetSnapshotId()
}

// contentSource is a volume's data source in the words of CSI.
func contentSource(vol *api.Volume) *csi.VolumeContentSource {
	if id := vol.Annotations[annotationContent]; id != "" {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
	}
	from, err := api.ParseDataSource(vol.Spec.DataSource)
	switch {
	case err != nil || from.Volume == "":
		return nil
	case from.Snapshot == "":
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: from.Volume}}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: from.String()}}}
}
