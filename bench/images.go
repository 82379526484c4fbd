package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// fromImage times the creation of volumes from images of two sizes, from the request to the device.
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
			if _, err := b.in.attachNew(ctx, v, name, gib<<30); err != nil {
				return err
			}
			took = append(took, time.Since(began).Seconds())
			if err := b.in.deleteVolume(ctx, v); err != nil {
				return err
			}
		}
		b.addFigure("volume-from-image", fmt.Sprintf("image-of-%d-GiB", gib), median(took), "s", "", 0, "request to device")
		if err := b.in.deleteImage(ctx, name); err != nil {
			return err
		}
	}
	return os.Remove(filepath.Join(b.dir, "large.raw"))
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

// sampleFile fills every other run of 8 MiB with programs and texts of this machine, so that the file packs like a real
// disk.
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
		return 0, nil // skip an unreadable sample
	}
	defer from.Close()
	st, err := from.Stat()
	if err != nil || !st.Mode().IsRegular() {
		return 0, nil
	}
	n, err := io.CopyN(io.NewOffsetWriter(to, off), from, min(st.Size(), limit-off))
	return (n + 4095) &^ 4095, err
}
