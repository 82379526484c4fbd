package importer_test

import (
	"context"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
)

// TestScratchStaysSmall: converted bytes leave the scratch file, and the source waits for the conversion. For images
// made by tools, the file stays far below the size of the image, and the notice reports the size.
func TestScratchStaysSmall(t *testing.T) {
	suite.Slow(t)
	content := make([]byte, 96<<20)
	r := rand.NewChaCha8([32]byte{9})
	for i := 0; i < len(content); i += 4096 {
		_, _ = r.Read(content[i : i+3072]) // a quarter is zeros
	}
	raw := filepath.Join(t.TempDir(), "raw")
	if err := os.WriteFile(raw, content, 0o600); err != nil {
		t.Fatal(err)
	}
	d := newDisk(t, t.TempDir())
	for options, sized := range map[string]bool{
		"qcow2": true, "qcow2 -c -m 2": false, "qcow2 -c -o compression_type=zstd": true, "vhdx": true, "vmdk": true,
		"vpc -o force_size": true,
	} {
		image := filepath.Join(t.TempDir(), "image")
		command(t, "sh", "-c", "qemu-img convert -f raw -O "+options+" "+raw+" "+image)
		f, err := os.Open(image)
		if err != nil {
			t.Fatal(err)
		}
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		s := &origin.Stream{ReadCloser: struct {
			io.Reader
			io.Closer
		}{f, f}, Size: -1, Name: "a stream"}
		if sized {
			s.Size = st.Size()
		}
		var p importer.Progress
		want := newWant()
		if _, err := importer.Import(t.Context(), d, want, &p, func(context.Context) (*origin.Stream, error) {
			return s, nil
		}); err != nil {
			t.Fatalf("%s: %v", options, err)
		}
		holds(t, d, want, content)
		if err := importer.Remove(t.Context(), d, want); err != nil {
			t.Fatal(err)
		}
		m := regexp.MustCompile(`up to (\S+) MiB of the disk`).FindStringSubmatch(p.Notice())
		if m == nil {
			t.Fatalf("%s: notice %q", options, p.Notice())
		}
		if n, err := strconv.ParseFloat(strings.ReplaceAll(m[1], ",", ""), 64); err != nil || n > 56 {
			t.Errorf("%s, %d MiB: %s", options, st.Size()>>20, p.Notice())
		} else {
			t.Logf("%s, %d MiB: %s", options, st.Size()>>20, p.Notice())
		}
	}
}
