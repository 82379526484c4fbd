package qcow2

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

// file is a sink that leaves zeros as holes, as a fresh raw file may.
type file struct{ *os.File }

func (file) ZeroAt(_, _ int64) error      { return nil }
func (f file) Sync(context.Context) error { return f.File.Sync() }

// realImage makes a 1 GiB raw disk: ext4 with files of this system in it.
func realImage(b *testing.B, dir string) string {
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
		if os.Link(path, to) == nil {
			return nil
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
	qemu(b, "mkfs.ext4", "-q", "-d", tree, raw, "1G")
	if err := os.RemoveAll(tree); err != nil {
		b.Fatal(err)
	}
	return raw
}

// cpu is the processor time that this process, or its ended children, took.
func cpu(b *testing.B, who int) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(who, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// BenchmarkConvert converts images of real files to raw ones, in turn with qemu-img on two coroutines; medians. On a
// busy machine the processor time (cpu-s) says more than the clock.
func BenchmarkConvert(b *testing.B) {
	dir := b.TempDir()
	raw := realImage(b, dir)
	for _, kind := range []struct{ name, options string }{
		{"zlib", "-c"}, {"zstd", "-c -o compression_type=zstd"}, {"plain", ""},
	} {
		image, out := filepath.Join(dir, kind.name), filepath.Join(dir, "out")
		qemu(b, "sh", "-c", fmt.Sprintf("qemu-img convert -O qcow2 -W -m 4 %s %s %s", kind.options, raw, image))
		b.Run(kind.name, func(b *testing.B) {
			timed := func(who int, wall, used *[]float64, convert func()) {
				os.Remove(out)
				syscall.Sync()
				start, before := time.Now(), cpu(b, who)
				convert()
				*wall = append(*wall, time.Since(start).Seconds())
				*used = append(*used, cpu(b, who)-before)
			}
			var own, other, ownCPU, otherCPU []float64
			for b.Loop() {
				timed(syscall.RUSAGE_SELF, &own, &ownCPU, func() {
					im := openFile(b, image)
					f, err := os.Create(out)
					if err != nil {
						b.Fatal(err)
					}
					if err := f.Truncate(im.Size()); err != nil {
						b.Fatal(err)
					}
					if err := block.Copy(context.Background(), file{f}, im, block.CopyOptions{}); err != nil {
						b.Fatal(err)
					}
					if err := f.Close(); err != nil {
						b.Fatal(err)
					}
				})
				if out, err := exec.Command("cmp", raw, out).CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				timed(syscall.RUSAGE_CHILDREN, &other, &otherCPU, func() {
					qemu(b, "qemu-img", "convert", "-f", "qcow2", "-O", "raw", "-m", "2", image, out)
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
		})
	}
}
