package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// CreateVolume creates the Volume, or verifies that an existing Volume of the name is the same wish, and waits until
// the bytes have a place. CreateVolume first creates a missing backing image, from the parameters.
func (s *Server) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	w, err := parseRequest(req)
	if err != nil {
		return nil, err
	}
	vol, err := s.ensureVolume(ctx, req, w)
	if err != nil {
		return nil, err
	}
	if vol, err = s.awaitPlacement(ctx, vol); err != nil {
		return nil, err
	}
	out, err := s.describeVolume(ctx, vol)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: out}, nil
}

// parseRequest makes all checks of a request that read no object.
func parseRequest(req *csi.CreateVolumeRequest) (*wish, error) {
	if err := checkName(req.GetName()); err != nil {
		return nil, err
	}
	if err := checkCapabilities(req.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	w := &wish{spec: api.VolumeSpec{Parameters: withoutSidecarKeys(req.GetParameters())}}
	if err := w.parseParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	if err := w.parseMutable(req.GetMutableParameters()); err != nil {
		return nil, err
	}
	if err := w.image.completeSource(); err != nil {
		return nil, err
	}
	if w.source = req.GetVolumeContentSource(); w.source != nil {
		if w.fromBackup != "" {
			return nil, api.Errorf(api.Invalid, "parameter fromBackup and a content source: a volume begins with one of them")
		}
		if w.spec.CloneMode = api.CloneLinked; w.cloneMode == api.CloneFull {
			w.spec.CloneMode = api.CloneFull
		}
	}
	var err error
	if w.spec.FSType, err = fsType(w.spec.FSType, req.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	if w.required, w.limit, err = checkCapacityRange(req.GetCapacityRange()); err != nil {
		return nil, err
	}
	if w.spec.Nodes, err = topologyNodes(req.GetAccessibilityRequirements()); err != nil {
		return nil, err
	}
	if len(req.GetAccessibilityRequirements().GetPreferred()) > 0 && len(w.spec.Nodes) > 0 {
		w.prefer = w.spec.Nodes[0]
	}
	return w, strictLocal(&w.spec)
}

// checkCapacityRange checks a capacity range alone.
func checkCapacityRange(r *csi.CapacityRange) (required, limit int64, err error) {
	required, limit = r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return 0, 0, api.Errorf(api.Invalid, "the capacity range has a negative size")
	case limit > 0 && required > limit:
		return 0, 0, api.Errorf(api.Invalid, "the required size, %d bytes, is over the limit, %d bytes", required,
			limit)
	case required > api.MaxVolumeSize:
		return 0, 0, api.Errorf(api.OutOfRange, "%d bytes are more than the largest volume, %d bytes", required,
			api.MaxVolumeSize)
	case limit > 0 && limit < api.MinVolumeSize:
		return 0, 0, api.Errorf(api.OutOfRange, "the limit of %d bytes is below the smallest volume, %d bytes", limit,
			api.MinVolumeSize)
	}
	return required, limit, nil
}

// defaultSize is the size of a blank volume without a requested size, as in other drivers.
const defaultSize = 1 << 30

// volumeSize returns the size of a new volume: the required bytes, rounded up, never less than the initial content.
func (w *wish) volumeSize(virtual int64) (int64, error) {
	n := w.required
	switch {
	case n == 0 && virtual > 0:
		n = virtual
	case n == 0:
		n = defaultSize
		if w.limit > 0 {
			n = min(n, w.limit/api.SizeUnit*api.SizeUnit)
		}
	case n < virtual && w.source != nil:
		return 0, api.Errorf(api.OutOfRange, "%d bytes are less than the %d bytes of the source, %s: ask for more", n,
			virtual,
			requestedSource(w.source))
	case n < virtual && w.fromBackup != "":
		return 0, api.Errorf(api.OutOfRange, "%d bytes are less than the %d bytes of the backup: ask for more", n, virtual)
	case n < virtual:
		return 0, api.Errorf(api.OutOfRange, "%d bytes are less than the %d bytes of the disk in backing image %s: "+
			"ask for more", n, virtual, w.image.name)
	}
	n = api.RoundSize(n)
	if w.limit > 0 && n > w.limit {
		return 0, api.Errorf(api.OutOfRange, "the smallest volume that fits has %d bytes, over the limit of %d bytes",
			n, w.limit)
	}
	if least := minFSSize[w.spec.FSType]; n < least {
		return 0, api.Errorf(api.OutOfRange, "%d bytes are too few for a file system of type %s, which needs %d bytes",
			n, w.spec.FSType, least)
	}
	return n, nil
}

// topologyNodes are the nodes that a topology requirement allows, preferred nodes first; nil: any.
func topologyNodes(r *csi.TopologyRequirement) ([]string, error) {
	var nodes []string
	for _, t := range slices.Concat(r.GetPreferred(), r.GetRequisite()) {
		n, ok := t.GetSegments()[api.TopologyNode]
		if ok && len(t.GetSegments()) == 1 && !slices.Contains(nodes, n) {
			nodes = append(nodes, n)
		}
	}
	if len(nodes) == 0 && len(r.GetRequisite()) > 0 {
		return nil, api.Errorf(api.Full, "no node has the required topology; the driver's only key is %s",
			api.TopologyNode)
	}
	return nodes, nil
}

// ensureVolume creates the object, or verifies that an existing object says the same.
func (s *Server) ensureVolume(ctx context.Context, req *csi.CreateVolumeRequest, w *wish) (*api.Volume, error) {
	name := objectName(req.GetName())
	vol := &api.Volume{}
	err := s.client.Get(ctx, client.ObjectKey{Name: name}, vol)
	if err == nil {
		return vol, verifyExisting(vol, req.GetName(), w)
	}
	if !apierrors.IsNotFound(err) {
		return nil, api.Explain(err, "read volume %s", name)
	}
	virtual, err := s.contentSize(ctx, w)
	if err != nil {
		return nil, err
	}
	vol = &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: w.spec}
	if name != req.GetName() {
		vol.Annotations = map[string]string{annotationName: req.GetName()}
	}
	if w.content != "" {
		metav1.SetMetaDataAnnotation(&vol.ObjectMeta, annotationContent, w.content)
	}
	if vol.Spec.Size, err = w.volumeSize(virtual); err != nil {
		return nil, api.Explain(err, "volume %s", name)
	}
	if vol.Spec.DataLocality == "" {
		if vol.Spec.DataLocality, err = s.readSetting(ctx, "default-data-locality"); err != nil {
			return nil, err
		}
	}
	if err := strictLocal(&vol.Spec); err != nil {
		return nil, api.Explain(err, "setting default-data-locality")
	}
	if vol.Spec.NumberOfReplicas == 0 {
		if vol.Spec.NumberOfReplicas, err = s.defaultReplicas(ctx, &vol.Spec); err != nil {
			return nil, err
		}
	}
	if err := s.clearNodeList(ctx, vol, w.prefer); err != nil {
		return nil, err
	}
	s.annotateClaim(ctx, vol, req.GetParameters())
	if err = s.client.Create(ctx, vol); apierrors.IsAlreadyExists(err) {
		if vol, err = s.readVolume(ctx, name); err != nil {
			return nil, err
		}
		return vol, verifyExisting(vol, req.GetName(), w)
	}
	if err == nil && w.note != "" {
		s.events.Eventf(vol, nil, corev1.EventTypeNormal, "ParameterIgnored", "Create", "%s", w.note)
	}
	return vol, api.Explain(err, "create volume %s", name)
}

