package imagestore_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// TestCopyMovesWithItsDisk: a copy moves with the disk to another node, and back, and counts as ready all the while.
func TestCopyMovesWithItsDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(1<<20, 3)
	w.image("golden", api.SourceFile, imageFile(t, b))
	w.state("golden", api.ImageReady)
	disk := api.UID(w.disks[0].UID())
	w.create(&api.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-0"}, Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: "/x"}}}})
	is := func(node string, ready bool) {
		t.Helper()
		if _, err := await.EditStatus(t.Context(), w.client, node, func(n *api.Node) (bool, error) {
			path := n.Spec.Disks[0].Path
			n.Status.Heartbeat = alive()
			n.Status.Disks = []api.DiskStatus{{Path: path, UID: disk, Ready: ready, Gone: !ready, Capacity: 100 << 30,
				Available: 50 << 30}}
			return true, nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	on := func(node string) func() bool {
		return func() bool {
			c := w.copies("golden")
			return len(c) == 1 && c[0].Spec.Node == node && c[0].Labels[api.LabelNode] == node
		}
	}
	is(w.node, false)
	is("node-0", true)
	w.eventually("the copy is on the other node", on("node-0"))
	w.state("golden", api.ImageReady)
	is("node-0", false)
	is(w.node, true)
	w.eventually("the copy is back", on(w.node))
	w.holds(0, w.state("golden", api.ImageReady), b)
}
