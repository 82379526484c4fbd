package node

import (
	"context"
	"errors"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/mount-utils"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// NodeStageVolume mounts the volume's file system at the staging path, after making a file system on a blank volume
// and growing the file system of a grown volume. A block volume needs no staging but its device.
func (s *Server) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (
	*csi.NodeStageVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	if err := checkPath("staging", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	if err := checkCapability(req.GetVolumeCapability()); err != nil {
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
	if req.GetVolumeCapability().GetBlock() != nil {
		err = s.stageBlock(ctx, vol, att, d, req.GetStagingTargetPath())
	} else {
		err = s.stageMount(ctx, vol, att, d, req)
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// stageBlock records that the workload may write anything from now on: the device is not proven blank any more, and
// the server may not make a half-made file system again.
func (s *Server) stageBlock(ctx context.Context, vol *api.Volume, att *api.Attachment, d device, path string) error {
	if m, err := mountAt(path); err != nil {
		return err
	} else if m != nil {
		if fs, _ := d.ownsMount(m); fs {
			return api.Errorf(api.Exists, "volume %s is staged at %s with its file system mounted: unstage it before it is "+
				"used as a block device", vol.Name, path)
		}
	}
	if att.Spec.ReadOnly {
		return nil
	}
	if vol.Annotations[api.AnnotationMkfs] != "" || vol.Annotations[api.AnnotationFS] != "" {
		if err := s.recordFilesystem(ctx, vol, "", ""); err != nil {
			return err
		}
	}
	if att.Annotations[api.AnnotationRaw] != "" {
		return nil
	}
	patch := []byte(`{"metadata":{"uid":"` + string(att.UID) + `","annotations":{"` + api.AnnotationRaw + `":"true"}}}`)
	return api.Explain(s.client.Patch(ctx, att, client.RawPatch(types.MergePatchType, patch)),
		"record that volume %s is used as a block device", vol.Name)
}

func (s *Server) stageMount(ctx context.Context, vol *api.Volume, att *api.Attachment, d device,
	req *csi.NodeStageVolumeRequest) error {
	path, fsCap := req.GetStagingTargetPath(), req.GetVolumeCapability().GetMount()
	readOnly := att.Spec.ReadOnly || readerOnly(req.GetVolumeCapability())
	wanted := fsCap.GetFsType()
	if wanted == "" {
		wanted = vol.Spec.FSType
	}
	if _, known := filesystems[wanted]; wanted != "" && !known {
		return api.Errorf(api.Invalid, "file system %.40q is not supported: ext4, xfs and btrfs are", wanted)
	}
	m, err := existingMount(path, d, true)
	if err != nil {
		return err
	}
	if m != nil {
		if wanted != "" && m.FSType != wanted {
			return api.Errorf(api.Exists, "volume %s is staged at %s as %s, not as %s", vol.Name, path, m.FSType, wanted)
		}
		if isReadOnly(m) != readOnly && !slices.Contains(fsCap.GetMountFlags(), "ro") {
			return api.Errorf(api.Exists, "volume %s is staged at %s with read-only %v", vol.Name, path, isReadOnly(m))
		}
		return growIfSmall(ctx, vol, d, m)
	}
	fs, err := s.ensureFilesystem(ctx, vol, att, d, wanted, readOnly)
	if err != nil {
		return err
	}
	options := slices.Concat(filesystems[fs].options, fsCap.GetMountFlags())
	if readOnly && !slices.Contains(options, "ro") {
		options = append(options, "ro")
	}
	if err := os.MkdirAll(path, 0o750); err != nil {
		return api.Errorf(api.Other, "make the staging path of volume %s: %w", vol.Name, err)
	}
	return mountGrown(ctx, vol, d, fs, path, options)
}

// mountGrown mounts the file system, as large as the device.
func mountGrown(ctx context.Context, vol *api.Volume, d device, fs, path string, options []string) error {
	readOnly := slices.Contains(options, "ro")
	isExt := fs == "ext2" || fs == "ext3" || fs == "ext4"
	if isExt && !readOnly {
		if err := checkFilesystem(ctx, d); err != nil {
			return api.Explain(err, "volume %s", vol.Name)
		}
	}
	do := func() error {
		err := mount.NewWithoutSystemd("").Mount(d.path, path, fs, options)
		if err != nil {
			return api.Errorf(api.Invalid, "mount volume %s (%s, options %v): %w", vol.Name, fs, options, err)
		}
		return nil
	}
	if err := do(); err != nil || readOnly {
		return err
	}
	more, err := needsGrowth(d, fs)
	if err == nil && more {
		err = growFilesystem(ctx, d, fs, path)
		if err != nil && isExt { // without CAP_SYS_RESOURCE the kernel grows no mounted ext4: take it down for a moment
			if err = unmountPath(path); err == nil {
				if err = growOffline(ctx, d); err == nil {
					return do()
				}
			}
		}
	}
	if err != nil {
		return errors.Join(api.Explain(err, "grow the file system of volume %s", vol.Name), unmountPath(path))
	}
	return nil
}

// growIfSmall finishes the growing of a staged file system where the kernel grows mounted file systems. Elsewhere the
// file system keeps its size until the volume is staged again.
func growIfSmall(ctx context.Context, vol *api.Volume, d device, m *mountinfo.Info) error {
	if isReadOnly(m) {
		return nil
	}
	more, err := needsGrowth(d, m.FSType)
	if err != nil || !more {
		return err
	}
	err = growFilesystem(ctx, d, m.FSType, m.Mountpoint)
	if growthRefused(err) {
		return nil
	}
	return api.Explain(err, "grow the file system of volume %s", vol.Name)
}

// growthRefused reports whether the kernel would not let a mounted file system grow.
func growthRefused(err error) bool {
	return failedWith(err, "permission denied") || failedWith(err, "operation not permitted")
}

// existingMount returns the existing mount of the device at path, or nil where the path is free. existingMount takes
// off a dead mount of an earlier life of the volume; any other mount is an error.
func existingMount(path string, d device, filesystem bool) (*mountinfo.Info, error) {
	for {
		m, err := mountAt(path)
		if m == nil || err != nil {
			return nil, err
		}
		isFS, isBlock := d.ownsMount(m)
		switch {
		case isFS && filesystem:
			if !isDeadMount(path) {
				return m, nil
			}
		case isBlock && !filesystem && d.isAt(path):
			return m, nil
		case !filesystem && showsAny(m): // the device of an earlier life
		case !isDeadMount(path) && !isDeviceGone(m) && !d.replaces(m):
			return nil, api.Errorf(api.Exists, "%s is taken by another mount, of %s", path, m.Source)
		}
		if err := unmountPath(path); err != nil {
			return nil, err
		}
	}
}

// NodeUnstageVolume unmounts the staging path. A path without a mount is no error, even if the volume no longer
// exists.
func (s *Server) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (
	*csi.NodeUnstageVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	if err := checkPath("staging", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	unlock, err := s.lockVolume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := unmountPath(req.GetStagingTargetPath()); err != nil {
		return nil, api.Explain(err, "unstage volume %.80s", req.GetVolumeId())
	}
	if err := removeDeviceFile(req.GetVolumeId()); err != nil {
		return nil, api.Explain(err, "unstage volume %.80s", req.GetVolumeId())
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}
