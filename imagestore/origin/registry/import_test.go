package registry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/types"

	"drover.io/drover/api"
	images "drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
	"drover.io/drover/replicas/stack"
)

// TestImport imports from a registry to a layer on a disk: a raw file, a qcow2 file, and a blob with a wrong byte at
// the very end.
func TestImport(t *testing.T) {
	dir := t.TempDir()
	raw := append(noise(4<<20), make([]byte, 12<<20)...)
	if err := os.WriteFile(filepath.Join(dir, "raw"), raw, 0o644); err != nil {
		t.Fatal(err)
	}
	run(t, dir, "qemu-img", "convert", "-c", "-O", "qcow2", "raw", "qcow2")
	on, err := stack.Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := on.Close(); err != nil {
			t.Error(err)
		}
	})
	w := plainWorld(t)
	bring := func(body []byte) (images.Spec, error) {
		layer := append(disked(t, body), make([]byte, 8<<10)...)
		w.manifest("i", "1", types.OCIManifestSchema1, image(types.OCIManifestSchema1,
			w.blob("i", types.OCIUncompressedLayer, layer)))
		want := images.Spec{UID: api.NewUID(), Name: "golden", Layers: []api.UID{api.NewUID()}}
		_, err := images.Import(t.Context(), on, want, &images.Progress{},
			func(ctx context.Context) (*origin.Stream, error) { return Open(ctx, w.ref("i:1"), quick) })
		return want, err
	}
	for format, body := range map[string][]byte{"raw": raw, "qcow2": load(t, dir, "qcow2")} {
		t.Run(format, func(t *testing.T) {
			w.door = nil
			want, err := bring(body)
			if err != nil {
				t.Fatal(err)
			}
			got, err := images.Find(on, want)
			if err != nil || got.Format != format || got.VirtualSize != int64(len(raw)) {
				t.Fatalf("got %+v: %v", got, err)
			}
			src, err := on.Open(string(want.Layers[0]))
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			b := make([]byte, len(raw))
			if _, err := src.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(b, raw) {
				t.Fatalf("the layer holds something else: %v", err)
			}

			// The last byte of the blob is wrong, in the padding behind the disk.
			w.door = func(rw http.ResponseWriter, r *http.Request, next http.Handler) {
				if isBlob(r) {
					rw = &flipper{rw, len(disked(t, body)) + 8<<10 - 1}
				}
				next.ServeHTTP(rw, r)
			}
			want, err = bring(body)
			fails(t, err, api.Corrupt, "sent other bytes")
			if _, err := images.Find(on, want); !api.Is(err, api.NotFound) {
				t.Fatalf("it is on the disk all the same: %v", err)
			}
			if _, err := on.Open(string(want.Layers[0])); err == nil {
				t.Fatal("its layer is on the disk all the same")
			}
		})
	}
}
