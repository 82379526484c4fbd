// Package identity is the CSI Identity door: it names the driver and its capabilities. The package holds no state and
// starts no goroutines; the function that New takes decides whether the process is ready.
package identity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"drover.io/drover/api"
)

// Server answers the Identity RPCs.
type Server struct {
	csi.UnimplementedIdentityServer
	version string
	ready   func() bool
}

// New makes the door. ready says whether the process can serve now; nil means always.
func New(version string, ready func() bool) *Server {
	if ready == nil {
		ready = func() bool { return true }
	}
	return &Server{version: version, ready: ready}
}

// GetPluginInfo names the driver.
func (s *Server) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: api.DriverName, VendorVersion: s.version}, nil
}

// Probe says whether the driver can serve now: not ready is an answer, not an error.
func (s *Server) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(s.ready())}, nil
}

// GetPluginCapabilities answers the same on every instance of a version, whatever the roles, as CSI demands.
func (s *Server) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (
	*csi.GetPluginCapabilitiesResponse, error) {
	service := func(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
		return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{
			Service: &csi.PluginCapability_Service{Type: t}}}
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE),
		service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE),
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS),
		service(csi.PluginCapability_Service_SNAPSHOT_ACCESSIBILITY_CONSTRAINTS),
		{Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{
			Type: csi.PluginCapability_VolumeExpansion_ONLINE}}},
	}}, nil
}
