package vmdk

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/format/oracle"
)

// limited opens images with limits.
func limited(lim Limits) oracle.Opener {
	return func(r io.ReaderAt, size int64) (block.Source, error) {
		im, err := Open(r, size, lim)
		if err != nil {
			return nil, err
		}
		return im, nil
	}
}

var (
	opener   = limited(Limits{})
	streamed = limited(Limits{Stream: true})
)

// TestWritten reads sparse images with writes at random places.
func TestWritten(t *testing.T) {
	for i, options := range []string{"", "zeroed_grain=on", "compat6=on", "hwversion=17,adapter_type=lsilogic"} {
		for j, size := range []int64{512, 65536, 65536 + 512, 40<<20 + 7*512, 100 << 20} {
			t.Run(fmt.Sprintf("%s,%d", options, size), func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "i.vmdk")
				oracle.Create(t, "vmdk", options, path, size)
				oracle.Compare(t, opener, "vmdk", path, oracle.AllExtents)
				rng := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				oracle.Write(t, "vmdk", path, oracle.Scribble(rng, size, 65536, 30)...)
				oracle.Write(t, "vmdk", path, fmt.Sprintf("write -P 7 %d 512", size-512))
				oracle.Compare(t, opener, "vmdk", path, oracle.AllExtents)
			})
		}
	}
}

// TestConverted reads images made by qemu-img convert.
func TestConverted(t *testing.T) {
	for i, options := range []string{"subformat=monolithicSparse", "subformat=streamOptimized", "zeroed_grain=on",
		"compat6=on", "subformat=streamOptimized,zeroed_grain=on"} {
		for j, size := range []int64{512, 3*65536 - 512, 70<<20 + 5*512} {
			t.Run(fmt.Sprintf("%s,%d", options, size), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				raw, path := filepath.Join(dir, "disk"), filepath.Join(dir, "i.vmdk")
				oracle.Raw(t, rand.New(rand.NewPCG(uint64(i), uint64(j))), raw, size)
				oracle.Qemu(t, "qemu-img", "convert", "-f", "raw", "-O", "vmdk", "-o", options, raw, path)
				im := oracle.Compare(t, opener, "vmdk", path, oracle.AllExtents).(*Image)
				if info := im.Info(); info.Compressed != strings.Contains(options, "stream") || info.GrainSize != 65536 ||
					info.VirtualSize != size || info.Redundant || info.Data == 0 {
					t.Fatalf("%+v", info)
				}
				footed := atTheEnd(t, path)
				if info := im.Info(); info.Compressed {
					want, err := os.ReadFile(raw)
					if err != nil {
						t.Fatal(err)
					}
					src, err := opener(strings.NewReader(string(footed)), int64(len(footed)))
					if err != nil {
						t.Fatal(err)
					}
					oracle.Same(t, src, want)
				}
			})
		}
	}
}

// atTheEnd turns the image into a stream: only a footer names the directory.
func atTheEnd(t *testing.T, path string) []byte {
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for len(b)%sector != 0 {
		b = append(b, 0)
	}
	return withFooter(b)
}

func withFooter(b []byte) []byte {
	mark := make([]byte, sector)
	le.PutUint64(mark, 1)
	le.PutUint32(mark[12:], markFooter)
	foot := append([]byte(nil), b[:sector]...)
	le.PutUint64(b[56:], 1<<64-1)
	return append(append(append(b, mark...), foot...), make([]byte, sector)...)
}

// TestRefusedQemu: disks of several files made by qemu-img are refused.
func TestRefusedQemu(t *testing.T) {
	dir := t.TempDir()
	base := filepath.Join(dir, "base.vmdk")
	oracle.Create(t, "vmdk", "", base, 1<<20)
	for _, c := range []struct {
		file, options, says string
	}{
		{"flat.vmdk", "subformat=monolithicFlat",
			`createType "monolithicFlat") of a disk in other files ("flat-flat.vmdk")`},
		{"two.vmdk", "subformat=twoGbMaxExtentSparse", `createType "twoGbMaxExtentSparse"`},
		{"two-s001.vmdk", "", "no descriptor"},
		{"twoflat.vmdk", "subformat=twoGbMaxExtentFlat", `"twoflat-f001.vmdk"`},
		{"delta.vmdk", "backing_fmt=vmdk,backing_file=" + base, "a delta of the parent"},
	} {
		path := filepath.Join(dir, c.file)
		if c.options != "" {
			oracle.Create(t, "vmdk", c.options, path, 1<<20)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !Detect(b[:24]) {
			t.Errorf("%s: not detected", c.file)
		}
		oracle.Refused(t, opener, b, api.Unsupported, c.says)
	}
}
