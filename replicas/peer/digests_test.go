package peer

import (
	"bytes"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestDigestsOfManyAtOnce: digests that wait for what never comes do not keep those of other replicas of the disk.
func TestDigestsOfManyAtOnce(t *testing.T) {
	disk, err := stack.Add(t.Context(), t.TempDir()+"/disk")
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	loop := startLoop(t)
	open := func() *Backend {
		uid := string(api.NewUID())
		if err := disk.CreateReplica(t.Context(), stack.Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()),
			Size: testSize}); err != nil {
			t.Fatal(err)
		}
		r, err := disk.OpenReplica(t.Context(), uid, loop)
		if err != nil {
			t.Fatal(err)
		}
		return NewBackend(r, loop)
	}
	held, other := open(), open()
	if err := held.Hold(t.Context()); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			if _, err := held.Digests(t.Context(), 0, 1<<20); err != nil {
				t.Error(err)
			}
		})
	}
	want := bytes.Repeat(zeroDigest[:], testSize>>12)
	for range 8 {
		all.Go(func() {
			if got, err := other.Digests(t.Context(), 0, testSize); err != nil || !bytes.Equal(got, want) {
				t.Errorf("digests of nothing: %v", err)
			}
			if got, err := other.Digests(t.Context(), testSize-3<<12, 3<<12); err != nil || !bytes.Equal(got, want[:3*16]) {
				t.Errorf("digests of the end: %v", err)
			}
		})
	}
	if got, err := other.Digests(t.Context(), 0, testSize); err != nil || !bytes.Equal(got, want) {
		t.Errorf("digests of nothing: %v", err)
	}
	held.Release()
	all.Wait()
	for _, b := range []*Backend{held, other} {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}