// defaultReplicas is for a StorageClass without a number of replicas.
func (s *Server) defaultReplicas(ctx context.Context, spec *api.VolumeSpec) (int32, error) {
	if spec.DataLocality == localStrict {
		return 1, nil
	}
	n, err := s.readNumber(ctx, "default-replica-count")
	return int32(min(max(n, 1), maxReplicas)), err
}

// clearNodeList turns a list of all existing nodes into no list: replicas of the volume may go to later nodes too.
func (s *Server) clearNodeList(ctx context.Context, vol *api.Volume, prefer string) error {
	if len(vol.Spec.Nodes) == 0 {
		return nil
	}
	nodes := &api.NodeList{}
	if err := s.client.List(ctx, nodes); err != nil {
		return api.Explain(err, "list nodes")
	}
	for i := range nodes.Items {
		if !slices.Contains(vol.Spec.Nodes, nodes.Items[i].Name) {
			return nil
		}
	}
	if len(nodes.Items) < 2 { // the same wish, and names the node
		return nil
	}
	vol.Spec.Nodes = nil
	if prefer != "" {
		metav1.SetMetaDataAnnotation(&vol.ObjectMeta, api.AnnotationPrefer, prefer)
	}
	return nil
}

// contentSize is the number of bytes of the volume's initial content, 0 for a blank volume.
func (s *Server) contentSize(ctx context.Context, w *wish) (int64, error) {
	switch id := w.source.GetSnapshot().GetSnapshotId(); {
	case w.fromBackup != "":
		return s.namedBackup(ctx, w)
	case w.source == nil:
		return s.imageSize(ctx, w)
	case strings.HasPrefix(id, imageScheme):
		return s.fromImage(ctx, w, id)
	case api.IsBackupHandle(id):
		return s.restoreBackup(ctx, w, id)
	}
	from, size, image, err := s.initialContent(ctx, w.source)
	if err != nil {
		return 0, err
	}
	if w.image.name != "" && w.image.name != image {
		return 0, api.Errorf(api.Invalid, "parameter backingImage is %s, but the source, %s, stands on %q", w.image.name,
			from,
			image)
	}
	w.spec.DataSource, w.spec.BackingImage = from, image
	return size, nil
}

