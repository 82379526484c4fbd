package disks

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// A disk is one instance's, for several processes of it at once, until the last of them is gone.
func TestDiskHasOneUser(t *testing.T) {
	suite.Slow(t)
	dir, ctx := t.TempDir(), t.Context()
	if err := os.WriteFile(filepath.Join(dir, lockFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var mine []*os.File
	for range 8 {
		wg.Go(func() {
			f, err := lockDisk(ctx, dir, "node a of https://one")
			if err != nil {
				t.Errorf("of the same instance: %v", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			mine = append(mine, f)
		})
	}
	wg.Wait()
	for _, f := range mine[1:] {
		f.Close()
	}
	_, err := lockDisk(ctx, dir, "node b of https://two")
	if !api.Is(err, api.InUse) || !strings.Contains(err.Error(), "node a of https://one") {
		t.Errorf("another instance got the disk, or was not told whose it is: %v", err)
	}
	mine[0].Close()
	f, err := lockDisk(ctx, dir, "node b of https://two")
	if err != nil {
		t.Fatalf("nobody uses the disk any more: %v", err)
	}
	defer f.Close()
	if b, err := os.ReadFile(filepath.Join(dir, nameFile)); err != nil || string(b) != "node b of https://two" {
		t.Errorf("the disk's user is %q, %v", b, err)
	}
}
