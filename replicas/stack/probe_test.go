package stack

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// A file system that reports another map after it has read the map from its device is refused.
func TestProbeLooksAtTheMapAgain(t *testing.T) {
	for name, change := range map[string]func(fd int) error{
		"lost block": func(fd int) error { return unix.Fallocate(fd, punchMode, probeAt, blockSize) },
		"added block": func(fd int) error {
			_, err := unix.Pwrite(fd, make([]byte, blockSize), probeAt+blockSize)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			err := probe(context.Background(), dir, func() error {
				files, err := filepath.Glob(filepath.Join(dir, ".probe-*"))
				if err != nil || len(files) != 1 {
					t.Fatalf("files of the probe: %v, %v", files, err)
				}
				f, err := os.OpenFile(files[0], os.O_RDWR, 0)
				if err != nil {
					return err
				}
				defer f.Close()
				return change(int(f.Fd()))
			})
			if !api.Is(err, api.Unsupported) || !strings.Contains(err.Error(), "4 KiB") {
				t.Errorf("probe: %v", err)
			}
		})
	}
	dir := t.TempDir()
	evictions := 0
	if err := probe(context.Background(), dir, func() error { evictions++; return nil }); err != nil || evictions == 0 {
		t.Errorf("probe of an honest file system: %v, %d evictions", err, evictions)
	}
	if files, _ := os.ReadDir(dir); len(files) > 0 {
		t.Errorf("the probe left %v", files)
	}
}