// verifyExisting names the difference between an existing volume and the request. verifyExisting ignores modifiable
// fields.
func verifyExisting(vol *api.Volume, name string, w *wish) error {
	is := vol.Annotations[annotationName]
	if is == "" {
		is = vol.Name
	}
	differs := ""
	switch {
	case vol.DeletionTimestamp != nil:
		return api.Errorf(api.Busy, "volume %s of the same name is being deleted: try again", vol.Name)
	case is != name:
		differs = fmt.Sprintf("it is named %q", is)
	case vol.Spec.Size < w.required:
		differs = fmt.Sprintf("it has %d bytes, less than the %d required", vol.Spec.Size, w.required)
	case w.limit > 0 && vol.Spec.Size > w.limit:
		differs = fmt.Sprintf("it has %d bytes, over the limit of %d", vol.Spec.Size, w.limit)
	case !maps.Equal(vol.Spec.Parameters, w.spec.Parameters):
		differs = "its parameters differ"
	case vol.Spec.DataSource+vol.Annotations[annotationContent] != requestedSource(w.source):
		differs = fmt.Sprintf("its source is %q", vol.Spec.DataSource+vol.Annotations[annotationContent])
	case w.source == nil && w.fromBackup == "" && vol.Spec.BackingImage != w.image.name:
		differs = fmt.Sprintf("its backing image is %q", vol.Spec.BackingImage)
	case vol.Spec.FSType != w.spec.FSType:
		differs = fmt.Sprintf("its file system is %q", vol.Spec.FSType)
	case len(w.spec.Nodes) > 0 && len(vol.Spec.Nodes) > 0 &&
		!slices.ContainsFunc(vol.Spec.Nodes, func(n string) bool { return slices.Contains(w.spec.Nodes, n) }):
		differs = fmt.Sprintf("it is placed on %v", vol.Spec.Nodes)
	}
	if differs != "" {
		return api.Errorf(api.Exists, "volume %s exists and is another one: %s", vol.Name, differs)
	}
	return nil
}

