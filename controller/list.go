package controller

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// tokenPrefix makes a page's token: the name of the last volume shown. A token stays valid whatever is created or
// deleted between pages, since the next page begins with the first name beyond the token, and a name alone is not a
// token.
const tokenPrefix = "after:"

// selectPage cuts a list sorted by name.
func selectPage[T any](all []T, name func(T) string, token string, most int32) (out []T, next string, err error) {
	if most < 0 {
		return nil, "", api.Errorf(api.Invalid, "max_entries is negative")
	}
	slices.SortFunc(all, func(a, b T) int { return strings.Compare(name(a), name(b)) })
	if token != "" {
		after, ok := strings.CutPrefix(token, tokenPrefix)
		if !ok || !validID(after) {
			return nil, "", api.Errorf(api.Busy, "starting token %.80q is none of this driver: list again from the "+
				"start", token)
		}
		i, found := slices.BinarySearchFunc(all, after, func(v T, n string) int { return strings.Compare(name(v), n) })
		if found {
			i++
		}
		all = all[i:]
	}
	if most > 0 && len(all) > int(most) {
		all = all[:most]
		next = tokenPrefix + name(all[most-1])
	}
	return all, next, nil
}

// ListVolumes lists the volumes that exist with all bytes, the nodes that each is published on, and each volume's
// problems.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	vols := &api.VolumeList{}
	if err := s.client.List(ctx, vols); err != nil {
		return nil, api.Explain(err, "list volumes")
	}
	all := slices.DeleteFunc(vols.Items, func(v api.Volume) bool {
		return !isUsable(&v) && !(v.Status.State == api.VolumeFaulted && v.Status.Size > 0)
	})
	name := func(v api.Volume) string { return v.Name }
	shown, next, err := selectPage(all, name, req.GetStartingToken(), req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	on, err := s.publishedNodes(ctx)
	if err != nil {
		return nil, err
	}
	reps := &api.ReplicaList{}
	if err := s.client.List(ctx, reps); err != nil {
		return nil, api.Explain(err, "list replicas")
	}
	of := map[string][]api.Replica{}
	for _, r := range reps.Items {
		of[r.Spec.Volume] = append(of[r.Spec.Volume], r)
	}
	res := &csi.ListVolumesResponse{NextToken: next}
	for i := range shown {
		v := &shown[i]
		res.Entries = append(res.Entries, &csi.ListVolumesResponse_Entry{
			Volume: inCSI(v, of[v.Name]),
			Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: on[v.Name]},
		})
	}
	return res, nil
}

// ControllerGetVolume is one entry of ListVolumes.
func (s *Server) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (
	*csi.ControllerGetVolumeResponse, error) {
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	out, err := s.describeVolume(ctx, vol)
	if err != nil {
		return nil, err
	}
	att, err := s.readAttachment(ctx, vol.Name)
	if err != nil {
		return nil, err
	}
	status := &csi.ControllerGetVolumeResponse_VolumeStatus{}
	if att != nil && (att.Status.Ready || att.DeletionTimestamp != nil) {
		status.PublishedNodeIds = []string{att.Spec.Node}
	}
	return &csi.ControllerGetVolumeResponse{Volume: out, Status: status}, nil
}

// volumeHealth lists a volume's problems, as the controller sees the volume. Empty: the volume is well.
func volumeHealth(vol *api.Volume) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: vol.Name}
	add := func(t csi.VolumeHealthErrorType, reason, msg string) {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: t, Reason: reason, Message: msg})
	}
	switch {
	case vol.Status.Robustness == api.RobustFaulted || vol.Status.State == api.VolumeFaulted:
		add(csi.VolumeHealthErrorType_INACCESSIBLE, "Faulted", vol.Status.Message)
	case vol.Status.Robustness == api.RobustDegraded:
		add(csi.VolumeHealthErrorType_DEGRADED, "ReplicaMissing", vol.Status.Message)
	}
	if c := meta.FindStatusCondition(vol.Status.Conditions, api.ConditionSpace); c != nil && c.Status == "False" {
		add(csi.VolumeHealthErrorType_DEGRADED, "DiskFull", c.Message)
	}
	if c := meta.FindStatusCondition(vol.Status.Conditions, api.ConditionIntact); c != nil && c.Status == "False" {
		add(damageIs(vol), "DataDamaged", c.Message)
	}
	return h
}

// damageIs explains damage of a replica: reads of the only replica fail, other replicas have the data still.
func damageIs(vol *api.Volume) csi.VolumeHealthErrorType {
	if vol.Spec.NumberOfReplicas > 1 {
		return csi.VolumeHealthErrorType_DEGRADED
	}
	return csi.VolumeHealthErrorType_DATA_LOSS
}

// ControllerGetVolumeHealth reports the problems of one volume.
func (s *Server) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (
	*csi.ControllerGetVolumeHealthResponse, error) {
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: volumeHealth(vol)}, nil
}

