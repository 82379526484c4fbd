package cluster

import (
	"encoding/json"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/block/suite"
	"drover.io/drover/sanity/released"
)

// TestRollingUpgradeFromReleasedBinary upgrades a cluster of the released version as docs/operations.md says, the
// control machine first and then the nodes in turn, under verified load on a volume with three replicas: no I/O
// fails, while engine and members are of two versions, and the volume is healthy in the end, with the same content on
// all nodes.
func TestRollingUpgradeFromReleasedBinary(t *testing.T) {
	t.Parallel()
	suite.System(t)
	old := released.Binary(t)
	c, err := Start(t.Context(), Options{Binary: old, Nodes: 3, Off: true})
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, m := range c.Machines() {
				t.Log(m.LogTail())
			}
		}
		must(t, c.Close())
	})
	must(t, c.Control.Serve(t.Context(), "--roles", "controller", "--api-listen", c.Control.IP+":6443"))
	anyDisk(t, c)
	for _, m := range c.Nodes {
		must(t, m.Serve(t.Context(), "--roles", "node,data", "--kubeconfig", c.join(), "--heartbeat", "3s", "--disk",
			m.Disks[0].Path))
	}
	tells := func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), old, append(args, "--kubeconfig", c.Kubeconfig)...).Output()
		if err != nil {
			t.Logf("drover %s: %v", strings.Join(args, " "), err)
		}
		return string(out)
	}
	eventually(t, "three nodes are there", func() bool {
		var list struct{ Items []json.RawMessage }
		return json.Unmarshal([]byte(tells("node", "list", "-o", "json")), &list) == nil && len(list.Items) == 3
	})
	const size = 64 << 20
	tells("volume", "create", "v", "--size", "64Mi", "--replicas", "3")
	l := &loaded{t: t, c: c, name: "v", node: c.Nodes[0], load: NewLoad(size, 16<<20)}
	eventually(t, "the volume is attached", func() bool {
		l.device = regexp.MustCompile("/dev/loop[0-9]+").FindString(tells("volume", "attach", "v", "--node", l.node.Name))
		return l.device != ""
	})
	l.begin()
	l.works(100)

	c.opts.Binary = program
	for _, m := range c.Machines() {
		must(t, m.Stop())
		l.works(50)
		must(t, m.Serve(t.Context()))
		l.works(50)
	}
	must(t, c.connect())
	awaitVolume(t, c, "v", "healthy", whole)
	l.works(100)
	t.Logf("the longest wait of an I/O was %v", l.load.Worst().Round(time.Millisecond))
	l.halt()
	c.command(t, "volume", "detach", "v")
	for _, m := range c.Nodes {
		l.attach(m)
		l.halt()
		c.command(t, "volume", "detach", "v")
	}
}

// anyDisk makes the API server of a released version take any disk, however full, as Start does for the present
// version.
func anyDisk(t *testing.T, c *Cluster) {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	must(t, err)
	objects, err := client.New(cfg, client.Options{})
	must(t, err)
	kind, err := objects.RESTMapper().KindFor(schema.GroupVersionResource{Resource: "settings"})
	must(t, err)
	for name, value := range map[string]string{"storage-minimal-available-percentage": "0",
		"storage-over-provisioning-percentage": "100000"} {
		s := &unstructured.Unstructured{Object: map[string]any{"value": value}}
		s.SetGroupVersionKind(kind)
		s.SetName(name)
		must(t, objects.Create(t.Context(), s))
	}
}
