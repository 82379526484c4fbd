package registry

import (
	"io"
	"net/http/httptest"
	"runtime"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/types"
)

// BenchmarkOpen reads a disk of 256 MiB, half noise, from a registry of this process. The benchmark also reports the
// allocated memory, which must not grow with the disk.
func BenchmarkOpen(b *testing.B) {
	body := make([]byte, 256<<20)
	for i := 0; i < len(body); i += 128 << 10 {
		copy(body[i:], noise(64<<10))
	}
	for _, how := range []string{"none", "gzip", "zstd"} {
		b.Run(how, func(b *testing.B) {
			w := newWorld(b, (*httptest.Server).Start)
			layer := w.blob("b", types.OCILayer, pack(b, how, disked(b, body)))
			w.manifest("b", "1", types.OCIManifestSchema1, image(types.OCIManifestSchema1, layer))
			b.SetBytes(int64(len(body)))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for b.Loop() {
				s, err := Open(b.Context(), w.ref("b:1"), quick)
				if err != nil {
					b.Fatal(err)
				}
				buf := make([]byte, 1<<20)
				if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, s, buf); err != nil {
					b.Fatal(err)
				}
				_ = s.Close()
			}
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/float64(b.N)/(1<<20), "MiB/op")
		})
	}
}
