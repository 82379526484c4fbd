package qcow2

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/block"
	"drover.io/drover/imagestore/format/oracle"
)

// qemu-img is the oracle: an image made by qemu-img must read the same here.

// opener is Open for the oracle.
func opener(r io.ReaderAt, size int64) (block.Source, error) {
	im, err := Open(r, size, Limits{})
	if err != nil {
		return nil, err
	}
	return im, nil
}

// qemuIO runs commands on an image. A compressed write to a cluster with data fails with an I/O error, which is
// harmless.
func qemuIO(t testing.TB, file string, cmds ...string) {
	t.Helper()
	args := []string{"-f", "qcow2", "-d", "unmap"}
	for _, c := range cmds {
		args = append(args, "-c", c)
	}
	out, err := exec.Command("qemu-io", append(args, file)...).CombinedOutput()
	done := 0
	for line := range strings.Lines(string(out)) {
		switch {
		case strings.HasPrefix(line, "wrote"), strings.HasPrefix(line, "discard"):
			done++
		case strings.HasPrefix(line, "write failed: Input/output error"), strings.Contains(line, " ops; "):
		default:
			t.Fatalf("qemu-io: %v: %s", err, line)
		}
	}
	if done < len(cmds)/4 {
		t.Fatalf("qemu-io: %v: only %d of %d commands did anything", err, done, len(cmds))
	}
}

func openFile(t testing.TB, path string) *Image {
	t.Helper()
	return oracle.OpenFile(t, opener, path).(*Image)
}

// compare checks an image against the content and the map read by qemu-img.
func compare(t *testing.T, path string) {
	t.Helper()
	im := oracle.Compare(t, opener, "qcow2", path, oracle.AllExtents).(*Image)
	data := int64(0)
	for off := int64(0); off < im.Size(); {
		e, err := im.Next(off)
		if err != nil {
			t.Fatal(err)
		}
		if off = e.End(); e.Kind == block.Data {
			data += e.Len
		}
	}
	if im.Info().Data != data {
		t.Fatalf("%d bytes of data counted, want %d", im.Info().Data, data)
	}
}

// scribble makes random writes, zeros, discards and compressed writes.
func scribble(rng *rand.Rand, size, cluster int64, pattern string, n int) []string {
	var cmds []string
	span := func(align, most int64) (int64, int64) {
		off := rng.Int64N(max(size/align, 1)) * align
		return off, max(min((1+rng.Int64N(most))*align, (size-off)/512*512), 512)
	}
	for range n {
		switch rng.IntN(8) {
		case 0, 1:
			off, l := span(512, 300)
			cmds = append(cmds, fmt.Sprintf("write -s %s %d %d", pattern, off, l))
		case 2:
			off, l := span(cluster, 4)
			cmds = append(cmds, fmt.Sprintf("write -P %d %d %d", 1+rng.IntN(255), off, l))
		case 3:
			off, l := span(512, 500)
			cmds = append(cmds, fmt.Sprintf("write -z %d %d", off, l))
		case 4:
			off, l := span(cluster, 8)
			cmds = append(cmds, fmt.Sprintf("write -z -u %d %d", off, l))
		case 5:
			off, l := span(cluster, 8)
			cmds = append(cmds, fmt.Sprintf("discard %d %d", off, l))
		default:
			for range 1 + rng.IntN(4) {
				off, _ := span(cluster, 1)
				l := min(cluster, size-off)
				if rng.IntN(3) == 0 {
					cmds = append(cmds, fmt.Sprintf("write -c -P %d %d %d", 1+rng.IntN(255), off, l))
				} else {
					cmds = append(cmds, fmt.Sprintf("write -c -s %s %d %d", pattern, off, l))
				}
			}
		}
	}
	return cmds
}

// patternFile is the content of the writes: text-like, code-like and random bytes in turn.
func patternFile(t testing.TB) string {
	path := filepath.Join(t.TempDir(), "pattern")
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewChaCha8([32]byte{1}))
	skewed := make([]byte, 2500)
	var b []byte
	for i := 0; len(b) < 3<<20; i += 10000 {
		b = append(b, code[i%900000:][:7000]...)
		for range 3000 {
			b = append(b, byte(rng.Uint32()))
		}
		for i := range skewed {
			for skewed[i] = 0; skewed[i] < 200 && rng.Uint32()%3 != 0; {
				skewed[i]++
			}
		}
		b = fmt.Appendf(b, "%x", skewed)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestMatrix(t *testing.T) {
	pattern := patternFile(t)
	type row struct {
		options string
		cluster int64
	}
	var rows []row
	for _, c := range []int64{512, 4096, 65536, 2 << 20} {
		rows = append(rows, row{"compat=0.10", c}, row{"compat=1.1", c}, row{"compression_type=zstd", c})
		if c >= 16384 {
			rows = append(rows, row{"extended_l2=on", c}, row{"extended_l2=on,compression_type=zstd", c})
		}
	}
	for _, c := range []int64{512, 65536} {
		rows = append(rows, row{"lazy_refcounts=on", c}, row{"refcount_bits=1", c}, row{"refcount_bits=64", c},
			row{"preallocation=metadata", c}, row{"preallocation=falloc", c}, row{"preallocation=full", c},
			row{"compat=0.10,preallocation=metadata", c})
	}
	rows = append(rows, row{"extended_l2=on,preallocation=metadata", 16384}, row{"extended_l2=on", 32768})
	for i, r := range rows {
		t.Run(fmt.Sprintf("%s,%d", r.options, r.cluster), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(uint64(i), 7))
			size := min(5*r.cluster+rng.Int64N(200)*r.cluster, 10<<20)/512*512 + rng.Int64N(20)*512
			path := filepath.Join(t.TempDir(), "i.qcow2")
			oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", fmt.Sprintf("%s,cluster_size=%d", r.options, r.cluster),
				path, fmt.Sprint(size))
			compare(t, path)
			qemuIO(t, path, scribble(rng, size, r.cluster, pattern, 30)...)
			compare(t, path)
		})
	}
}

