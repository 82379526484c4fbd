package node

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// place is a mounted path of a volume on this node.
type place struct {
	vol   *api.Volume
	att   *api.Attachment
	d     device
	m     *mountinfo.Info
	block bool
}

// findMount finds a volume and its mount at one of the paths, which need not exist.
func (s *Server) findMount(ctx context.Context, id, path string) (*place, error) {
	vol, err := s.readVolume(ctx, id)
	if err != nil {
		return nil, err
	}
	nowhere := api.Errorf(api.NotFound, "volume %s is not at %.200q on node %s", vol.Name, path, s.name)
	if checkPath("volume", path) != nil {
		return nil, nowhere
	}
	att, err := s.awaitAttachment(ctx, vol.Name)
	if api.Is(err, api.InUse) {
		return nil, nowhere
	}
	if err != nil {
		return nil, err
	}
	d, err := openDevice(vol.Name, att.Status.Device)
	if err != nil {
		return nil, err
	}
	m, err := mountAt(path)
	if err != nil {
		return nil, err
	}
	if m == nil {
		return nil, nowhere
	}
	isFS, isBlock := d.ownsMount(m)
	if !isFS && (!isBlock || !d.isAt(path)) {
		return nil, nowhere
	}
	return &place{vol: vol, att: att, d: d, m: m, block: isBlock}, nil
}

// NodeGetVolumeStats tells the bytes and inodes of a file system, or the bytes of a block volume.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (
	*csi.NodeGetVolumeStatsResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" || req.GetVolumePath() == "" {
		return nil, api.Errorf(api.Invalid, "statistics need a volume and its path")
	}
	p, err := s.findMount(ctx, req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	if p.block {
		size, err := p.d.size()
		if err != nil {
			return nil, err
		}
		used := min(p.vol.Status.Used, size)
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: size, Used: used, Available: size - used}}}, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(p.m.Mountpoint, &st); err != nil {
		return nil, api.Errorf(api.Unavailable, "statistics of volume %s: %w", p.vol.Name, err)
	}
	unit := st.Bsize
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: int64(st.Blocks) * unit, Available: int64(st.Bavail) * unit,
			Used: int64(st.Blocks-st.Bfree) * unit},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Files), Available: int64(st.Ffree),
			Used: int64(st.Files - st.Ffree)},
	}}, nil
}

// NodeExpandVolume grows the file system to the device, once the device has the size.
func (s *Server) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (
	*csi.NodeExpandVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" || req.GetVolumePath() == "" {
		return nil, api.Errorf(api.Invalid, "expanding needs a volume and its path")
	}
	if c := req.GetVolumeCapability(); c != nil {
		if err := checkCapability(c); err != nil {
			return nil, err
		}
	}
	unlock, err := s.lockVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer unlock()
	p, err := s.findMount(ctx, req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	required, limit := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	if required > p.vol.Spec.Size || (limit > 0 && limit < p.vol.Spec.Size) {
		return nil, api.Errorf(api.OutOfRange, "volume %s has %d bytes: expand it in the controller first", p.vol.Name,
			p.vol.Spec.Size)
	}
	att, err := await.Until(ctx, s.client, p.att.Name, func(a *api.Attachment) (bool, error) {
		return a.Status.Size >= max(required, p.vol.Status.Size), nil
	})
	if err != nil {
		return nil, api.Explain(err, "wait for the device of volume %s to grow", p.vol.Name)
	}
	res := &csi.NodeExpandVolumeResponse{CapacityBytes: att.Status.Size}
	if p.block {
		return res, nil
	}
	more, err := needsGrowth(p.d, p.m.FSType)
	if err != nil || !more {
		return res, err
	}
	if slices.Contains(strings.Split(p.m.VFSOptions, ","), "ro") {
		return nil, api.Errorf(api.InUse, "volume %s is mounted read-only: its file system cannot grow", p.vol.Name)
	}
	switch err := growFilesystem(ctx, p.d, p.m.FSType, p.m.Mountpoint); {
	case growthRefused(err):
		return nil, api.Errorf(api.InUse, "the kernel of node %s does not let a mounted %s grow (this needs "+
			"CAP_SYS_RESOURCE): it grows when volume %s is staged the next time: %w", s.name, p.m.FSType, p.vol.Name,
			err)
	case err != nil:
		return nil, api.Explain(err, "grow the file system of volume %s", p.vol.Name)
	}
	return res, nil
}

