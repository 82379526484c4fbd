package cli_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/pem"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

func TestImageImportReportsItsFailure(t *testing.T) {
	pen(t, "broken", func(i *api.BackingImage) {
		i.Status.State, i.Status.Message = api.ImageFailed, "SHA-512 is 12…, expected 34…"
	})
	url := "http://images.example/Broken.qcow2.xz"
	drover(t, kubeconfig("image", "import", url, "--name", "broken")...).
		mustSay(t, 1, `image "broken" failed: SHA-512 is 12`)
	// An import under the same name replaces the failed image.
	var before, after api.BackingImage
	if err := store.Get(t.Context(), client.ObjectKey{Name: "broken"}, &before); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("image", "import", url, "--name", "broken", "--background")...).mustSay(t, 0, "image show broken")
	if err := store.Get(t.Context(), client.ObjectKey{Name: "broken"}, &after); err != nil || after.UID == before.UID {
		t.Errorf("the failed image was not replaced: %v", err)
	}
	drover(t, kubeconfig("image", "import", url+".other", "--name", "broken", "--background")...).mustSay(t, 5, "already")
}

func TestImageImportSources(t *testing.T) {
	for _, c := range []struct {
		args []string
		name string
		want api.BackingImageSpec
	}{
		{[]string{"docker://h.example:5000/disks/fedora:42", "--secret", "logins/images", "--plain-http"}, "fedora",
			api.BackingImageSpec{SourceType: api.SourceRegistry,
				SourceParameters: map[string]string{"url": "docker://h.example:5000/disks/fedora:42", "plainHTTP": "true"},
				SecretRef:        &api.SecretRef{Namespace: "logins", Name: "images"}}},
		{[]string{"docker://h.example/a/b@sha256:" + strings.Repeat("0", 64)}, "b", api.BackingImageSpec{
			SourceType:       api.SourceRegistry,
			SourceParameters: map[string]string{"url": "docker://h.example/a/b@sha256:" + strings.Repeat("0", 64)}}},
		{[]string{"https://h.example/x.qcow2?sig=1", "--secret", "images"}, "x", api.BackingImageSpec{
			SourceType: api.SourceDownload, SourceParameters: map[string]string{"url": "https://h.example/x.qcow2?sig=1"},
			SecretRef: &api.SecretRef{Namespace: "default", Name: "images"}}},
	} {
		drover(t, kubeconfig(append([]string{"image", "import", "--background"}, c.args...)...)...).mustSay(t, 0, c.name)
		var img api.BackingImage
		if err := store.Get(t.Context(), client.ObjectKey{Name: c.name}, &img); err != nil {
			t.Fatal(err)
		}
		c.want.MinNumberOfCopies = 1
		if !equality.Semantic.DeepEqual(img.Spec, c.want) {
			t.Errorf("got %+v, want %+v", img.Spec, c.want)
		}
		if err := store.Delete(t.Context(), &img); err != nil {
			t.Fatal(err)
		}
	}
	for text, args := range map[string][]string{
		"write NAME":            {"https://h.example/x", "--secret", "a/b/c"},
		"for images of a regis": {"https://h.example/x", "--plain-http"},
		"a file needs none":     {"/etc/hostname", "--secret", "a"},
		"docker://HOST":         {"docker://h.example", "--name", "x"},
		"no address":            {"http:///x"},
		"the path of a file":    {"file:///etc/hostname"},
	} {
		drover(t, kubeconfig(append([]string{"image", "import"}, args...)...)...).mustSay(t, 2, text)
	}
}

func TestImageUploadStreamsTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "Golden_1.raw")
	sent := make([]byte, 3<<20)
	_, _ = rand.Read(sent)
	if err := os.WriteFile(file, sent, 0o600); err != nil {
		t.Fatal(err)
	}
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, err := io.ReadAll(r.Body)
		switch {
		case err != nil || r.Method != http.MethodPut || r.ContentLength != int64(len(sent)):
			http.Error(w, fmt.Sprint("wrong request: ", r.Method, r.ContentLength, err), http.StatusBadRequest)
		case string(got) != string(sent):
			http.Error(w, "other bytes", http.StatusBadRequest)
		default:
			if err := status(t.Context(), "golden-1", func(i *api.BackingImage) {
				i.Status.State, i.Status.Format, i.Status.VirtualSize, i.Status.Size = api.ImageReady, "raw", 3<<20, 3<<20
			}); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
			}
		}
	}))
	defer node.Close()
	cp := copyAsking(t, "golden-1", node.URL+"/upload")
	r := drover(t, kubeconfig("image", "upload", file)...)
	r.mustSay(t, 0, `image "golden-1" ready: raw, 3 MiB virtual`, "sending, 100 %, 3 MiB of 3 MiB")
	var img api.BackingImage
	if err := store.Get(t.Context(), client.ObjectKey{Name: "golden-1"}, &img); err != nil ||
		img.Spec.SourceParameters["size"] != "3145728" {
		t.Errorf("%v, %+v", err, img.Spec)
	}
	if err := store.Delete(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
}

