package oracle

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block"
)

// file is a sink that leaves zeros as holes, as a new raw file may.
type file struct{ *os.File }

func (file) ZeroAt(_, _ int64) error      { return nil }
func (f file) Sync(context.Context) error { return f.File.Sync() }

// Disk makes a raw disk of 1 GiB: ext4 with files of this system.
func Disk(b *testing.B, dir string) string {
	tree, raw := filepath.Join(dir, "tree"), filepath.Join(dir, "raw")
	left, n := int64(900<<20), 0
	err := filepath.WalkDir("/usr", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		n++
		info, err := d.Info()
		if err != nil || n%3 != 0 || info.Size() > 20<<20 || info.Size() > left {
			return err
		}
		left -= info.Size() + 4096
		to := filepath.Join(tree, path)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(to, data, 0o644)
	})
	if err != nil {
		b.Fatal(err)
	}
	Qemu(b, "mkfs.ext4", "-q", "-d", tree, raw, "1G")
	if err := os.RemoveAll(tree); err != nil {
		b.Fatal(err)
	}
	return raw
}

// cpuTime returns the processor time of this process, or of its ended children.
func cpuTime(b *testing.B, who int) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(who, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// Convert converts an image of a raw disk back, in turn with qemu-img on two coroutines, and reports medians. On a busy
// machine the processor time (cpu-s) says more than the clock.
func Convert(b *testing.B, open Opener, raw, format string, options ...string) {
	dir := b.TempDir()
	image, out := filepath.Join(dir, "image"), filepath.Join(dir, "out")
	Qemu(b, "qemu-img", append(append([]string{"convert", "-f", "raw", "-O", format}, options...), raw, image)...)
	timed := func(who int, wall, used *[]float64, convert func()) {
		_ = os.Remove(out)
		syscall.Sync()
		start, before := time.Now(), cpuTime(b, who)
		convert()
		*wall = append(*wall, time.Since(start).Seconds())
		*used = append(*used, cpuTime(b, who)-before)
	}
	var own, other, ownCPU, otherCPU []float64
	for b.Loop() {
		timed(syscall.RUSAGE_SELF, &own, &ownCPU, func() {
			src := OpenFile(b, open, image)
			f, err := os.Create(out)
			if err != nil {
				b.Fatal(err)
			}
			if err := f.Truncate(src.Size()); err != nil {
				b.Fatal(err)
			}
			if err := block.Copy(context.Background(), file{f}, src, block.CopyOptions{}); err != nil {
				b.Fatal(err)
			}
			if err := f.Close(); err != nil {
				b.Fatal(err)
			}
		})
		if said, err := exec.Command("cmp", "-n", fmt.Sprint(1<<30), raw, out).CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, said)
		}
		timed(syscall.RUSAGE_CHILDREN, &other, &otherCPU, func() {
			Qemu(b, "qemu-img", "convert", "-f", format, "-O", "raw", "-m", "2", image, out)
		})
	}
	median := func(v []float64) float64 {
		slices.Sort(v)
		return v[len(v)/2]
	}
	b.ReportMetric(median(own), "s")
	b.ReportMetric(median(other), "qemu-img-s")
	b.ReportMetric(median(other)/median(own), "x-faster")
	b.ReportMetric(median(ownCPU), "cpu-s")
	b.ReportMetric(median(otherCPU), "qemu-img-cpu-s")
	b.ReportMetric(0, "ns/op")
}
