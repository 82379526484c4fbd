package controller

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"drover.io/drover/api"
)

// checkCapability says why a volume cannot be used as a capability asks, or nil.
func checkCapability(c *csi.VolumeCapability) error {
	switch c.GetAccessMode().GetMode() {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	case csi.VolumeCapability_AccessMode_UNKNOWN:
		return api.Errorf(api.Invalid, "the volume capability has no access mode")
	default:
		return api.Errorf(api.Invalid, "access mode %s is not supported: a volume is used on one node at a time",
			c.GetAccessMode().GetMode())
	}
	switch {
	case c.GetBlock() != nil:
	case c.GetMount() != nil:
		if fs := c.GetMount().GetFsType(); fs != "" {
			if _, ok := minFSSize[fs]; !ok {
				return api.Errorf(api.Invalid, "file system %.40q is not supported: ext4, xfs and btrfs are", fs)
			}
		}
	default:
		return api.Errorf(api.Invalid, "the volume capability says neither block nor mount")
	}
	return nil
}

// checkCapabilities requires at least one capability, and all supported.
func checkCapabilities(caps []*csi.VolumeCapability) error {
	if len(caps) == 0 {
		return api.Errorf(api.Invalid, "the request has no volume capability")
	}
	for _, c := range caps {
		if err := checkCapability(c); err != nil {
			return err
		}
	}
	return nil
}

// fsType is the file system that capabilities and the parameter agree on, or "".
func fsType(parameter string, caps []*csi.VolumeCapability) (string, error) {
	fs := parameter
	for _, c := range caps {
		asked := c.GetMount().GetFsType()
		if asked != "" && fs != "" && asked != fs {
			return "", api.Errorf(api.Invalid, "two file systems are asked for, %s and %s: a volume has one", fs, asked)
		}
		if asked != "" {
			fs = asked
		}
	}
	return fs, nil
}
