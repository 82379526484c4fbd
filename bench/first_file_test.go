package main

import (
	"errors"
	"testing"

	"drover.io/drover/block/suite"
)

// TestFirstFileAndBucket: the sections for the first file of a backup of 1 TiB and for a bucket run. The requests of an
// incremental backup do not depend on the machine, except those of the target's visits.
func TestFirstFileAndBucket(t *testing.T) {
	suite.System(t)
	dir := t.TempDir()
	in, err := startInstance(t.Context(), binary(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := in.stop(); err != nil {
			t.Error(err)
		}
	}()
	b := &bench{options: options{drover: in.drover, sizeMiB: 64, rounds: 1}, dir: dir, in: in}
	if err := errors.Join(b.firstFile(t.Context()), b.bucketBackups(t.Context())); err != nil {
		t.Fatal(err)
	}
	for _, r := range b.results {
		t.Logf("%-28s %-28s %8.3f %s %s", r.Name, r.Subject, r.Value, r.Unit, r.note)
		if r.Name == "backup-incremental-requests" && r.Value > r.base+60 {
			t.Errorf("an incremental backup of %v packs takes %v requests", r.base, r.Value)
		}
	}
}