// TestImageUploadIsContinued: the connection is cut twice, and the node has a certificate authority of its own. The
// command does not send received bytes again.
func TestImageUploadIsContinued(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cut.raw")
	sent := make([]byte, 6<<20)
	_, _ = rand.Read(sent)
	if err := os.WriteFile(file, sent, 0o600); err != nil {
		t.Fatal(err)
	}
	var got []byte
	puts := 0
	node := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			fmt.Fprintf(w, `{"offset":%d,"crc32c":%d}`, len(got), crc32.Checksum(got, crc32.MakeTable(crc32.Castagnoli)))
			return
		}
		puts++
		if want := fmt.Sprintf("bytes %d-%d/%d", len(got), len(sent)-1, len(sent)); puts > 1 &&
			r.Header.Get("Content-Range") != want {
			t.Errorf("range %q, want %q", r.Header.Get("Content-Range"), want)
		}
		b, _ := io.ReadAll(io.LimitReader(r.Body, 2<<20))
		if got = append(got, b...); puts < 3 {
			panic(http.ErrAbortHandler)
		}
		if err := status(t.Context(), "cut", func(i *api.BackingImage) {
			i.Status.State, i.Status.Format, i.Status.VirtualSize, i.Status.Size = api.ImageReady, "raw", 6<<20, 6<<20
		}); err != nil {
			t.Error(err)
		}
	}))
	node.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer node.Close()
	cp := copyAsking(t, "cut", node.URL)
	cp.Status.UploadCA = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: node.Certificate().Raw}))
	if err := store.Status().Update(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("image", "upload", file)...).mustSay(t, 0, `image "cut" ready`)
	if !bytes.Equal(got, sent) || puts != 3 {
		t.Errorf("%d bytes came in %d requests", len(got), puts)
	}
	if err := store.Delete(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
}

// TestImageUploadThroughTheAPI: the command reaches a distant node through the API server, which knows the node's
// authority.
func TestImageUploadThroughTheAPI(t *testing.T) {
	file := filepath.Join(t.TempDir(), "far.raw")
	sent := make([]byte, 3<<20)
	_, _ = rand.Read(sent)
	if err := os.WriteFile(file, sent, 0o600); err != nil {
		t.Fatal(err)
	}
	var direct atomic.Int32
	node := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !r.Close { // a forwarded request has a connection of its own
			direct.Add(1)
			panic(http.ErrAbortHandler)
		}
		if r.Method == http.MethodGet {
			fmt.Fprint(w, `{"offset":0,"crc32c":0}`)
			return
		}
		if got, err := io.ReadAll(r.Body); err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%d bytes came, %v", len(got), err)
		}
		if err := status(t.Context(), "far", func(i *api.BackingImage) {
			i.Status.State, i.Status.Format, i.Status.VirtualSize, i.Status.Size = api.ImageReady, "raw", 3<<20, 3<<20
		}); err != nil {
			t.Error(err)
		}
	}))
	node.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer node.Close()
	cp := copyAsking(t, "far", node.URL)
	cp.Status.UploadCA = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: node.Certificate().Raw}))
	if err := store.Status().Update(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("image", "upload", file)...).mustSay(t, 0, `image "far" ready`)
	if direct.Load() == 0 {
		t.Error("the node's own address was not tried")
	}
	if err := store.Delete(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
}

// TestImageUploadOfAnotherFile: the command does not continue another file's upload.
func TestImageUploadOfAnotherFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "other.raw")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			w.WriteHeader(http.StatusConflict)
		}
		_, _ = io.WriteString(w, `{"message":"65536 bytes came before","offset":65536,"crc32c":7}`)
	}))
	defer node.Close()
	cp := copyAsking(t, "other", node.URL)
	drover(t, kubeconfig("image", "upload", file)...).mustSay(t, 5, "64 KiB of another file")
	if err := store.Delete(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
}

func TestImageUploadRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bad.img")
	if err := os.WriteFile(file, []byte("not much of an image"), 0o600); err != nil {
		t.Fatal(err)
	}
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "the qcow2 header is cut short", http.StatusUnprocessableEntity)
	}))
	defer node.Close()
	copyAsking(t, "bad", node.URL)
	drover(t, kubeconfig("image", "upload", file)...).mustSay(t, 1, "refuses the upload", "the qcow2 header is cut short")
}

// TestImageShowTellsBytes: image show prints the progress of a copy in percent and in bytes.
func TestImageShowTellsBytes(t *testing.T) {
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceUpload}}
	img.Name = "half-there"
	if err := store.Create(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Delete(context.Background(), img) })
	cp := copyAsking(t, img.Name, "")
	t.Cleanup(func() { _ = store.Delete(context.Background(), cp) })
	img.Status.UUID, img.Status.State = cp.Spec.UUID, api.ImageInProgress
	img.Status.Copies = []api.ImageCopySummary{{Disk: cp.Spec.Disk, Node: "here", State: api.ImageInProgress, Progress: 45,
		LastUsed: metav1.Now()}}
	if err := store.Status().Update(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	cp.Status.State = api.ImageInProgress
	for total, want := range map[int64]string{200 << 20: "45%, 90 MiB of 200 MiB", 0: "45%, 90 MiB "} {
		cp.Status.BytesDone, cp.Status.BytesTotal = 90<<20, total
		if err := store.Status().Update(t.Context(), cp); err != nil {
			t.Fatal(err)
		}
		r := drover(t, kubeconfig("image", "show", img.Name)...)
		r.mustSay(t, 0, want)
		if strings.Contains(r.out, "not for") {
			t.Errorf("a copy that is not there yet is told as unused:\n%s", r.out)
		}
	}
}

