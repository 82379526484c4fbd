package driver

import (
	"cmp"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
)

// TestServeOptionsRefused: serve refuses impossible options before any change, and names the flag.
func TestServeOptionsRefused(t *testing.T) {
	for _, c := range []struct {
		o    serveOptions
		says string
	}{
		{serveOptions{roles: []string{"boss"}}, "--roles"},
		{serveOptions{node: "My Machine"}, "--node-name"},
		{serveOptions{node: "under_score"}, "--node-name"},
		{serveOptions{diskFlags: []string{"disk"}}, "absolute"},
		{serveOptions{diskFlags: []string{"/a", "/a/,ssd"}}, "named twice"},
		{serveOptions{metrics: "everywhere"}, "--metrics-listen"},
		{serveOptions{address: "here"}, "--node-address"},
		{serveOptions{heartbeat: time.Millisecond}, "--heartbeat"},
	} {
		o := c.o
		if o.roles == nil {
			o.roles = []string{roleController, roleNode, roleData}
		}
		if o.metrics == "" {
			o.metrics = "off"
		}
		o.stateDir, o.upload, o.heartbeat = t.TempDir(), "127.0.0.1:0", cmp.Or(o.heartbeat, api.DefaultHeartbeat)
		if err := o.checkOptions(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want words of %s", c.o, err, c.says)
		}
	}
	fine := serveOptions{roles: []string{roleController}, node: "vm-1.example", stateDir: t.TempDir(), metrics: "off",
		upload: "127.0.0.1:0", heartbeat: api.DefaultHeartbeat}
	if err := fine.checkOptions(); err != nil {
		t.Error(err)
	}
}

// TestServeEndpoint: the socket comes from the flag, else from the orchestrator, else from the state folder.
func TestServeEndpoint(t *testing.T) {
	state := t.TempDir()
	for _, c := range []struct{ flag, env, want string }{
		{"", "", "unix://" + state + "/csi.sock"},
		{"", "unix:///csi/csi.sock", "unix:///csi/csi.sock"},
		{"unix:///a.sock", "unix:///csi/csi.sock", "unix:///a.sock"},
	} {
		t.Setenv("CSI_ENDPOINT", c.env)
		o := serveOptions{roles: []string{roleController}, csi: c.flag, node: "vm", stateDir: state, metrics: "off",
			upload: "127.0.0.1:0", heartbeat: api.DefaultHeartbeat}
		if err := o.checkOptions(); err != nil || o.csi != c.want {
			t.Errorf("--csi-endpoint %q, CSI_ENDPOINT %q: %q, %v", c.flag, c.env, o.csi, err)
		}
	}
}
