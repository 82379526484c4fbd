package disk_test

import (
	"crypto/sha512"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/imagestore/disk"
)

// benchFile is an image of 1 GiB with 3/4 of data that compresses about 2:1, in runs of 6 MiB.
func benchFile(b *testing.B) (name string, data int64) {
	b.Helper()
	name = filepath.Join(b.TempDir(), "image.raw")
	f, err := os.Create(name)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	const size = 1 << 30
	if err := f.Truncate(size); err != nil {
		b.Fatal(err)
	}
	r := rand.NewChaCha8([32]byte{1})
	p := make([]byte, 6<<20)
	for off := int64(0); off+int64(len(p)) <= size; off += 8 << 20 {
		for i := 0; i < len(p); i += 4096 {
			_, _ = r.Read(p[i : i+2048])
		}
		if _, err := f.WriteAt(p, off); err != nil {
			b.Fatal(err)
		}
		data += int64(len(p))
	}
	if err := f.Sync(); err != nil {
		b.Fatal(err)
	}
	return name, data
}

func timed(b *testing.B, name string, args ...string) time.Duration {
	b.Helper()
	start := time.Now()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		b.Fatalf("%s: %v\n%s", name, err, out)
	}
	return time.Since(start)
}

// importOnce imports name and removes the image; it returns the time of the import.
func importOnce(b *testing.B, name string) time.Duration {
	b.Helper()
	d := newDisk(b, b.TempDir())
	want := newWant()
	start := time.Now()
	if _, err := disk.Import(b.Context(), d, want, new(disk.Progress), file(name)); err != nil {
		b.Fatal(err)
	}
	took := time.Since(start)
	if err := disk.Remove(b.Context(), d, want); err != nil {
		b.Fatal(err)
	}
	return took
}

// BenchmarkImportRaw compares the import of a raw file, with SHA-512, digests and fsync, with cp --sparse=always, and
// tells the speed of SHA-512 on one core, which bounds it: the hash of a stream cannot be made in parallel.
func BenchmarkImportRaw(b *testing.B) {
	name, _ := benchFile(b)
	out := filepath.Join(b.TempDir(), "copy")
	var ours, cp, cpSync, hash time.Duration
	n := 0
	for b.Loop() {
		n++
		ours += importOnce(b, name)
		cp += timed(b, "cp", "--sparse=always", name, out)
		start := time.Now()
		timed(b, "sync", out)
		cpSync += time.Since(start)
		_ = os.Remove(out)
		p := make([]byte, 1<<20)
		start = time.Now()
		h := sha512.New()
		for range 1 << 10 {
			h.Write(p)
		}
		hash += time.Since(start)
	}
	mb := float64(n) * (1 << 30) / 1e6
	b.ReportMetric(mb/ours.Seconds(), "drover-MB/s")
	b.ReportMetric(mb/cp.Seconds(), "cp-MB/s")
	b.ReportMetric(mb/(cp+cpSync).Seconds(), "cp+sync-MB/s")
	b.ReportMetric(mb/hash.Seconds(), "sha512-MB/s")
}

// BenchmarkImportCompressed compares the import of a compressed qcow2 file with qemu-img convert.
func BenchmarkImportCompressed(b *testing.B) {
	raw, _ := benchFile(b)
	q := filepath.Join(b.TempDir(), "image.qcow2")
	timed(b, "qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, q)
	out := filepath.Join(b.TempDir(), "copy")
	var ours, qemu time.Duration
	n := 0
	for b.Loop() {
		n++
		ours += importOnce(b, q)
		qemu += timed(b, "qemu-img", "convert", "-O", "raw", "-m", "2", q, out)
		_ = os.Remove(out)
	}
	mb := float64(n) * (1 << 30) / 1e6
	b.ReportMetric(mb/ours.Seconds(), "drover-MB/s")
	b.ReportMetric(mb/qemu.Seconds(), "qemu-img-MB/s")
}