// ControllerListVolumeHealth lists the volumes with problems.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (
	*csi.ControllerListVolumeHealthResponse, error) {
	vols := &api.VolumeList{}
	if err := s.client.List(ctx, vols); err != nil {
		return nil, api.Explain(err, "list volumes")
	}
	var ill []*csi.VolumeHealth
	for i := range vols.Items {
		if h := volumeHealth(&vols.Items[i]); len(h.HealthStatuses) > 0 {
			ill = append(ill, h)
		}
	}
	shown, next, err := selectPage(ill, (*csi.VolumeHealth).GetVolumeId, req.GetStartingToken(), req.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerListVolumeHealthResponse{Entries: shown, NextToken: next}, nil
}

// GetCapacity says how much may be provisioned where the parameters and the topology allow, by the planner's rule: a
// disk takes volumes up to its over-provisioned capacity, and none while too little of the disk is really free.
func (s *Server) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	w := &wish{}
	if err := w.parseParameters(req.GetParameters()); err != nil {
		return nil, err
	}
	if err := s.imageBinds(ctx, w); err != nil {
		return nil, err
	}
	res := &csi.GetCapacityResponse{
		MinimumVolumeSize: wrapperspb.Int64(max(api.MinVolumeSize, minFSSize[w.spec.FSType])),
		MaximumVolumeSize: wrapperspb.Int64(0),
	}
	if len(req.GetVolumeCapabilities()) > 0 && checkCapabilities(req.GetVolumeCapabilities()) != nil {
		return res, nil
	}
	var only string
	if t := req.GetAccessibleTopology(); t != nil {
		n, ok := t.GetSegments()[api.TopologyNode]
		if !ok || len(t.GetSegments()) != 1 {
			return res, nil
		}
		only = n
	}
	over, err := s.readNumber(ctx, "storage-over-provisioning-percentage")
	if err != nil {
		return nil, err
	}
	least, err := s.readNumber(ctx, "storage-minimal-available-percentage")
	if err != nil {
		return nil, err
	}
	nodes, reps := &api.NodeList{}, &api.ReplicaList{}
	if err := s.client.List(ctx, nodes); err != nil {
		return nil, api.Explain(err, "list nodes")
	}
	if err := s.client.List(ctx, reps); err != nil {
		return nil, api.Explain(err, "list replicas")
	}
	promised := map[api.UID]int64{}
	for _, r := range reps.Items {
		promised[r.Spec.Disk] += r.Spec.Size
	}
	for i := range nodes.Items {
		n := &nodes.Items[i]
		if (only != "" && n.Name != only) || !takesReplicas(n, w) {
			continue
		}
		for _, d := range n.Status.Disks {
			spec := diskSpec(n, d.Path)
			if !d.Ready || spec == nil || !diskTakes(spec, w) || d.Available*100 < d.Capacity*least {
				continue
			}
			room := (d.Capacity-spec.ReservedBytes)/100*over - promised[d.UID]
			room = min(max(room, 0)/api.SizeUnit*api.SizeUnit, api.MaxVolumeSize)
			res.AvailableCapacity += room
			res.MaximumVolumeSize.Value = max(res.MaximumVolumeSize.Value, room)
		}
	}
	return res, nil
}

// imageBinds adds the selectors of the backing image, existing or future, to the volume's selectors.
func (s *Server) imageBinds(ctx context.Context, w *wish) error {
	if w.image.name == "" {
		return nil
	}
	of := &api.BackingImage{}
	of.Spec.NodeSelector, of.Spec.DiskSelector = w.image.nodeSelector, w.image.diskSelector
	if err := s.client.Get(ctx, client.ObjectKey{Name: w.image.name}, of); client.IgnoreNotFound(err) != nil {
		return api.Explain(err, "read backing image %s", w.image.name)
	}
	w.spec.NodeSelector = append(w.spec.NodeSelector, of.Spec.NodeSelector...)
	w.spec.DiskSelector = append(w.spec.DiskSelector, of.Spec.DiskSelector...)
	return nil
}

func takesReplicas(n *api.Node, w *wish) bool {
	return n.DeletionTimestamp == nil && (n.Spec.Schedulable == nil || *n.Spec.Schedulable) &&
		hasAll(n.Spec.Tags, w.spec.NodeSelector)
}

func diskTakes(d *api.DiskSpec, w *wish) bool {
	return (d.Schedulable == nil || *d.Schedulable) && !d.EvictionRequested && hasAll(d.Tags, w.spec.DiskSelector)
}

func diskSpec(n *api.Node, path string) *api.DiskSpec {
	for i := range n.Spec.Disks {
		if n.Spec.Disks[i].Path == path {
			return &n.Spec.Disks[i]
		}
	}
	return nil
}

func hasAll(have, want []string) bool {
	return !slices.ContainsFunc(want, func(t string) bool { return !slices.Contains(have, t) })
}
