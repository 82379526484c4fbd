package cluster

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestImageSync: the image reports a failed copy from another node, with the reason, and the copy is tried again
// until success; an image deleted during a copy leaves nothing behind.
func TestImageSync(t *testing.T) {
	c := start(t, Options{Nodes: 2})
	has, bare := c.Nodes[0], c.Nodes[1]
	c.command(t, "image", "import", servePattern(t, c, 64<<20), "--name", "golden")
	if ready(t, c, "golden", 1).Status.Copies[0].Node == bare.Name {
		has, bare = bare, has
	}
	copyThere := func(image string) (found api.ImageCopy) {
		var list api.ImageCopyList
		must(t, c.Objects.List(t.Context(), &list))
		i := slices.IndexFunc(list.Items, func(x api.ImageCopy) bool {
			return x.Spec.Image == image && x.Spec.Node == bare.Name
		})
		if i >= 0 {
			found = list.Items[i]
		}
		return found
	}
	layers := bare.Disks[0].View("layers")
	must(t, setImmutable(layers, true))
	t.Cleanup(func() { _ = setImmutable(layers, false) })
	var img api.BackingImage
	img.Name = "golden"
	edit(t, c, &img, func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 2 })
	eventually(t, "the copy has failed more than once, and says why", func() bool {
		st := copyThere("golden").Status
		return st.Attempts > 1 && strings.Contains(st.Message, "not permitted")
	})
	eventually(t, "the image says so", func() bool {
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "golden"}, &img))
		return slices.ContainsFunc(img.Status.Copies, func(s api.ImageCopySummary) bool {
			return s.Node == bare.Name && strings.Contains(s.Message, "not permitted")
		})
	})
	if img.Status.State != api.ImageReady {
		t.Errorf("an image with a good copy is %s", img.Status.State)
	}
	must(t, setImmutable(layers, false))
	ready(t, c, "golden", 2)
	eventually(t, "nothing is left of the failures", func() bool {
		st := copyThere("golden").Status
		return st.Attempts == 0 && st.Message == ""
	})
	files := func(m *Machine) (names []string) {
		for _, dir := range []string{"layers", "images", "hydrating"} {
			list, err := os.ReadDir(m.Disks[0].View(dir))
			if !os.IsNotExist(err) {
				must(t, err)
			}
			for _, e := range list {
				names = append(names, dir+"/"+e.Name())
			}
		}
		return names
	}
	c.command(t, "image", "delete", "golden")
	for _, m := range c.Nodes {
		eventually(t, "nothing of the image is on "+m.Name, func() bool { return len(files(m)) == 0 })
	}

	// Deleted during the copy.
	c.command(t, "image", "import", servePattern(t, c, 512<<20), "--name", "large")
	if ready(t, c, "large", 1).Status.Copies[0].Node == bare.Name {
		has, bare = bare, has
	}
	c.Net.Between(has, bare, Link{Delay: 40 * time.Millisecond})
	img.Name = "large"
	edit(t, c, &img, func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 2 })
	eventually(t, "the copy is on its way", func() bool {
		st := copyThere("large").Status
		return st.Progress > 0 && st.Progress < 100
	})
	c.command(t, "image", "delete", "large")
	for _, m := range c.Nodes {
		eventually(t, "nothing of the image is on "+m.Name, func() bool { return len(files(m)) == 0 })
	}
}
