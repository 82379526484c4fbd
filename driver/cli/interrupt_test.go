package cli_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestImportInterrupted: Ctrl-C ends the command at once, but not the import on the node. The command says so, and how
// to end the import.
func TestImportInterrupted(t *testing.T) {
	ctx, interrupt := context.WithTimeout(t.Context(), 5*time.Minute)
	defer interrupt()
	done := make(chan result, 1)
	go func() {
		done <- droverIn(ctx, kubeconfig("image", "import", "http://h.example/slow.img", "--name", "slow")...)
	}()
	if err := created[*api.BackingImage](ctx, "slow"); err != nil {
		t.Fatal(err)
	}
	interrupt()
	r := <-done
	r.mustSay(t, 130, `image "slow" is made nevertheless`, "drover image show slow", "drover image delete slow")
	if strings.Contains(r.err, "context canceled") {
		t.Errorf("that is no language for people: %s", r.err)
	}
	var img api.BackingImage
	if err := store.Get(t.Context(), client.ObjectKey{Name: "slow"}, &img); err != nil || img.DeletionTimestamp != nil {
		t.Errorf("the image went with the command: %v", err)
	}
}

// TestUploadInterrupted: after Ctrl-C during an upload, the same command sends the rest and no received bytes.
func TestUploadInterrupted(t *testing.T) {
	file := filepath.Join(t.TempDir(), "halted.raw")
	sent := make([]byte, 8<<20)
	_, _ = rand.Read(sent)
	if err := os.WriteFile(file, sent, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, interrupt := context.WithTimeout(t.Context(), 5*time.Minute)
	defer interrupt()
	var got []byte
	ranges := make(chan string, 2)
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			fmt.Fprintf(w, `{"offset":%d,"crc32c":%d}`, len(got), crc32.Checksum(got, crc32.MakeTable(crc32.Castagnoli)))
			return
		}
		if got != nil && r.Header.Get("Content-Range") == "" {
			http.Error(w, `{"message":"there is something already"}`, http.StatusConflict)
			return
		}
		ranges <- r.Header.Get("Content-Range")
		if got == nil {
			got, _ = io.ReadAll(io.LimitReader(r.Body, 3<<20))
			interrupt()
			_, _ = io.Copy(io.Discard, r.Body) // until the command has let go
			panic(http.ErrAbortHandler)
		}
		b, err := io.ReadAll(r.Body)
		if got = append(got, b...); err != nil {
			t.Error(err)
		}
		if err := status(t.Context(), "halted", func(i *api.BackingImage) {
			i.Status.State, i.Status.Format, i.Status.VirtualSize, i.Status.Size = api.ImageReady, "raw", 8<<20, 8<<20
		}); err != nil {
			t.Error(err)
		}
	}))
	node.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer node.Close()
	cp := copyAsking(t, "halted", node.URL)
	droverIn(ctx, kubeconfig("image", "upload", file)...).
		mustSay(t, 130, "the same command sends the rest", "drover image delete halted")
	if first := within(t, "first request", ranges); first != "" && !strings.HasPrefix(first, "bytes 0-") {
		t.Errorf("the first request began with %q", first)
	}
	drover(t, kubeconfig("image", "upload", file)...).mustSay(t, 0, `image "halted" ready`)
	if want := fmt.Sprintf("bytes %d-%d/%d", 3<<20, len(sent)-1, len(sent)); within(t, "second request", ranges) != want {
		t.Errorf("the rest was not sent as %q", want)
	}
	if !bytes.Equal(got, sent) {
		t.Errorf("the node has %d bytes, and not those of the file", len(got))
	}
	if err := store.Delete(t.Context(), cp); err != nil {
		t.Fatal(err)
	}
}

// within returns the next value of a channel; a missing value ends the test under the given name.
func within[T any](t testing.TB, what string, from <-chan T) T {
	t.Helper()
	late := time.NewTimer(5 * time.Minute)
	defer late.Stop()
	select {
	case v := <-from:
		return v
	case <-late.C:
	}
	t.Fatal("no " + what)
	panic("not reached")
}
