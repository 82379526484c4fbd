package remote

import (
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestHolderBesideAFailingDisk: a failing disk hides no replica of other disks. The search for a replica on a failing
// disk ends with an error.
func TestHolderBesideAFailingDisk(t *testing.T) {
	good, err := stack.Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	uid := string(api.NewUID())
	if err := good.CreateReplica(t.Context(), stack.Spec{UID: uid, Volume: "a", VolumeUID: string(api.NewUID()),
		Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	failing, err := stack.Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// Every access to the folder fails, as on a file system that was shut down.
	folder := filepath.Join(failing.Path(), "replicas")
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(folder, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := findDiskOf([]*stack.Disk{failing, good}, uid); got != good || err != nil {
		t.Errorf("it is on %v, %v", got, err)
	}
	if got, err := findDiskOf([]*stack.Disk{failing}, uid); got != nil || err == nil {
		t.Errorf("found on %v, %v beside a disk that fails only", got, err)
	}
	if got, err := findDiskOf([]*stack.Disk{good}, string(api.NewUID())); got != nil || err != nil {
		t.Errorf("another one is on %v, %v", got, err)
	}
}
