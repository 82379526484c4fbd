package localfile

import (
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
)

// TestSecretIsWrittenOnce: the file is the owner's alone, and a second write replaces nothing.
func TestSecretIsWrittenOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	if err := WriteSecret(path, []byte("first")); err != nil {
		t.Fatal(err)
	}
	if err := WriteSecret(path, []byte("second")); !api.Is(err, api.Exists) {
		t.Errorf("%v, want an error of kind exists", err)
	}
	content, err := os.ReadFile(path)
	if err != nil || string(content) != "first" {
		t.Errorf("the file has %q: %v", content, err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the mode is %v, %v", st.Mode(), err)
	}
	if err := WriteSecret(filepath.Join(path, "x"), nil); err == nil {
		t.Error("a file below a file is written")
	}
}