// NodeGetVolumeHealth reports the problems of one volume that this node sees.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (
	*csi.NodeGetVolumeHealthResponse, error) {
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	h := &csi.VolumeHealth{VolumeId: vol.Name}
	add := func(t csi.VolumeHealthErrorType, reason, msg string) {
		for _, e := range h.HealthStatuses {
			if e.Status == t && e.Reason == reason {
				e.Message += "; " + msg
				return
			}
		}
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: t, Reason: reason, Message: msg})
	}
	att := &api.Attachment{}
	err = s.client.Get(ctx, client.ObjectKey{Name: vol.Name}, att)
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return nil, api.Explain(err, "read the attachment of volume %s", vol.Name)
	case err != nil || att.Spec.Node != s.name: // not here: nothing to ail
		return &csi.NodeGetVolumeHealthResponse{VolumeHealth: h}, nil
	case !att.Status.Ready:
		add(csi.VolumeHealthErrorType_INACCESSIBLE, "DeviceNotReady", att.Status.Message)
	}
	conditions := slices.Concat(att.Status.Conditions, vol.Status.Conditions)
	if c := meta.FindStatusCondition(conditions, api.ConditionSpace); c != nil && c.Status == "False" {
		add(csi.VolumeHealthErrorType_DEGRADED, "DiskFull", c.Message)
	}
	if c := meta.FindStatusCondition(conditions, api.ConditionIntact); c != nil && c.Status == "False" {
		t := csi.VolumeHealthErrorType_DATA_LOSS
		if vol.Spec.NumberOfReplicas > 1 { // other replicas have the data still
			t = csi.VolumeHealthErrorType_DEGRADED
		}
		add(t, "DataDamaged", c.Message)
	}
	if c := meta.FindStatusCondition(conditions, api.ConditionSourceLost); c != nil && c.Status == "True" {
		add(csi.VolumeHealthErrorType_DEGRADED, "SourceLost", c.Message)
	}
	if vol.Status.Robustness == api.RobustDegraded {
		add(csi.VolumeHealthErrorType_DEGRADED, "ReplicaMissing", vol.Status.Message)
	}
	for _, path := range []string{req.GetStagingTargetPath(), req.GetVolumePublishPath()} {
		if path == "" || checkPath("volume", path) != nil {
			continue
		}
		m, err := mountAt(path)
		if err != nil {
			return nil, err
		}
		switch {
		case m == nil:
		case isDeadMount(path) || isDeviceGone(m):
			add(csi.VolumeHealthErrorType_INACCESSIBLE, "MountDead", path+" can no longer be read")
		case !isReadOnly(m) && !att.Spec.ReadOnly && slices.Contains(strings.Split(m.VFSOptions, ","), "ro"):
			add(csi.VolumeHealthErrorType_DEGRADED, "FilesystemReadOnly", "the file system at "+path+
				" went read-only after an error")
		}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: h}, nil
}

// NodeGetStorageHealth reports the problems of this node's disks.
func (s *Server) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (
	*csi.NodeGetStorageHealthResponse, error) {
	n := &api.Node{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: s.name}, n); err != nil {
		return nil, api.Explain(err, "read node %s", s.name)
	}
	var bad []string
	for _, d := range n.Status.Disks {
		if !d.Ready {
			bad = append(bad, fmt.Sprintf("disk %s: %s", filepath.Clean(d.Path), d.Message))
		}
	}
	res := &csi.NodeGetStorageHealthResponse{}
	if len(bad) == 0 {
		return res, nil
	}
	entry := &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
		Status: csi.StorageHealthErrorType_STORAGE_DEGRADED, Reason: "DiskNotReady", Message: strings.Join(bad, "; ")}
	if len(bad) == len(n.Status.Disks) {
		entry.Status = csi.StorageHealthErrorType_STORAGE_UNREACHABLE
	}
	res.BackendHealth = append(res.BackendHealth, entry)
	return res, nil
}