// copyAsking creates an image copy on a disk, which waits for an upload at a URL.
func copyAsking(t *testing.T, image, url string) *api.ImageCopy {
	t.Helper()
	cp := &api.ImageCopy{Spec: api.ImageCopySpec{Image: image, UUID: api.NewUID(), Layers: []api.UID{api.NewUID()},
		Node: "here", Disk: api.NewUID()}}
	cp.Name = image + ".x"
	cp.Labels = map[string]string{api.LabelImage: image}
	if err := store.Create(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
	cp.Status.State, cp.Status.UploadURL = api.ImageStarting, url
	if err := store.Status().Update(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
	return cp
}

func TestDiskRefusedIsTakenBack(t *testing.T) {
	n := &api.Node{}
	n.Name = "disks"
	if err := store.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Delete(context.Background(), n) })
	n.Status.Heartbeat = metav1.NewTime(time.Now().Add(time.Hour)) // the node is alive
	n.Status.Disks = []api.DiskStatus{
		{Path: "/bad", Message: "zeros are not kept as data here"}, {Path: "/good", Ready: true, FSType: "xfs", UID: api.NewUID()}}
	if err := store.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("disk", "add", "/bad", "--node", "disks")...).mustSay(t, 2, "refuses /bad", "zeros are not kept")
	drover(t, kubeconfig("disk", "add", "/good", "--node", "disks", "--tags", "ssd,fast")...).mustSay(t, 0, "added", "xfs")
	drover(t, kubeconfig("disk", "list", "-o", "name")...).mustSay(t, 0, "disks:/good\n")
	var got api.Node
	if err := store.Get(t.Context(), client.ObjectKey{Name: "disks"}, &got); err != nil || len(got.Spec.Disks) != 1 {
		t.Errorf("%v, disks: %+v", err, got.Spec.Disks)
	}
	drover(t, kubeconfig("disk", "evict", "/good")...).mustSay(t, 0, "takes no new replicas and images; it is empty")
	drover(t, kubeconfig("disk", "evict", "disks:/good", "-o", "name")...).mustSay(t, 0, "disks:/good\n")
	rep := &api.Replica{Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "holder", Node: "disks", Disk: n.Status.Disks[1].UID}}
	rep.Name, rep.Labels = "holder.1", map[string]string{api.LabelDisk: string(n.Status.Disks[1].UID)}
	if err := store.Create(t.Context(), rep); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("disk", "list")...).mustSay(t, 0, "being evicted; on it: volume holder")
	drover(t, kubeconfig("disk", "evict", "disks:/good")...).mustSay(t, 0, "volume holder. Replicas move")
	drover(t, kubeconfig("disk", "remove", "/good")...).mustSay(t, 5, "volume holder")
	// disk remove refuses a dead disk, unless other disks have the content, too.
	holder := &api.Volume{Spec: api.VolumeSpec{Size: 1 << 30}}
	holder.Name = "holder"
	if err := store.Create(t.Context(), holder); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Delete(context.Background(), holder) })
	for _, members := range [][]string{nil, {"holder.2", "holder.1"}, {"holder.2"}} { // holder.2 has no Replica object
		holder.Status.Members = members
		if err := store.Status().Update(t.Context(), holder); err != nil {
			t.Fatal(err)
		}
		if _, err := await.EditStatus(t.Context(), store, "disks", func(n *api.Node) (bool, error) {
			n.Status.Disks[1].Ready = false
			return true, nil
		}); err != nil {
			t.Fatal(err)
		}
		drover(t, kubeconfig("disk", "remove", "/good")...).mustSay(t, 5, "not ready", "volume holder", "evict")
	}
	if err := store.Delete(t.Context(), rep); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("disk", "list")...).mustSay(t, 0, "being evicted; it is empty")
	drover(t, kubeconfig("disk", "remove", "/good")...).mustSay(t, 0, "removed")
}

// TestImageShowTellsOfWhichVolume: image show names the volume of an exported image.
func TestImageShowTellsOfWhichVolume(t *testing.T) {
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceExport,
		SourceParameters: map[string]string{"volume-name": "vm-1", "snapshot-name": "monday"}}}
	img.Name = "of-a-volume"
	if err := store.Create(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Delete(context.Background(), img) })
	drover(t, kubeconfig("image", "show", img.Name)...).mustSay(t, 0, "export-from-volume vm-1 monday")
}
