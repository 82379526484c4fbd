// Package node is the CSI Node door: the server mounts the device of an Attachment at the paths of workloads, as a file
// system or as a block device, and reports the health of both. The package holds no storage logic.
//
// Invariants: the server makes a file system only if the map of blocks proves a blank volume, or if an earlier attempt
// of the server, recorded beforehand, did not finish. The server unmounts or removes a path only if the mount table
// names the mount. Calls for one volume run one at a time.
//
// Each call reads the mount table and the objects, so that a restart loses nothing. The package starts no goroutines;
// programs that the server runs end before the call returns.
package node

import (
	"context"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/semaphore"
)

const waitDefault = time.Minute // for callers that set no deadline

// Server answers the Node RPCs.
type Server struct {
	csi.UnimplementedNodeServer
	client client.WithWatch
	name   string
	// isOf tells whether a device was made for a volume.
	isOf func(d device, volume api.UID) bool

	volumes semaphore.Set[string] // one call at a time works on a volume
}

// New makes the door of the named node. The client must read from the API server, not from a cache.
func New(c client.WithWatch, nodeName string) *Server {
	return &Server{client: c, name: nodeName, isOf: device.isOf}
}

// NodeGetCapabilities lists what the Node RPCs can do.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (
	*csi.NodeGetCapabilitiesResponse, error) {
	res := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		res.Capabilities = append(res.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}}})
	}
	return res, nil
}

// NodeGetInfo names this node, its topology, and the number of volumes that the node takes.
func (s *Server) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	const setting = "volume-attach-limit"
	limit := api.Settings[setting]
	set := &api.Setting{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: setting}, set); err == nil {
		limit = set.Value
	} else if !apierrors.IsNotFound(err) {
		return nil, api.Explain(err, "read setting %s", setting)
	}
	n, err := strconv.ParseInt(limit, 10, 64)
	if err != nil || n < 0 {
		if n, err = strconv.ParseInt(api.Settings[setting], 10, 64); err != nil {
			return nil, api.Errorf(api.Other, "the default of setting %s: %w", setting, err)
		}
	}
	return &csi.NodeGetInfoResponse{
		NodeId:             s.name,
		MaxVolumesPerNode:  n,
		AccessibleTopology: &csi.Topology{Segments: map[string]string{api.TopologyNode: s.name}},
	}, nil
}

// lockVolume waits until no other call works on the volume. Two at once could make two file systems.
func (s *Server) lockVolume(ctx context.Context, id string) (unlock func(), err error) {
	unlock, err = s.volumes.Acquire(ctx, id, semaphore.Limit(1))
	if err != nil {
		return nil, api.Errorf(api.Busy, "volume %s: another call is working on it", id)
	}
	return unlock, nil
}

// readVolume reads a volume by CSI id, which is the object's name.
func (s *Server) readVolume(ctx context.Context, id string) (*api.Volume, error) {
	if id == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	vol := &api.Volume{}
	err := apierrors.NewNotFound(api.GroupVersion.WithResource("volumes").GroupResource(), id)
	if len(validation.IsDNS1123Subdomain(id)) == 0 {
		if err := s.client.Get(ctx, client.ObjectKey{Name: id}, vol); !apierrors.IsNotFound(err) {
			return vol, api.Explain(err, "read volume %s", id)
		}
	}
	return nil, api.Errorf(api.NotFound, "volume %.80q does not exist: %w", id, err)
}

// awaitAttachment returns the volume's attachment to this node once the attachment's device exists.
func (s *Server) awaitAttachment(ctx context.Context, id string) (*api.Attachment, error) {
	msg := ""
	att, err := await.Until(ctx, s.client, id, func(a *api.Attachment) (bool, error) {
		if a.Spec.Node != s.name || a.DeletionTimestamp != nil {
			return false, api.Errorf(api.InUse, "the volume is attached to node %s, or is being detached", a.Spec.Node)
		}
		if msg = a.Status.Message; msg != "" {
			msg = " (" + msg + ")"
		}
		return a.Status.Ready && a.Status.Device != "", nil
	})
	if apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.InUse, "volume %s is not attached to node %s: publish it to the node first", id,
			s.name)
	}
	return att, api.Explain(err, "the device of volume %s on node %s%s", id, s.name, msg)
}

// checkPath wants an absolute path without ways up, fit for a system call.
func checkPath(what, p string) error {
	switch {
	case p == "":
		return api.Errorf(api.Invalid, "the request has no %s path", what)
	case !filepath.IsAbs(p) || strings.ContainsRune(p, 0) || filepath.Clean(p) == "/" || len(p) > 4095:
		return api.Errorf(api.Invalid, "%.200q cannot be a %s path: it must be absolute, and not the root", p, what)
	}
	for part := range strings.SplitSeq(p, "/") {
		if part == ".." {
			return api.Errorf(api.Invalid, "%.200q cannot be a %s path: it leads up", p, what)
		}
	}
	return nil
}

// checkCapability wants an access mode and type that a volume can have here.
func checkCapability(c *csi.VolumeCapability) error {
	if c == nil {
		return api.Errorf(api.Invalid, "the request has no volume capability")
	}
	switch m := c.GetAccessMode().GetMode(); m {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
	default:
		return api.Errorf(api.Invalid, "access mode %s is not supported", m)
	}
	if c.GetBlock() == nil && c.GetMount() == nil {
		return api.Errorf(api.Invalid, "the volume capability says neither block nor mount")
	}
	n := 0
	for _, f := range c.GetMount().GetMountFlags() {
		n += len(f)
		if f == "" || strings.ContainsAny(f, "\x00\n") {
			return api.Errorf(api.Invalid, "%.80q is not a mount flag", f)
		}
	}
	if n > 4096 {
		return api.Errorf(api.Invalid, "the mount flags have %d bytes, more than 4096", n)
	}
	return nil
}

// readerOnly reports whether the capability itself forbids writing.
func readerOnly(c *csi.VolumeCapability) bool {
	return c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
}
