// Package controller is the CSI Controller door: the server translates requests into objects of
// storage.drover.io/v1alpha1 and waits, by watching, until the reconcilers of the rooms have carried the objects out.
// The package holds no storage logic and no state but a mutex: every call is idempotent by the object that the call
// creates or verifies, so that a repeated call, also to another instance or after a restart, joins the work instead
// of doing the work twice.
//
// Errors are api errors; the driver's table turns their kinds into gRPC codes. The package starts no goroutines.
package controller

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// annotationName keeps the requested name of a volume, where the object has another name.
const annotationName = "drover.io/csi-name"

const (
	waitDefault = 2 * time.Minute // for callers that set no deadline
	nameLimit   = 128             // bytes of a name, as CSI limits strings
)

// Server answers the Controller RPCs.
type Server struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	client client.WithWatch
	events events.EventRecorder
	// attach makes counting a node's attachments and adding an attachment a single step, so that the limit holds.
	attach sync.Mutex
}

// New makes the door. The client must read from the API server, not from a cache: the door reads objects just after
// writing.
func New(c client.WithWatch, e events.EventRecorder) *Server { return &Server{client: c, events: e} }

// ControllerGetCapabilities lists what the Controller RPCs can do.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (
	*csi.ControllerGetCapabilitiesResponse, error) {
	res := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
		csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	} {
		res.Capabilities = append(res.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}})
	}
	return res, nil
}

// objectName is the name of the object for a name given by a user: the same name where it is safe as an object's
// name, a label's value and a device's name; else a hash of the name.
func objectName(name string) string {
	if len(validation.IsDNS1123Label(name)) == 0 {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return "vol-" + hex.EncodeToString(sum[:16])
}

// checkName refuses names that CSI forbids.
func checkName(name string) error {
	if name == "" {
		return api.Errorf(api.Invalid, "the volume needs a name")
	}
	if len(name) > nameLimit {
		return api.Errorf(api.Invalid, "the volume's name has %d bytes, more than the %d that CSI allows", len(name),
			nameLimit)
	}
	if !utf8.ValidString(name) {
		return api.Errorf(api.Invalid, "the volume's name is not UTF-8")
	}
	for _, r := range name {
		if r <= 8 || r == 0x0b || r == 0x0c || (r >= 0x0e && r <= 0x1f) || (r >= 0x7f && r <= 0x9f) {
			return api.Errorf(api.Invalid, "the volume's name holds the control character %U", r)
		}
	}
	return nil
}

// readVolume reads a volume by CSI id, which is the object's name. An id that no object can have names no volume.
func (s *Server) readVolume(ctx context.Context, id string) (*api.Volume, error) {
	if id == "" {
		return nil, api.Errorf(api.Invalid, "the request names no volume")
	}
	if !validID(id) {
		return nil, api.Errorf(api.NotFound, "volume %.80q does not exist", id)
	}
	vol := &api.Volume{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: id}, vol); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, api.Errorf(api.NotFound, "volume %s does not exist", id)
		}
		return nil, api.Explain(err, "read volume %s", id)
	}
	if isKept(vol) {
		return nil, api.Errorf(api.NotFound, "volume %s is deleted; it is kept until its last snapshot is deleted", id)
	}
	return vol, nil
}

func validID(id string) bool { return len(validation.IsDNS1123Subdomain(id)) == 0 }

// readSetting returns the value of a cluster-wide setting, or the setting's default.
func (s *Server) readSetting(ctx context.Context, name string) (string, error) {
	set := &api.Setting{}
	if err := s.client.Get(ctx, client.ObjectKey{Name: name}, set); err != nil {
		if apierrors.IsNotFound(err) {
			return api.Settings[name], nil
		}
		return "", api.Explain(err, "read setting %s", name)
	}
	return set.Value, nil
}

// readNumber returns a setting as a number; a setting that is no number counts as its default.
func (s *Server) readNumber(ctx context.Context, name string) (int64, error) {
	v, err := s.readSetting(ctx, name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return strconv.ParseInt(api.Settings[name], 10, 64)
	}
	return n, nil
}
