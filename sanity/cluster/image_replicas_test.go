package cluster

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// Places in the image of TestReplicasOfAnImage: nothing where the load writes, then a pattern, then nothing.
const sparseFrom, sparseTo, sparseSize = int64(16 << 20), int64(32 << 20), int64(256 << 20)

// serveSparse serves the image over HTTP and returns the URL.
func serveSparse(t *testing.T, c *Cluster) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "golden.img")
	f, err := os.Create(path)
	must(t, err)
	b := make([]byte, sparseTo-sparseFrom)
	fillPattern(b, sparseFrom)
	_, err = f.WriteAt(b, sparseFrom)
	must(t, err)
	must(t, f.Truncate(sparseSize))
	must(t, f.Close())
	ln, err := net.Listen("tcp", c.OwnerIP()+":0")
	must(t, err)
	src := httptest.NewUnstartedServer(http.FileServer(http.Dir(filepath.Dir(path))))
	src.Listener = ln
	src.Start()
	t.Cleanup(src.Close)
	return src.URL + "/golden.img"
}

// TestReplicasOfAnImage: a replica of a volume with an image is lost, and another replica is placed on a node without
// the image: the image is copied there, as sparse as before, and with the same checksum. Both members crash at once,
// and the volume continues; all current replicas are lost, and a salvage takes a stale replica, over its image.
func TestReplicasOfAnImage(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	n := c.Nodes
	c.command(t, "image", "import", serveSparse(t, c), "--name", "golden")
	sum := ready(t, c, "golden", 1).Status.Checksum
	l := on(t, c, "v", func(s *api.VolumeSpec) { s.BackingImage, s.Size = "golden", sparseSize }, n[0], n[1])
	l.load = NewLoad(sparseSize, sparseFrom)
	sparse := func(m *Machine) {
		t.Helper()
		files, err := filepath.Glob(m.Disks[0].View("layers", "*", "data"))
		must(t, err)
		whole := 0
		for _, f := range files {
			var st syscall.Stat_t
			must(t, syscall.Stat(f, &st))
			if st.Size == sparseSize {
				whole++
				if st.Blocks*512 > sparseTo-sparseFrom+(2<<20) {
					t.Errorf("%s takes %d bytes on %s", f, st.Blocks*512, m.Name)
				}
			}
		}
		if whole == 0 {
			t.Errorf("%s has no layer of the image: %v", m.Name, files)
		}
	}
	holds := func() {
		t.Helper()
		checkPattern(t, l.device, sparseFrom, sparseTo-sparseFrom)
	}
	l.attach(n[0])
	holds()
	l.works(100)

	// A node of two is lost for good.
	must(t, c.Set(t.Context(), "replica-replenishment-wait-interval", "1"))
	must(t, n[1].PowerOff())
	eventually(t, "another replica takes its place, with the image", func() bool {
		var v api.Volume
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &v))
		r, is := replicasOf(t, c, "v")[n[2].Name]
		return is && len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy && r.Status.Message == ""
	})
	must(t, c.Set(t.Context(), "replica-replenishment-wait-interval", "600")) // a slow node is not lost
	l.works(50)
	l.halt()
	holds()
	c.detach(t, "v")
	img := ready(t, c, "golden", 2)
	if img.Status.Checksum != sum || sum == "" {
		t.Errorf("the checksum was %q and is %q", sum, img.Status.Checksum)
	}
	sparse(n[0])
	sparse(n[2])
	l.attach(n[2])
	holds()
	l.works(50)
	l.halt()
	c.detach(t, "v")
	must(t, n[1].PowerOn())
	must(t, n[1].Serve(t.Context()))
	settled(t, c, "v", n[0].Name, n[2].Name)

	// Both members crash at once, and the machines keep running: the volume continues.
	l.attach(n[1])
	l.works(50)
	must(t, n[0].Kill("data"))
	must(t, n[2].Kill("data"))
	l.works(50)
	settled(t, c, "v", n[0].Name, n[2].Name)
	l.halt()
	holds()

	// All current replicas are lost: a salvage takes the stale replica.
	must(t, c.Set(t.Context(), "all-replicas-lost-timeout", "2"))
	mark := l.load.Mark()
	must(t, n[0].PowerOff())
	awaitVolume(t, c, "v", "degraded", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	l.begin()
	l.works(50)
	must(t, n[2].PowerOff())
	if err := <-l.ended; err == nil {
		t.Fatal("I/O went on without a replica")
	}
	l.stop()
	c.command(t, "volume", "detach", "v", "--force")
	must(t, n[0].PowerOn())
	must(t, n[0].Serve(t.Context()))
	old := replicasOf(t, c, "v")[n[0].Name].Name
	eventually(t, "the old replica is proposed", func() bool {
		return strings.Contains(c.command(t, "volume", "salvage", "v"), "--replica "+old+" --yes")
	})
	c.command(t, "volume", "salvage", "v", "--replica", old, "--yes")
	c.attach(t, "v", n[1].Name)
	l.device = deviceOf(t, c, "v")
	l.load.Rewind(mark)
	must(t, l.load.Verify(l.device, true))
	holds()
	l.begin()
	l.works(50)
	l.halt()
	c.detach(t, "v")
}
