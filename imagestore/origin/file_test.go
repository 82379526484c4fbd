package origin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
)

func TestOpenFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	if err := os.WriteFile(path, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	for p, kind := range map[string]api.Kind{"x": api.Invalid, dir: api.Invalid, dir + "/no": api.NotFound,
		"/dev/zero": api.Invalid} {
		if _, err := OpenFile(p); !api.Is(err, kind) {
			t.Errorf("%s: got %v, want kind %v", p, err, kind)
		}
	}
	s, err := OpenFile(path)
	if err != nil || s.Size != 5 || s.Settled() != nil {
		t.Fatalf("%+v %v", s, err)
	}
	defer s.Close()
	if err := os.WriteFile(path, []byte("hello!"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := s.Settled(); err == nil || !strings.Contains(err.Error(), "changed while it was read") {
		t.Fatalf("got %v", err)
	}
}
