package vhdx

import (
	"bytes"
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

func TestWritten(t *testing.T) {
	for i, o := range []string{"subformat=dynamic", "subformat=fixed,block_size=1M", "subformat=dynamic,block_size=1M",
		"subformat=dynamic,block_size=2M,log_size=3M", "subformat=dynamic,block_size=8M,block_state_zero=off",
		"subformat=dynamic,block_size=256M"} {
		for j, size := range []int64{512, 1 << 20, 33<<20 + 7*512, 600<<20 + 512} {
			if size > 100<<20 && !strings.Contains(o, "dynamic,block_size=1M") {
				continue // enough blocks for two entries of sector bitmaps
			}
			t.Run(fmt.Sprintf("%s,%d", o, size), func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "i.vhdx")
				oracle.Create(t, "vhdx", o, path, size)
				if size < 100<<20 {
					oracle.Compare(t, opener, "vhdx", path, oracle.NoExtents)
				}
				rng := rand.New(rand.NewPCG(uint64(i), uint64(j)))
				oracle.Write(t, "vhdx", path, oracle.Scribble(rng, size, 1<<20, 20)...)
				oracle.Write(t, "vhdx", path, fmt.Sprintf("write -P 7 %d 512", size-512))
				im := oracle.Compare(t, opener, "vhdx", path, oracle.NoExtents).(*Image)
				info := im.Info()
				if info.VirtualSize != size || info.Data == 0 || info.LogicalSectorSize != 512 ||
					!strings.HasPrefix(info.Creator, "QEMU") ||
					info.Fixed != strings.Contains(o, "fixed") {
					t.Fatalf("%+v", info)
				}
			})
		}
	}
}

func TestConverted(t *testing.T) {
	for i, o := range []string{"subformat=dynamic", "subformat=fixed", "subformat=dynamic,block_size=1M",
		"subformat=dynamic,block_size=32M,log_size=2M"} {
		for j, size := range []int64{512, 3<<20 - 512, 70<<20 + 5*512} {
			t.Run(fmt.Sprintf("%s,%d", o, size), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				raw, path := filepath.Join(dir, "disk"), filepath.Join(dir, "i.vhdx")
				oracle.Raw(t, rand.New(rand.NewPCG(uint64(i), uint64(j))), raw, size)
				oracle.Qemu(t, "qemu-img", "convert", "-f", "raw", "-O", "vhdx", "-o", o, raw, path)
				oracle.Compare(t, opener, "vhdx", path, oracle.NoExtents)
			})
		}
	}
}

// TestReplay: a log replayed by qemu-img gives the same content in memory.
func TestReplay(t *testing.T) {
	for _, c := range replays {
		t.Run(c.name, func(t *testing.T) {
			m := makeTiny(512)
			c.edit(m)
			b := m.signed()
			im, err := Open(bytes.NewReader(b), int64(len(b)), Limits{})
			if err != nil {
				t.Fatal(err)
			}
			oracle.Same(t, im, m.want)
			if n := im.Info().Replayed; n != c.entries {
				t.Fatalf("%d entries replayed, want %d", n, c.entries)
			}
			path := filepath.Join(t.TempDir(), "i.vhdx")
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			if c.entries > 0 && !c.foreign {
				oracle.Qemu(t, "qemu-img", "check", "-q", "-f", "vhdx", "-r", "all", path)
			}
			if !c.foreign {
				oracle.Compare(t, opener, "vhdx", path, oracle.NoExtents)
			}
		})
	}
}
