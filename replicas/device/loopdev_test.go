package device

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/device/loophelper"
)

// TestLoopOfAnother: a loop device which by now belongs to another file is neither claimed nor taken down.
func TestLoopOfAnother(t *testing.T) {
	suite.System(t)
	path := filepath.Join(t.TempDir(), "of-another")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := loophelper.Configure(fd, path, false)
	_ = unix.Close(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer dropLoop(n, "of-another")
	dropLoop(n, "mine")
	if err := claimLoop(t.Context(), n, "mine"); !errors.Is(err, loophelper.ErrGone) {
		t.Error(err)
	}
	if file := loopFile(n); file != "of-another" {
		t.Fatalf("the device stands on %q", file)
	}
	dropLoop(n, "of-another")
	// The device ends with its last user, and another process in search of a free device may have it open just now.
	await(t, func() bool { return loopFile(n) != "of-another" })
}