// awaitPlacement waits until the volume has its size on every replica. awaitPlacement removes a volume for which no
// disk has room, so that the caller may choose another topology.
func (s *Server) awaitPlacement(ctx context.Context, vol *api.Volume) (*api.Volume, error) {
	var last *api.Volume
	out, err := await.Until(ctx, s.client, vol.Name, func(v *api.Volume) (bool, error) {
		last = v
		switch {
		case v.UID != vol.UID || v.DeletionTimestamp != nil:
			return false, api.Errorf(api.Busy, "deleted while it was being created: try again")
		case v.Status.CloneStatus != nil && v.Status.CloneStatus.State == api.CloneFailed:
			return false, api.Errorf(api.Unavailable, "the source cannot be cloned: %s", v.Status.CloneStatus.Message)
		case v.Status.State == api.VolumeFaulted:
			return false, api.Errorf(api.Unavailable, "faulted: %s", v.Status.Message)
		}
		if c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionScheduled); isUnschedulable(v, c) {
			return false, api.Errorf(api.Full, "no disk can take the volume: %s", c.Message)
		}
		return isUsable(v), nil
	})
	if err == nil {
		return out, nil
	}
	if api.Is(err, api.Full) {
		uid := vol.UID
		if e := s.client.Delete(ctx, vol, client.Preconditions{UID: &uid}); client.IgnoreNotFound(e) != nil {
			return nil, api.Explain(e, "delete volume %s, for which no disk has room", vol.Name)
		}
	}
	msg := ""
	if last != nil && last.Status.Message != "" && !strings.Contains(err.Error(), last.Status.Message) {
		msg = " (" + last.Status.Message + ")"
	}
	return nil, api.Explain(err, "create volume %s%s", vol.Name, msg)
}

// isUsable reports whether a volume exists with all its bytes, attached or not.
func isUsable(v *api.Volume) bool {
	switch v.Status.State {
	case api.VolumeDetached, api.VolumeAttaching, api.VolumeAttached, api.VolumeDetaching:
		return v.Status.Size > 0
	}
	return false
}

// isUnschedulable reports whether the planner has said, of the present wish, that no disk has room.
func isUnschedulable(v *api.Volume, c *metav1.Condition) bool {
	return c != nil && c.Status == metav1.ConditionFalse && c.Reason == "NoDisk" &&
		c.ObservedGeneration >= v.Generation && len(v.Status.Members) == 0
}

// describeVolume returns a volume in the words of CSI.
func (s *Server) describeVolume(ctx context.Context, vol *api.Volume) (*csi.Volume, error) {
	reps := &api.ReplicaList{}
	if err := s.client.List(ctx, reps, client.MatchingLabels{api.LabelVolume: api.LabelValue(vol.Name)}); err != nil {
		return nil, api.Explain(err, "list the replicas of volume %s", vol.Name)
	}
	return inCSI(vol, reps.OfVolume(vol.Name)), nil
}

// inCSI is a volume in CSI's form, accessible on every node; a strict-local volume only on the nodes with its data.
func inCSI(vol *api.Volume, reps []api.Replica) *csi.Volume {
	out := &csi.Volume{VolumeId: vol.Name, CapacityBytes: vol.Status.Size, ContentSource: contentSource(vol)}
	for _, n := range strictNodes(vol, reps) {
		out.AccessibleTopology = append(out.AccessibleTopology,
			&csi.Topology{Segments: map[string]string{api.TopologyNode: n}})
	}
	return out
}

// strictNodes are the nodes on which a strict-local volume can be used; nil: the volume is not strict-local.
func strictNodes(vol *api.Volume, reps []api.Replica) (nodes []string) {
	if vol.Spec.DataLocality != localStrict {
		return nil
	}
	for _, r := range reps {
		if slices.Contains(vol.Status.Members, r.Name) && !slices.Contains(nodes, r.Spec.Node) {
			nodes = append(nodes, r.Spec.Node)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// DeleteVolume removes a volume without attachments, and waits until the volume is gone.
func (s *Server) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if api.Is(err, api.NotFound) {
		return &csi.DeleteVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	att, err := s.readAttachment(ctx, vol.Name)
	if err != nil {
		return nil, err
	}
	if att != nil {
		return nil, api.Errorf(api.InUse, "volume %s is attached to node %s: detach it before deleting it", vol.Name,
			att.Spec.Node)
	}
	uid := vol.UID
	if err := s.client.Delete(ctx, vol, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "delete volume %s", vol.Name)
	}
	msg := ""
	_, err = await.Until(ctx, s.client, vol.Name, func(v *api.Volume) (bool, error) {
		msg = v.Status.Message
		return v.UID != vol.UID || isKept(v), nil
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, api.Explain(err, "delete volume %s (%s)", vol.Name, msg)
	}
	return &csi.DeleteVolumeResponse{}, nil
}
