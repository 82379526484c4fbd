package vhd

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

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

var opener = limited(Limits{})

var options = []string{"subformat=dynamic", "subformat=fixed", "subformat=dynamic,force_size=on",
	"subformat=fixed,force_size=on"}

func detect(t *testing.T, path string, fixed bool) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if Detect(b) == fixed || !DetectEnd(b) || !DetectEnd(b[len(b)-512:]) {
		t.Fatalf("detected at the start %v, at the end %v", Detect(b), DetectEnd(b))
	}
}

// extents: for a fixed disk, qemu-img reports the holes of the file.
func extents(fixed bool) oracle.Extents {
	if fixed {
		return oracle.NoExtents
	}
	return oracle.DataExtents
}

func TestWritten(t *testing.T) {
	for i, o := range options {
		for j, size := range []int64{512, 2 << 20, 2<<20 + 512, 33<<20 + 7*512, 100 << 20} {
			t.Run(fmt.Sprintf("%s,%d", o, size), func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "i.vhd")
				oracle.Create(t, "vpc", o, path, size)
				fixed := strings.Contains(o, "fixed")
				oracle.Compare(t, opener, "vpc", path, extents(fixed))
				rng := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				oracle.Write(t, "vpc", path, oracle.Scribble(rng, size, 2<<20, 25)...)
				oracle.Write(t, "vpc", path, fmt.Sprintf("write -P 7 %d 512", size-512))
				im := oracle.Compare(t, opener, "vpc", path, extents(fixed)).(*Image)
				detect(t, path, fixed)
				info := im.Info()
				if info.Fixed != fixed || info.ByGeometry == strings.Contains(o, "force") || info.FrontCopy ||
					info.Allocated == 0 ||
					!info.ByGeometry && info.VirtualSize != size || !strings.HasPrefix(info.Creator, "qem") {
					t.Fatalf("%+v", info)
				}
			})
		}
	}
}

func TestConverted(t *testing.T) {
	for i, o := range options {
		for j, size := range []int64{512, 3<<20 - 512, 70<<20 + 5*512} {
			t.Run(fmt.Sprintf("%s,%d", o, size), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				raw, path := filepath.Join(dir, "disk"), filepath.Join(dir, "i.vhd")
				oracle.Raw(t, rand.New(rand.NewPCG(uint64(i), uint64(j))), raw, size)
				oracle.Qemu(t, "qemu-img", "convert", "-f", "raw", "-O", "vpc", "-o", o, raw, path)
				oracle.Compare(t, opener, "vpc", path, extents(strings.Contains(o, "fixed")))
			})
		}
	}
}

// TestMakers: the size equals qemu-img's size, for the makers known to qemu-img.
func TestMakers(t *testing.T) {
	const asked = 3000320 // not of any geometry
	dir := t.TempDir()
	for _, o := range options[:2] {
		path := filepath.Join(dir, "i.vhd")
		oracle.Create(t, "vpc", o, path, asked)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		const most = "\xff\xff\x10\xff"
		geometry := string(b[len(b)-512+56:][:4])
		byGeometry := int64(be.Uint16([]byte(geometry))) * int64(geometry[2]) * int64(geometry[3]) * sector
		if byGeometry <= asked {
			t.Fatalf("%s: the geometry has %d bytes", o, byGeometry)
		}
		for _, c := range []struct {
			maker, geometry string
			want            int64
			differs         bool // from qemu-img 7.2
		}{
			{"vpc ", geometry, byGeometry, false}, {"qemu", geometry, byGeometry, false}, {"vpc ", most, asked, false},
			{"qem2", geometry, asked, false}, {"win ", geometry, asked, false}, {"d2v ", geometry, asked, false},
			{"tap\x00", geometry, asked, false}, {"CTXS", geometry, asked, false},
			{"vbox", geometry, asked, true}, {"wa\x00\x00", geometry, asked, true}, {"vpc ", "\x00\x00\x00\x00", asked, true},
		} {
			edit := func(f []byte) {
				copy(f[28:], c.maker)
				be.PutUint64(f[48:], asked)
				copy(f[56:], c.geometry)
				sum(f, checksumFooter)
			}
			edit(b[len(b)-512:])
			if Detect(b) {
				edit(b[:512])
			}
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			var im *Image
			if c.differs {
				im = oracle.OpenFile(t, opener, path).(*Image)
			} else {
				im = oracle.Compare(t, opener, "vpc", path, oracle.NoExtents).(*Image)
			}
			if info := im.Info(); info.ByGeometry != (c.want == byGeometry) || info.VirtualSize != c.want {
				t.Fatalf("%s %q: %+v", o, c.maker, info)
			}
		}
	}
}

// sum sets the checksum.
func sum(b []byte, at int) { be.PutUint32(b[at:], checksum(b, at)) }
