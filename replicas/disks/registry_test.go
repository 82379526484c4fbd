package disks

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestNoDiskInAMissingFolder: Open adds no disk to a folder that nobody made.
func TestNoDiskInAMissingFolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "slip")
	r := NewRegistry(RegistryOptions{Instance: "test"})
	if _, err := r.Open(t.Context(), path, "", true); !api.Is(err, api.NotFound) || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the folder was made")
	}
}

// TestNoDiskOnADroverVolume: Open adds no disk to a folder on a Drover volume: the volume and the disk would wait for
// each other.
func TestNoDiskOnADroverVolume(t *testing.T) {
	path := t.TempDir()
	below := ""
	r := NewRegistry(RegistryOptions{VolumeBelow: func(string) (string, error) { return below, nil }})
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	below = "/dev/drover/v"
	_, err := r.Open(t.Context(), path, "", true)
	if !api.Is(err, api.Invalid) || !strings.Contains(err.Error(), "/dev/drover/v") {
		t.Errorf("on a Drover volume: %v", err)
	}
	if left, err := os.ReadDir(path); err != nil || len(left) > 0 {
		t.Errorf("the folder has %v, %v", left, err)
	}
	below = ""
	if _, err := r.Open(t.Context(), path, "", true); err != nil {
		t.Error(err)
	}
}
