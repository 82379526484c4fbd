package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// pattern is an image whose bytes follow from their offsets.
type pattern struct{ size, at int64 }

func (p *pattern) Read(b []byte) (int, error) {
	if p.at >= p.size {
		return 0, io.EOF
	}
	n := min(int64(len(b)), p.size-p.at)
	fillPattern(b[:n], p.at)
	p.at += n
	return int(n), nil
}

func fillPattern(b []byte, off int64) {
	for i := range b {
		at := off + int64(i)
		b[i] = byte(at>>12)*31 ^ byte(at>>20)*17 ^ byte(at*7)
	}
}

func (p *pattern) Seek(off int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		off += p.at
	case io.SeekEnd:
		off += p.size
	}
	p.at = off
	return off, nil
}

// servePattern serves an image over HTTP and returns the URL.
func servePattern(t *testing.T, c *Cluster, size int64) string {
	t.Helper()
	ln, err := net.Listen("tcp", c.OwnerIP()+":0")
	must(t, err)
	src := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.ServeContent(w, r, "golden.img", time.Time{}, &pattern{size: size})
	}))
	src.Listener = ln
	src.Start()
	t.Cleanup(src.Close)
	return src.URL + "/golden.img"
}

// checkPattern reads a part of a device.
func checkPattern(t *testing.T, device string, off, n int64) {
	t.Helper()
	f, err := os.Open(device)
	must(t, err)
	got, want := make([]byte, n), make([]byte, n)
	_, err = f.ReadAt(got, off)
	must(t, errors.Join(err, f.Close()))
	fillPattern(want, off)
	if !bytes.Equal(got, want) {
		t.Fatalf("%s does not hold the image at %d", device, off)
	}
}

// TestImageAtOnce: a volume on a node without the image is attached at once, and reads from the node with a copy,
// through kills, until its own node has a copy. DROVER_IMAGE is the size of the image in MiB, and makes the test
// check the times.
func TestImageAtOnce(t *testing.T) {
	size := int64(256) << 20
	text := os.Getenv("DROVER_IMAGE")
	measured := text != ""
	if measured {
		n, err := strconv.ParseInt(text, 10, 64)
		must(t, err)
		size = n << 20
	}
	c := startAlone(t, Options{Nodes: 2})
	c.command(t, "image", "import", servePattern(t, c, size), "--name", "golden")
	img := ready(t, c, "golden", 1)
	has, bare := c.Nodes[0], c.Nodes[1]
	if img.Status.Copies[0].Node == bare.Name {
		has, bare = bare, has
	}
	if size <= 256<<20 { // a long way between the nodes: a copy of the image takes time
		c.Net.Between(has, bare, Link{Delay: 40 * time.Millisecond})
	}

	began := time.Now()
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, BackingImage: "golden", Nodes: []string{bare.Name}}}
	v.Name = "v"
	must(t, c.Objects.Create(t.Context(), v))
	awaitVolume(t, c, "v", "made", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	made := time.Since(began)
	c.attach(t, "v", bare.Name)
	attached := time.Since(began)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &a))
	checkPattern(t, a.Status.Device, size/2+12345*4096%(1<<20), 64<<10)
	read := time.Since(began)
	state := func() string {
		var list api.ImageCopyList
		must(t, c.Objects.List(t.Context(), &list))
		for _, x := range list.Items {
			if x.Spec.Node == bare.Name {
				return fmt.Sprintf("%s %d %%", x.Status.State, x.Status.Progress)
			}
		}
		return "not begun"
	}
	now := state()
	seen := time.Since(began)
	t.Logf("image of %d MiB: volume made after %v, attached after %v, first read after %v; the node's own copy then: %s",
		size>>20, made, attached, read, now)
	const most = 1500 * time.Millisecond // on an idle machine
	if attached > most && measured {
		t.Errorf("it took %v to attach the volume", attached)
	}
	if seen < most && now == "ready 100 %" {
		t.Error("the copy was there already: nothing was shown")
	}
	must(t, bare.Kill("data"))
	checkPattern(t, a.Status.Device, 0, 8<<20)
	must(t, has.Kill("serve")) // serve serves the image
	has.Gone()
	must(t, has.Serve(t.Context()))
	checkPattern(t, a.Status.Device, size-(8<<20), 8<<20)
	ready(t, c, "golden", 2)
	t.Logf("the node's own copy is there after %v", time.Since(began))

	// Then the volume needs the other node no more.
	eventually(t, "the volume reads its own copy", func() bool {
		var list api.ReplicaList
		must(t, c.Objects.List(t.Context(), &list))
		return len(list.Items) == 1 && list.Items[0].Status.Message == ""
	})
	must(t, has.PowerOff())
	for off := int64(0); off < size; off += 16 << 20 {
		checkPattern(t, a.Status.Device, off, min(16<<20, size-off))
	}
	c.detach(t, "v")
}