// TestConverted reads images made by qemu-img convert, like images from the network.
func TestConverted(t *testing.T) {
	pattern, err := os.ReadFile(patternFile(t))
	if err != nil {
		t.Fatal(err)
	}
	raw := filepath.Join(t.TempDir(), "raw")
	f, err := os.Create(raw)
	if err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < 16<<20; off += 5 << 20 {
		if _, err := f.WriteAt(pattern, off); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(f.Truncate(24<<20+512*7), f.Close()); err != nil {
		t.Fatal(err)
	}
	for _, options := range []string{"compat=0.10", "cluster_size=512", "cluster_size=2M", "compression_type=zstd",
		"compression_type=zstd,cluster_size=2M", "compression_type=zstd,cluster_size=4k", "extended_l2=on"} {
		for _, flags := range []string{"", "-c", "-c -W -m 8", "-S 0"} {
			t.Run(options+flags, func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "i.qcow2")
				args := append([]string{"convert", "-O", "qcow2", "-o", options}, strings.Fields(flags)...)
				oracle.Qemu(t, "qemu-img", append(args, raw, path)...)
				compare(t, path)
			})
		}
	}
}

func TestSizes(t *testing.T) {
	for _, size := range []int64{0, 512, 65536, 65536 + 512, 512<<20 - 512} {
		path := filepath.Join(t.TempDir(), "i.qcow2")
		oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", path, fmt.Sprint(size))
		if size > 0 {
			qemuIO(t, path, fmt.Sprintf("write -P 7 %d 512", size-512))
		}
		if size < 1<<20 {
			compare(t, path)
			continue
		}
		// A large hole is a single extent, and the last cluster is read up to the virtual end.
		im := openFile(t, path)
		e, err := im.Next(0)
		if want := (block.Extent{Len: size &^ 0xffff}); err != nil || e != want {
			t.Fatalf("first extent %+v, %v, want %+v", e, err, want)
		}
		p := make([]byte, 1024)
		if n, err := im.ReadAt(p, size-512); n != 512 || !errors.Is(err, io.EOF) || p[511] != 7 {
			t.Fatalf("read %d, %v, last byte %d", n, err, p[511])
		}
	}
}

// TestHistory: snapshots, bitmaps, resizing and an unclean end leave the active disk readable.
func TestHistory(t *testing.T) {
	pattern := patternFile(t)
	for _, options := range []string{"compat=0.10", "cluster_size=4k", "extended_l2=on,lazy_refcounts=on"} {
		path := filepath.Join(t.TempDir(), "i.qcow2")
		oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", options, path, "8M")
		rng := rand.New(rand.NewPCG(3, 3))
		for i := range 3 {
			qemuIO(t, path, scribble(rng, 8<<20, 65536, pattern, 10)...)
			oracle.Qemu(t, "qemu-img", "snapshot", "-c", fmt.Sprint("s", i), path)
		}
		qemuIO(t, path, scribble(rng, 8<<20, 65536, pattern, 10)...)
		compare(t, path)
		if n := openFile(t, path).Info().Snapshots; n != 3 {
			t.Fatalf("%d snapshots, want 3", n)
		}
		oracle.Qemu(t, "qemu-img", "snapshot", "-a", "s1", path)
		compare(t, path)
		if options != "compat=0.10" {
			oracle.Qemu(t, "qemu-img", "bitmap", "--add", "--enable", path, "b")
		}
		qemuIO(t, path, scribble(rng, 8<<20, 65536, pattern, 5)...)
		compare(t, path)
		for _, s := range []string{"s0", "s1", "s2"} {
			oracle.Qemu(t, "qemu-img", "snapshot", "-d", s, path)
		}
		if options != "compat=0.10" {
			oracle.Qemu(t, "qemu-img", "bitmap", "--remove", path, "b")
		}
		oracle.Qemu(t, "qemu-img", "resize", "-q", path, "11M")
		compare(t, path)
		oracle.Qemu(t, "qemu-img", "resize", "-q", "--shrink", path, "5M")
		compare(t, path)
	}
}

func TestDirty(t *testing.T) {
	path := filepath.Join(t.TempDir(), "i.qcow2")
	oracle.Qemu(t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", path, "8M")
	// The abort command ends qemu-io as a crash would.
	cmd := exec.Command("qemu-io", "-f", "qcow2", "-c", "write -P 9 1M 1M", "-c", "flush", "-c", "abort", path)
	cmd.Dir = t.TempDir()
	if err := cmd.Run(); err == nil {
		t.Fatal("qemu-io did not crash")
	}
	im := openFile(t, path)
	if i := im.Info(); !i.Dirty || !i.LazyRefcounts || i.Data != 1<<20 {
		t.Fatalf("the image is not dirty: %+v", i)
	}
	got, err := oracle.Content(im)
	if err != nil {
		t.Fatal(err)
	}
	if want := append(make([]byte, 1<<20), bytes.Repeat([]byte{9}, 1<<20)...); !bytes.Equal(got.B[:2<<20], want) {
		t.Fatal("what was flushed before the crash is not there")
	}
	compare(t, path)
}
