package main

import (
	"testing"

	"drover.io/drover/block/suite"
)

// TestFoundBackups: the section for some hundred found backups runs. Writes do not depend on the machine: each found
// backup costs two writes, and a list without news costs none for the objects of backups.
func TestFoundBackups(t *testing.T) {
	suite.System(t)
	const n = 300
	b := &bench{options: options{drover: binary(t), dir: t.TempDir()}}
	if err := b.found(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	writes := map[string]float64{}
	for _, r := range b.results {
		t.Logf("%-22s %-16s %8.1f %s", r.Name, r.Subject, r.Value, r.Unit)
		if r.Name == "backups-found-writes" {
			writes[r.Subject] = r.Value
		}
	}
	if w := writes["listed"]; w < 2*n || w > 3*n {
		t.Errorf("%d backups took %v writes, want two for each, and some of BackupVolumes, nodes and events", n, w)
	}
	if w, is := writes["listed again"]; !is || w > n/5 {
		t.Errorf("a list without news took %v writes", w)
	}
}
