package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/block/suite"
)

// binary returns the drover of the environment, or builds one.
func binary(t *testing.T) string {
	t.Helper()
	bin := os.Getenv("DROVER_BINARY")
	if bin == "" {
		bin = filepath.Join(t.TempDir(), "drover")
		if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "..").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	return bin
}

// TestScale: the section for thirty images and volumes runs and times every operation. `make bench` judges the figures.
func TestScale(t *testing.T) {
	suite.System(t)
	b := &bench{options: options{drover: binary(t), dir: t.TempDir(), rounds: 2}}
	if err := b.scale(t.Context(), 10); err != nil {
		t.Fatal(err)
	}
	timed := map[string]bool{}
	for _, r := range b.results {
		t.Logf("%-36s %8.1f %s, ratio %.2f", r.Subject, r.Value, r.Unit, r.Ratio)
		if r.Value <= 0 {
			t.Errorf("%s was not timed", r.Subject)
		}
		timed[strings.Fields(r.Subject)[0]] = true
	}
	for _, name := range []string{"image-create", "image-delete", "image-list-page", "volume-create", "volume-attach",
		"volume-get", "volume-detach", "volume-delete"} {
		if !timed[name] {
			t.Errorf("%s was not timed", name)
		}
	}
}
