package importer_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
	originhttp "drover.io/drover/imagestore/origin/http"
)

// asVMwareWrites makes of a streamOptimized image the output of a tool without knowledge of the end: each grain table
// behind the grains, then the directory and a footer.
func asVMwareWrites(b []byte) []byte {
	const sector, perTable = 512, 512
	grain := le.Uint64(b[20:]) * sector
	tables := (le.Uint64(b[12:])*sector + grain*perTable - 1) / (grain * perTable)
	text := le.Uint64(b[28:]) + le.Uint64(b[36:])
	out := bytes.Clone(b[:max(text, 1)*sector])
	pad := func() { out = append(out, make([]byte, -len(out)&(sector-1))...) }
	mark := func(sectors uint64, kind uint32) {
		m := make([]byte, sector)
		le.PutUint64(m, sectors)
		le.PutUint32(m[12:], kind)
		out = append(out, m...)
	}
	directory := make([]byte, tables*4)
	for t := range tables {
		table := bytes.Clone(b[uint64(le.Uint32(b[le.Uint64(b[56:])*sector+t*4:]))*sector:][:perTable*4])
		for i := range perTable {
			if at := uint64(le.Uint32(table[i*4:])); at > 1 {
				le.PutUint32(table[i*4:], uint32(len(out)/sector))
				out = append(out, b[at*sector:][:12+le.Uint32(b[at*sector+8:])]...)
				pad()
			}
		}
		mark(perTable*4/sector, 1)
		le.PutUint32(directory[t*4:], uint32(len(out)/sector))
		out = append(out, table...)
	}
	mark(uint64(len(directory)+sector-1)/sector, 2)
	at := uint64(len(out) / sector)
	out = append(out, directory...)
	pad()
	mark(1, 3)
	head := out[:sector]
	le.PutUint32(head[8:], le.Uint32(head[8:])&^2) // no redundant tables
	le.PutUint64(head[48:], 0)
	le.PutUint64(head[56:], at)
	out = append(out, head...)
	mark(0, 0)
	le.PutUint64(out[56:], 1<<64-1)
	return out
}

// ranged serves an image by ranges, and counts requests beside the stream. With lie, such requests get other bytes.
func ranged(t *testing.T, b []byte, lie func([]byte)) (url string, early *atomic.Int64) {
	t.Helper()
	early = new(atomic.Int64)
	lies := bytes.Clone(b)
	if lie != nil {
		lie(lies)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"one"`)
		body := b
		var from, to int
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err == nil && from%(8<<20) != 0 {
			early.Add(1)
			body = lies
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
	}))
	t.Cleanup(s.Close)
	return s.URL, early
}

// patient is download, for a busy machine.
func patient(url string) func(context.Context) (*origin.Stream, error) {
	return func(ctx context.Context) (*origin.Stream, error) {
		return originhttp.Open(ctx, url, originhttp.Options{Pause: time.Millisecond, Access: anywhere})
	}
}

// scratchOf is the size of the scratch file in MiB, from the notice.
func scratchOf(t *testing.T, p *importer.Progress) float64 {
	t.Helper()
	m := regexp.MustCompile(`up to (\S+) (MiB|KiB) of the disk`).FindStringSubmatch(p.Notice())
	if m == nil {
		t.Fatalf("notice %q", p.Notice())
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	if m[2] == "KiB" {
		n /= 1024
	}
	return n
}

// TestTablesAreReadEarly: from a server with ranges, the importer reads tables at the end of an image early, so the
// scratch file stays small. Without ranges, the scratch file takes most of the image.
func TestTablesAreReadEarly(t *testing.T) {
	suite.Slow(t)
	content := make([]byte, 150<<20)
	r := rand.NewChaCha8([32]byte{11})
	_, _ = r.Read(content[:70<<20])
	_, _ = r.Read(content[85<<20:])
	raw := sparseFile(t, content)
	image := filepath.Join(t.TempDir(), "image")
	command(t, "qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", raw, image)
	vmdk := asVMwareWrites(read(t, image))

	// A table at the end, as in an image which was made larger.
	qcow2 := read(t, qcow2File(t, content))
	l1, n := be.Uint64(qcow2[40:]), uint64(be.Uint32(qcow2[36:]))*8
	qcow2 = append(qcow2, make([]byte, -len(qcow2)&0xffff)...)
	be.PutUint64(qcow2[40:], uint64(len(qcow2)))
	qcow2 = append(append(qcow2, qcow2[l1:l1+n]...), make([]byte, 65536-n)...)

	dir := t.TempDir()
	d := newDisk(t, dir)
	for _, c := range []struct {
		name  string
		image []byte
		lie   func([]byte)
	}{
		{"vmdk", vmdk, func(b []byte) { b[len(b)-4*512] ^= 1 }}, // the directory
		{"qcow2", qcow2, func(b []byte) { b[len(b)-65536+5] ^= 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			url, early := ranged(t, c.image, nil)
			var p importer.Progress
			want := newWant()
			want.Checksum = sum(c.image)
			if _, err := importer.Import(t.Context(), d, want, &p, patient(url)); err != nil {
				t.Fatal(err)
			}
			holds(t, d, want, content)
			if err := importer.Remove(t.Context(), d, want); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d MiB, %d requests: %s", len(c.image)>>20, early.Load(), p.Notice())
			if n := early.Load(); n == 0 || n > 20 || !strings.Contains(p.Notice(), "were read before they came") {
				t.Errorf("%d requests for tables: %s", n, p.Notice())
			}
			if mib := scratchOf(t, &p); mib > 80 {
				t.Errorf("the scratch file took %g MiB", mib)
			}
		})
		t.Run(c.name+" without ranges", func(t *testing.T) {
			suite.Long(t)
			var p importer.Progress
			want := newWant()
			if _, err := importer.Import(t.Context(), d, want, &p, stream(c.image, true)); err != nil {
				t.Fatal(err)
			}
			holds(t, d, want, content)
			if err := importer.Remove(t.Context(), d, want); err != nil {
				t.Fatal(err)
			}
			if mib := scratchOf(t, &p); mib < 100 || strings.Contains(p.Notice(), "before") {
				t.Errorf("%s", p.Notice())
			}
		})
		// A server with other bytes for early requests: the importer removes the layer and tries again.
		t.Run(c.name+" of a liar", func(t *testing.T) {
			url, early := ranged(t, c.image, c.lie)
			want := newWant()
			want.Checksum = sum(c.image)
			_, err := importer.Import(t.Context(), d, want, new(importer.Progress), patient(url))
			if !origin.Changed(err) || !api.Is(err, api.Unavailable) || early.Load() == 0 {
				t.Errorf("after %d requests for tables: %v", early.Load(), err)
			}
			clean(t, dir)
		})
	}
}
