package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// NodePublishVolume shows a staged volume at a workload's path, by a bind mount of the file system or of the device.
func (s *Server) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (
	*csi.NodePublishVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	if err := checkPath("target", req.GetTargetPath()); err != nil {
		return nil, err
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	if req.GetStagingTargetPath() == "" {
		return nil, api.Errorf(api.InUse, "volume %.80s: publishing needs the staging path", req.GetVolumeId())
	}
	if err := checkPath("staging", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	unlock, err := s.lockVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer unlock()
	vol, err := s.readVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	att, d, err := s.awaitDevice(ctx, vol)
	if err != nil {
		return nil, err
	}
	if err := onePath(vol, d, req); err != nil {
		return nil, err
	}
	if req.GetVolumeCapability().GetBlock() != nil {
		err = publishBlock(vol, att, d, req)
	} else {
		err = publishMount(vol, d, req)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// onePath allows a second path of a volume on this node only in the access mode for several writers.
func onePath(vol *api.Volume, d device, req *csi.NodePublishVolumeRequest) error {
	if req.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER {
		return nil
	}
	all, err := mountsOf(d)
	if err != nil {
		return err
	}
	target, err := resolveFolder(req.GetTargetPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return api.Errorf(api.Other, "path %s: %w", req.GetTargetPath(), err)
	}
	staging, err := resolveFolder(req.GetStagingTargetPath())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return api.Errorf(api.Other, "path %s: %w", req.GetStagingTargetPath(), err)
	}
	if slices.ContainsFunc(all, func(m *mountinfo.Info) bool { return m.Mountpoint == target }) {
		// A repeat. Other mounts may be the caller's own: a subPath, a device map.
		return nil
	}
	for _, m := range all {
		_, isBlock := d.ownsMount(m)
		earlier := isBlock && !d.isAt(m.Mountpoint) // shows the device of an earlier life of the volume
		if m.Mountpoint != staging && !earlier {
			return api.Errorf(api.InUse, "volume %s is published at %s: its access mode %s allows one path", vol.Name,
				m.Mountpoint, req.GetVolumeCapability().GetAccessMode().GetMode())
		}
	}
	return nil
}

func publishMount(vol *api.Volume, d device, req *csi.NodePublishVolumeRequest) error {
	staged, err := existingMount(req.GetStagingTargetPath(), d, true)
	if err != nil {
		return err
	}
	if staged == nil {
		return api.Errorf(api.InUse, "volume %s is not staged at %s", vol.Name, req.GetStagingTargetPath())
	}
	readOnly := req.GetReadonly() || readerOnly(req.GetVolumeCapability()) || isReadOnly(staged)
	at := req.GetTargetPath()
	m, err := existingMount(at, d, true)
	if err != nil {
		return err
	}
	if m != nil {
		return sameAccess(vol, m, readOnly)
	}
	if err := os.MkdirAll(at, 0o750); err != nil {
		return api.Errorf(api.Exists, "make the target path of volume %s: %w", vol.Name, err)
	}
	return bindMount(req.GetStagingTargetPath(), at, readOnly)
}

func sameAccess(vol *api.Volume, m *mountinfo.Info, readOnly bool) error {
	if isReadOnly(m) != readOnly {
		return api.Errorf(api.Exists, "volume %s is published at %s with read-only %v, not %v", vol.Name, m.Mountpoint,
			isReadOnly(m), readOnly)
	}
	return nil
}

func publishBlock(vol *api.Volume, att *api.Attachment, d device, req *csi.NodePublishVolumeRequest) error {
	readOnly := req.GetReadonly() || readerOnly(req.GetVolumeCapability())
	if readOnly && !att.Spec.ReadOnly {
		// A read-only mount of a device's file does not stop anybody from writing to the device.
		return api.Errorf(api.InUse, "volume %s is attached for writing, so that its device cannot be published "+
			"read-only: attach it read-only", vol.Name)
	}
	at := req.GetTargetPath()
	m, err := existingMount(at, d, false)
	if err != nil || m != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o750); err != nil {
		return api.Errorf(api.Other, "make the folder of the target path of volume %s: %w", vol.Name, err)
	}
	f, err := os.OpenFile(at, os.O_CREATE, 0o660)
	if err != nil {
		return api.Errorf(api.Exists, "make the target path of volume %s: %w", vol.Name, err)
	}
	f.Close()
	if err := d.makeDeviceFile(); err != nil {
		return err
	}
	return bindMount(d.deviceFile(), at, false)
}

// NodeUnpublishVolume unmounts the target path and removes the path. A missing path is no error.
func (s *Server) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (
	*csi.NodeUnpublishVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	if err := checkPath("target", req.GetTargetPath()); err != nil {
		return nil, err
	}
	unlock, err := s.lockVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := unmountPath(req.GetTargetPath()); err != nil {
		return nil, api.Explain(err, "unpublish volume %.80s", req.GetVolumeId())
	}
	if err := removeEmpty(req.GetTargetPath()); err != nil {
		return nil, api.Explain(err, "unpublish volume %.80s", req.GetVolumeId())
	}
	if err := removeDeviceFile(req.GetVolumeId()); err != nil {
		return nil, api.Explain(err, "unpublish volume %.80s", req.GetVolumeId())
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
