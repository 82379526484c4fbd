package export

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/block/file"
	"drover.io/drover/driver/cli"
)

// TestSaveWhereNoFolderIs: saveFile reports a file which cannot be created once, in a single line.
func TestSaveWhereNoFolderIs(t *testing.T) {
	name := filepath.Join(t.TempDir(), "image.raw")
	if err := os.WriteFile(name, make([]byte, 8<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	src, err := file.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	for _, format := range []string{"raw", "qcow2"} {
		err = saveFile(t.Context(), src, cli.ExportOptions{File: filepath.Join(t.TempDir(), "none", "x"), Format: format})
		if err == nil || !strings.Contains(err.Error(), "x is not written: open ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", format, err)
		}
	}
}

// TestSaveTellsTheSize: saveFile reports the size of the file, also of a file without data.
func TestSaveTellsTheSize(t *testing.T) {
	name := filepath.Join(t.TempDir(), "empty.raw")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(name, 1<<20); err != nil {
		t.Fatal(err)
	}
	src, err := file.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	for _, format := range []string{"raw", "qcow2"} {
		var size int64
		err := saveFile(t.Context(), src, cli.ExportOptions{File: filepath.Join(t.TempDir(), "x"), Format: format,
			Progress: func(_, total int64) { size = total }})
		if err != nil || size != 1<<20 {
			t.Errorf("%s: %d bytes, %v", format, size, err)
		}
	}
}
