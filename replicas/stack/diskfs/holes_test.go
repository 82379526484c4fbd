package diskfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// TestHolesFileTellsOfFilledAndLostBlocks: CheckHoles accepts the file as written, once and twice, and a copy with the
// holes. CheckHoles refuses a copy without holes and a copy without the block, and reports a missing file.
func TestHolesFileTellsOfFilledAndLostBlocks(t *testing.T) {
	dir := t.TempDir()
	check := func(what string, refused bool) {
		t.Helper()
		if err := CheckHoles(file.OS, dir); api.Is(err, api.Corrupt) != refused || err != nil && !refused {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := CheckHoles(file.OS, dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	for range 2 {
		if err := WriteHoles(file.OS, dir); err != nil {
			t.Fatal(err)
		}
		check("as made", false)
	}
	name := filepath.Join(dir, HolesFile)
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	h, err := os.Create(name) // as cp does, which copies the ranges of data
	if err == nil {
		_, err = h.WriteAt(data[holesData:][:blockSize], holesData)
	}
	if err == nil {
		err = h.Truncate(holesSize)
	}
	if err != nil || h.Close() != nil {
		t.Fatal(err)
	}
	check("a copy that keeps holes", false)
	if err := os.WriteFile(name, data, 0o600); err != nil { // as rsync -a does
		t.Fatal(err)
	}
	check("a copy that fills holes", true)
	if err := os.Truncate(name, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, holesSize); err != nil {
		t.Fatal(err)
	}
	check("the block is lost", true)
}
