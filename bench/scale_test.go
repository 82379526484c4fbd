package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestScale: single operations beside a hundred images and volumes take about as long as beside ten. The figure for a
// thousand is that of `make bench`.
func TestScale(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	bin := filepath.Join(t.TempDir(), "drover")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "..").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b := &bench{options: options{drover: bin, dir: t.TempDir(), rounds: 9}}
	if err := b.scale(t.Context(), 100); err != nil {
		t.Fatal(err)
	}
	for _, r := range b.results {
		t.Logf("%-36s %8.1f %s, ratio %.2f", r.Subject, r.Value, r.Unit, r.Ratio)
		if r.Ratio > 2.5 { // a machine that is busy with other tests is noisy
			t.Errorf("%s: %.2f times as long as beside %d", r.Subject, r.Ratio, few)
		}
	}
}
