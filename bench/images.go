package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// images measures imports against cp and qemu-img, and how soon a volume is there.
func (b *bench) images(ctx context.Context) error {
	size := 2 * b.sizeMiB << 20
	raw, qcow := filepath.Join(b.dir, "image.raw"), filepath.Join(b.dir, "image.qcow2")
	copied := filepath.Join(b.dir, "copied")
	fmt.Fprintln(os.Stderr, "preparing images ...")
	if err := b.words(ctx, raw, qcow, size); err != nil {
		return err
	}
	mb := float64(size) / 1e6
	took := map[string][]float64{}
	time1 := func(name string, f func() error) error {
		began := time.Now()
		if err := f(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		d := time.Since(began).Seconds()
		took[name] = append(took[name], d)
		fmt.Fprintf(os.Stderr, "\r%s: %.2f s\x1b[K", name, d)
		return nil
	}
	steps := []struct {
		name string
		do   func() error
		undo func() error
	}{
		{"cp", func() error { return cp(ctx, raw, copied, false) }, func() error { return os.Remove(copied) }},
		{"cp-synced", func() error { return cp(ctx, raw, copied, true) }, func() error { return os.Remove(copied) }},
		{"import-raw", func() error { return b.in.importFile(ctx, "raw", raw) },
			func() error { return b.in.deleteImage(ctx, "raw") }},
		{"qemu-img", func() error {
			_, err := tool(ctx, "qemu-img", "convert", "-m", "2", "-O", "raw", qcow, copied)
			return err
		}, func() error { return os.Remove(copied) }},
		{"import-qcow2", func() error { return b.in.importFile(ctx, "qcow", qcow) },
			func() error { return b.in.deleteImage(ctx, "qcow") }},
	}
	for range min(b.rounds, 3) {
		for _, s := range steps {
			for _, src := range []string{raw, qcow} { // sources from memory for everybody
				if err := readAll(src); err != nil {
					return err
				}
			}
			if _, err := tool(ctx, "sync"); err != nil {
				return err
			}
			if err := time1(s.name, s.do); err != nil {
				return err
			}
			if err := s.undo(); err != nil {
				return err
			}
		}
	}
	for name := range took {
		for i := range took[name] {
			took[name][i] = mb / took[name][i]
		}
	}
	rate := func(name string) float64 { return median(took[name]) }
	b.add("image-import-raw", "cp-sparse", rate("cp"), "MB/s", "cp-sparse", rate("cp"), "not durable when it ends")
	b.add("image-import-raw", "drover", rate("import-raw"), "MB/s", "cp-sparse", rate("cp"),
		"durable, with SHA-512 and digests")
	b.add("image-import-raw", "drover", rate("import-raw"), "MB/s", "cp-sparse-synced", rate("cp-synced"), "")
	b.add("image-import-qcow2", "qemu-img", rate("qemu-img"), "MB/s", "qemu-img", rate("qemu-img"),
		"not durable when it ends")
	b.add("image-import-qcow2", "drover", rate("import-qcow2"), "MB/s", "qemu-img", rate("qemu-img"),
		"durable, with SHA-512 and digests")
	for _, f := range []string{raw, qcow} {
		if err := os.Remove(f); err != nil {
			return err
		}
	}
	if err := b.downloads(ctx); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	return b.fromImage(ctx)
}

// words makes an image that compresses like a real one: half its runs are files of this machine, the rest holes.
func (b *bench) words(ctx context.Context, raw, qcow string, size int64) error {
	if err := sampleFile(raw, size); err != nil {
		return err
	}
	_, err := tool(ctx, "qemu-img", "convert", "-m", "2", "-W", "-c", "-O", "qcow2", raw, qcow)
	return err
}

// fromImage times volumes from images of two sizes, from the request to the device.
func (b *bench) fromImage(ctx context.Context) error {
	for _, gib := range []int64{1, 100} {
		file := filepath.Join(b.dir, "large.raw")
		if err := randomFile(file, 64<<20, false); err != nil {
			return err
		}
		if err := os.Truncate(file, gib<<30); err != nil {
			return err
		}
		name := fmt.Sprintf("large-%dg", gib)
		if err := b.in.importFile(ctx, name, file); err != nil {
			return err
		}
		var took []float64
		for i := range max(b.rounds, 3) {
			v := fmt.Sprintf("from-%s-%d", name, i)
			began := time.Now()
			if _, err := b.in.volume(ctx, v, name, gib<<30); err != nil {
				return err
			}
			took = append(took, time.Since(began).Seconds())
			if err := b.in.deleteVolume(ctx, v); err != nil {
				return err
			}
		}
		b.add("volume-from-image", fmt.Sprintf("image-of-%d-GiB", gib), median(took), "s", "", 0, "request to device")
		if err := b.in.deleteImage(ctx, name); err != nil {
			return err
		}
	}
	return os.Remove(filepath.Join(b.dir, "large.raw"))
}

func cp(ctx context.Context, from, to string, synced bool) error {
	if _, err := tool(ctx, "cp", "--sparse=always", from, to); err != nil || !synced {
		return err
	}
	f, err := os.Open(to)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func readAll(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.CopyBuffer(io.Discard, struct{ io.Reader }{f}, make([]byte, 1<<20))
	return err
}

// sampleFile fills every other run of 8 MiB with programs and texts of this machine.
func sampleFile(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	const run = 8 << 20
	var off int64
	for off < size {
		before := off
		for _, glob := range []string{"/usr/bin/*", "/usr/sbin/*", "/usr/lib/x86_64-linux-gnu/*.so*", "/usr/share/i18n/*/*"} {
			files, err := filepath.Glob(glob)
			if err != nil {
				return err
			}
			for _, name := range files {
				if off >= size {
					break
				}
				if off/run%2 == 1 {
					off = (off/run + 1) * run
				}
				n, err := appendFile(f, off, name, size)
				if err != nil {
					return err
				}
				off += n
			}
		}
		if off == before {
			return fmt.Errorf("no files to fill %s with", path)
		}
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Sync()
}

func appendFile(to *os.File, off int64, name string, limit int64) (int64, error) {
	from, err := os.Open(name)
	if err != nil {
		return 0, nil // a sample that cannot be read is left out
	}
	defer from.Close()
	st, err := from.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return 0, nil
	}
	n, err := io.CopyN(io.NewOffsetWriter(to, off), from, min(st.Size(), limit-off))
	return (n + 4095) &^ 4095, err
}
