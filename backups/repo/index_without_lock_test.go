package repo

import (
	"context"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/target"
)

// lateStore answers the first Put of an index file with an error, and keeps what a bounded store does when the object
// appears later.
type lateStore struct {
	*memoryStore
	late func() error // writes the object and undoes the Put
}

func (s *lateStore) Put(ctx context.Context, name string, body []byte) error {
	if s.late != nil || !strings.HasPrefix(name, indexFolder) {
		return s.memoryStore.Put(ctx, name, body)
	}
	s.late = func() error {
		ctx := context.WithoutCancel(ctx)
		if err := s.memoryStore.Put(ctx, name, body); err != nil {
			return err
		}
		return target.Undo(ctx, s.memoryStore, name)
	}
	return api.Errorf(api.Unavailable, "no answer in time")
}

// TestLateIndexFileKeepsPacksThatExist: an index file appears after its session failed. Without a sweep in between, the
// file stays, because another session may have read the file and rely on its packs; packs that a sweep deleted meanwhile
// are in no index file.
func TestLateIndexFileKeepsPacksThatExist(t *testing.T) {
	for _, swept := range []bool{false, true} {
		store := &lateStore{memoryStore: newMemoryStore()}
		newRepository(t, store.memoryStore)
		r := openRepository(t, store)
		lock, err := r.Lock(t.Context(), Shared)
		must(t, err)
		w, err := NewWriter(lock.Context(), loadIndex(t, r), WriterOptions{Lock: lock})
		must(t, err)
		id, _, err := w.Add(t.Context(), blob.Data, content(1))
		must(t, err)
		if err := w.Flush(t.Context()); !api.Is(err, api.Unavailable) {
			t.Fatalf("flush: %v, want an error of kind unavailable", err)
		}
		_ = w.Close() // the same error
		must(t, lock.Close(t.Context()))
		if swept {
			mustSweep(t, openRepository(t, store.memoryStore))
		}
		must(t, store.late())
		has, err := loadIndex(t, openRepository(t, store.memoryStore)).Has(t.Context(), id, blob.Data)
		must(t, err)
		if has == swept || len(store.names(dataFolder)) > 0 == swept {
			t.Errorf("swept %v: the index has the blob: %v; packs %v", swept, has, store.names(dataFolder))
		}
	}
}

// TestSweepDropsDeletedPacksFromALateIndexFile: a session without its lock writes an index file, and finds its packs,
// before a sweep deletes the packs. The sweep takes the packs out of the index.
func TestSweepDropsDeletedPacksFromALateIndexFile(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	saveFiles(t, r, 20_000, 1)
	kept := len(store.names(dataFolder))
	deleted := saveFiles(t, r, 20_000, 2)
	var file index.FileBuilder
	for _, f := range listAll(t, r, indexFolder) {
		_, err := r.scanIndexFile(t.Context(), f, func(p index.Pack) error {
			file.Add(p)
			return nil
		})
		must(t, err)
	}
	must(t, r.DeleteSnapshots(t.Context(), deleted.ID))
	written := false
	store.before = func(operation, name string) error {
		if operation == "delete" && strings.HasPrefix(name, dataFolder) && !written {
			written = true
			id, err := r.saveFile(t.Context(), indexFolder, file.Bytes())
			must(t, err)
			return r.correctIndex(t.Context(), store, id, file.Bytes())
		}
		return nil
	}
	mustSweep(t, openRepository(t, store))
	if n := len(store.names(dataFolder)); !written || n != kept {
		t.Errorf("written %v: %d packs are left, want %d", written, n, kept)
	}
	for _, f := range listAll(t, r, indexFolder) {
		_, err := r.scanIndexFile(t.Context(), f, func(p index.Pack) error {
			_, err := store.Stat(t.Context(), packName(p.ID))
			return err
		})
		must(t, err)
	}
	hasFiles(t, openRepository(t, store), 1)
}
