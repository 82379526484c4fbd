package replicas

import (
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A disk that fails keeps no replica of other disks from being found, and makes nobody believe that there is none.
func TestHolderBesideAFailingDisk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	uid := string(w.replicaOf("a").Spec.UID)
	w.stopData()
	defer w.startData()
	good, err := stack.Open(filepath.Join(w.dir, "disk"))
	if err != nil {
		t.Fatal(err)
	}
	failing, err := stack.Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// Whatever is asked for in it fails, as on a file system that was shut down.
	folder := filepath.Join(failing.Path(), "replicas")
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(folder, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := holder([]*stack.Disk{failing, good}, uid); got != good || err != nil {
		t.Errorf("it is on %v, %v", got, err)
	}
	if got, err := holder([]*stack.Disk{failing}, uid); got != nil || err == nil {
		t.Errorf("found on %v, %v beside a disk that fails only", got, err)
	}
	if got, err := holder([]*stack.Disk{good}, string(api.NewUID())); got != nil || err != nil {
		t.Errorf("another one is on %v, %v", got, err)
	}
}
