package mover

import (
	"context"
	"fmt"
	"reflect"
	"testing"

	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
)

// snapshot reads a snapshot.
func (w *world) snapshot(id blob.ID) repo.Snapshot {
	w.Helper()
	file, err := w.r.FindSnapshot(w.Context(), id)
	must(w, err)
	s, err := w.r.LoadSnapshot(w.Context(), file)
	must(w, err)
	return s
}

// TestAdopt: a snapshot can be adopted while the index has all blobs, those of the base included, whether or not the base
// still exists. The new snapshot has an id of its own and the same content.
func TestAdopt(t *testing.T) {
	w := newWorld(t)
	src := newDisk(4 * chunkSize)
	src.fill(1, 0, 1)
	first := w.backup(src, options("v"))
	var old []string
	must(t, w.store.List(t.Context(), "index/", func(o target.Object) error { old = append(old, o.Name); return nil }))
	src = src.copy(src.size)
	src.fill(9, 2)
	o := options("v")
	o.Base, o.Changed = &first.Snapshot, []int64{2}
	second := w.backup(src, o)
	adopts := func(id blob.ID, want bool) {
		t.Helper()
		own, got, err := Adopt(t.Context(), w.r, w.snapshot(id))
		must(t, err)
		if got != want || got != (own != blob.ID{}) || own == id {
			t.Errorf("snapshot %.8s: adopted as %.8s: %v, want %v", id, own, got, want)
		}
		if !got {
			return
		}
		a, b := w.snapshot(id), w.snapshot(own)
		a.ID, a.Parent = b.ID, nil
		if !reflect.DeepEqual(a, b) {
			t.Errorf("snapshot %+v adopted as %+v", a, b)
		}
	}
	adopts(first.Snapshot, true)
	adopts(second.Snapshot, true)
	must(t, w.r.DeleteSnapshots(t.Context(), first.Snapshot))
	adopts(second.Snapshot, true)
	must(t, w.store.Delete(t.Context(), old...)) // of the blobs of the base
	adopts(second.Snapshot, false)
	if n := w.store.counts["put locks"]; n == 0 {
		t.Error("no session had a lock")
	}
}

// TestTagsKnowTheResult: the tags of the snapshot can say what the backup uploaded.
func TestTagsKnowTheResult(t *testing.T) {
	w := newWorld(t)
	src := newDisk(4 * chunkSize)
	src.fill(1, 0, 1)
	o := options("v")
	o.Tags = func(_ context.Context, result Result) ([]string, error) {
		return []string{fmt.Sprint(result.StoredBytes, result.Full)}, nil
	}
	result := w.backup(src, o)
	if tags := w.snapshot(result.Snapshot).Tags; len(tags) != 1 || tags[0] != fmt.Sprint(result.StoredBytes, true) ||
		result.StoredBytes < 2*chunkSize {
		t.Errorf("tags %q, result %+v", tags, result)
	}
}
