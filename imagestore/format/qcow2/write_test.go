package qcow2

import (
	"bytes"
	"context"
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/block"
	sparse "drover.io/drover/block/file"
	"drover.io/drover/block/suite"
	"drover.io/drover/imagestore/format/oracle"
)

// TestWrite: QEMU and our own reader find a written image sound, with the content of the source.
func TestWrite(t *testing.T) {
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, size := range []int64{512, 64 << 10, 10<<20 + 512, 700 << 20} {
		for _, packed := range []bool{false, true} {
			raw := filepath.Join(t.TempDir(), "raw")
			oracle.Raw(t, rng, raw, size)
			f, err := os.OpenFile(raw, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			if size > 600<<20 { // two L2 tables, with compressible text
				if _, err := f.WriteAt(bytes.Repeat([]byte("some text that packs well\n"), 1<<17), 550<<20); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			src, err := sparse.Open(raw)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "out.qcow2")
			out, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			last := int64(0)
			err = Write(context.Background(), out, src, WriteOptions{Compress: packed, Progress: func(done, total int64) {
				if done < last || done > total {
					t.Errorf("progress %d after %d", done, last)
				}
				last = done
			}})
			if err != nil {
				t.Fatal(err)
			}
			if err := out.Close(); err != nil {
				t.Fatal(err)
			}
			oracle.Qemu(t, "qemu-img", "check", "-f", "qcow2", path)
			oracle.Qemu(t, "qemu-img", "compare", "-f", "raw", "-F", "qcow2", raw, path)
			var info struct {
				Size int64 `json:"virtual-size"`
			}
			if err := json.Unmarshal(oracle.Qemu(t, "qemu-img", "info", "--output=json", path), &info); err != nil ||
				info.Size != size {
				t.Fatalf("%+v, %v", info, err)
			}
			back, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			st, err := back.Stat()
			if err != nil {
				t.Fatal(err)
			}
			im, err := Open(back, st.Size(), Limits{})
			if err != nil {
				t.Fatal(err)
			}
			same(t, src, im)
			for _, c := range []interface{ Close() error }{im, back, src} {
				if err := c.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// same compares two sources.
func same(t *testing.T, a, b block.Source) {
	t.Helper()
	if a.Size() != b.Size() {
		t.Fatalf("%d bytes and %d", a.Size(), b.Size())
	}
	x, y := make([]byte, block.ChunkSize), make([]byte, block.ChunkSize)
	for off := int64(0); off < a.Size(); off += block.ChunkSize {
		n := min(block.ChunkSize, a.Size()-off)
		if k, err := a.ReadAt(x[:n], off); k < int(n) {
			t.Fatal(err)
		}
		if k, err := b.ReadAt(y[:n], off); k < int(n) {
			t.Fatal(err)
		}
		if !bytes.Equal(x[:n], y[:n]) {
			t.Fatalf("differs in the 2 MiB at %d", off)
		}
	}
}

// TestWriteCutOff: an image which was not written to the end is refused.
func TestWriteCutOff(t *testing.T) {
	raw := filepath.Join(t.TempDir(), "raw")
	oracle.Raw(t, rand.New(rand.NewPCG(1, 1)), raw, 32<<20)
	src, err := sparse.Open(raw)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	ctx, cancel := context.WithCancel(context.Background())
	err = Write(ctx, out, src, WriteOptions{Progress: func(int64, int64) { cancel() }})
	if err == nil {
		t.Fatal("written to the end")
	}
	st, err := out.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(out, st.Size(), Limits{}); err == nil {
		t.Fatal("a part of an image is taken for one")
	}
}
