package repo

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// memoryStore keeps objects in memory, with a clock of its own.
type memoryStore struct {
	skew time.Duration
	// before is called before each operation; an error of before fails the operation. after is called after each
	// Put and Delete.
	before, after func(operation, name string) error

	mu      sync.Mutex
	objects map[string]memoryObject
}

type memoryObject struct {
	body     []byte
	modified time.Time
}

func newMemoryStore() *memoryStore { return &memoryStore{objects: map[string]memoryObject{}} }

func (s *memoryStore) begin(ctx context.Context, operation, name string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.before != nil {
		return s.before(operation, name)
	}
	return nil
}

func (s *memoryStore) end(operation, name string) error {
	if s.after != nil {
		return s.after(operation, name)
	}
	return nil
}

func (s *memoryStore) Put(ctx context.Context, name string, body []byte) error {
	if err := s.begin(ctx, "put", name); err != nil {
		return err
	}
	s.mu.Lock()
	s.objects[name] = memoryObject{bytes.Clone(body), time.Now().Add(s.skew)}
	s.mu.Unlock()
	return s.end("put", name)
}

func (s *memoryStore) get(ctx context.Context, operation, name string) (memoryObject, error) {
	if err := s.begin(ctx, operation, name); err != nil {
		return memoryObject{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[name]
	if !ok {
		return o, api.Errorf(api.NotFound, "object %s does not exist", name)
	}
	return o, nil
}

func (s *memoryStore) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	o, err := s.get(ctx, "get", name)
	if err != nil {
		return nil, err
	}
	if n < 0 {
		n = int64(len(o.body)) - off
	}
	if off+n > int64(len(o.body)) {
		return nil, api.Errorf(api.Invalid, "object %s is short", name)
	}
	return bytes.Clone(o.body[off : off+n]), nil
}

func (s *memoryStore) Stat(ctx context.Context, name string) (target.Object, error) {
	o, err := s.get(ctx, "stat", name)
	return target.Object{Name: name, Size: int64(len(o.body)), Modified: o.modified}, err
}

func (s *memoryStore) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	if err := s.begin(ctx, "list", prefix); err != nil {
		return err
	}
	for _, name := range s.names(prefix) {
		s.mu.Lock()
		o := s.objects[name]
		s.mu.Unlock()
		if err := each(target.Object{Name: name, Size: int64(len(o.body)), Modified: o.modified}); err != nil {
			return err
		}
	}
	return nil
}

func (s *memoryStore) Delete(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := s.begin(ctx, "delete", name); err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.objects, name)
		s.mu.Unlock()
		if err := s.end("delete", name); err != nil {
			return err
		}
	}
	return nil
}

func (s *memoryStore) names(prefix string) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.objects {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// change replaces the body of an object.
func (s *memoryStore) change(name string, change func(body []byte) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.objects[name]
	o.body = change(bytes.Clone(o.body))
	s.objects[name] = o
}

// save writes all objects into a new folder, for restic.
func (s *memoryStore) save(t testing.TB) string {
	folder := t.TempDir()
	for _, sub := range []string{"data", "index", "keys", "locks", "snapshots"} {
		must(t, os.MkdirAll(filepath.Join(folder, sub), 0o700))
	}
	for _, name := range s.names("") {
		path := filepath.Join(folder, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		must(t, os.WriteFile(path, s.objects[name].body, 0o600))
	}
	return folder
}

// load reads all objects of a folder, which restic wrote.
func (s *memoryStore) load(t testing.TB, folder string) {
	must(t, filepath.WalkDir(folder, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		body, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, path)
		return errors.Join(err, s.Put(t.Context(), filepath.ToSlash(name), body))
	}))
}

const password = "correct horse"

// template is a repository that the tests copy: to derive keys from passwords takes long.
var template = sync.OnceValue(func() *Repository {
	ctx, store := context.Background(), newMemoryStore()
	if err := Init(ctx, store, password, Options{}); err != nil {
		panic(err)
	}
	r, err := Open(ctx, store, password, Options{})
	if err != nil {
		panic(err)
	}
	// The encoders are made outside of all bubbles of synctest.
	fastEncoder().EncodeAll([]byte("x"), nil)
	betterEncoder().EncodeAll([]byte("x"), nil)
	_, _ = blobDecoder().DecodeAll(nil, nil)
	return r
})

// newRepository copies the template into store and opens the copy.
func newRepository(t testing.TB, store *memoryStore) *Repository {
	t.Helper()
	from := template().store.(*memoryStore)
	for _, name := range from.names("") {
		must(t, store.Put(t.Context(), name, from.objects[name].body))
	}
	return openRepository(t, store)
}

// openRepository opens a copy of the template, as a process of node-1 with an empty cache.
func openRepository(t testing.TB, store target.Store) *Repository {
	t.Helper()
	r := *template()
	r.store, r.options = store, Options{Cache: t.TempDir(), Hostname: "node-1"}.withDefaults()
	r.openCache()
	return &r
}

func loadIndex(t testing.TB, r *Repository) *Blobs {
	t.Helper()
	b, err := r.LoadIndex(t.Context())
	must(t, err)
	t.Cleanup(func() { must(t, b.Close()) })
	return b
}

// hangingStore answers no Stat until the context of the call ends.
type hangingStore struct{ *memoryStore }

func (hangingStore) Stat(ctx context.Context, _ string) (target.Object, error) {
	<-ctx.Done()
	return target.Object{}, ctx.Err()
}
