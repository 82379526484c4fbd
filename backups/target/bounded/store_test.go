package bounded

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

// innerStore keeps objects in memory. It calls before at the start of each operation, and lets no context end an
// operation, as a system call.
type innerStore struct {
	before func(operation, name string)

	mu      sync.Mutex
	objects map[string][]byte
	started int // operations
}

func (s *innerStore) begin(operation, name string) {
	s.mu.Lock()
	s.started++
	s.mu.Unlock()
	if s.before != nil {
		s.before(operation, name)
	}
}

func (s *innerStore) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

func (s *innerStore) names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objects))
}

func (s *innerStore) Put(_ context.Context, name string, body []byte) error {
	s.begin("put", name)
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == "full" {
		return api.Errorf(api.Full, "no room")
	}
	s.objects[name] = bytes.Clone(body)
	return nil
}

func (s *innerStore) Get(_ context.Context, name string, _, _ int64) ([]byte, error) {
	s.begin("get", name)
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Clone(s.objects[name]), nil
}

func (s *innerStore) Stat(_ context.Context, name string) (target.Object, error) {
	s.begin("stat", name)
	return target.Object{Name: name}, nil
}

func (s *innerStore) List(_ context.Context, _ string, each func(target.Object) error) error {
	s.begin("list", "")
	for _, name := range s.names() {
		s.begin("next", name)
		if err := each(target.Object{Name: name}); err != nil {
			return err
		}
	}
	return nil
}

func (s *innerStore) Delete(_ context.Context, names ...string) error {
	for _, name := range names {
		s.begin("delete", name)
		s.mu.Lock()
		delete(s.objects, name)
		s.mu.Unlock()
	}
	return nil
}

// openStore opens a Store around an inner store, in a place with the name of the test.
func openStore(t *testing.T, before func(operation, name string), objects ...string) (*Store, *innerStore) {
	t.Helper()
	inner := &innerStore{before: before, objects: map[string][]byte{}}
	for _, name := range objects {
		inner.objects[name] = []byte(name)
	}
	s, err := Open(t.Context(), t.Name(), func(context.Context) (target.Store, error) { return inner, nil })
	must(t, err)
	return s, inner
}

// operations runs each operation.
func operations(ctx context.Context, s *Store) map[string]error {
	_, get := s.Get(ctx, "a", 0, 10)
	_, rest := s.Get(ctx, "a", 0, -1)
	_, stat := s.Stat(ctx, "a")
	return map[string]error{
		"get": get, "get to the end": rest, "stat": stat,
		"put":    s.Put(ctx, "b", []byte("b")),
		"list":   s.List(ctx, "", func(target.Object) error { return nil }),
		"delete": s.Delete(ctx, "a"),
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// mustHaveNoCalls fails the test if calls are left in any place.
func mustHaveNoCalls(t *testing.T) {
	t.Helper()
	calls.mu.Lock()
	defer calls.mu.Unlock()
	if len(calls.byPlace) != 0 {
		t.Errorf("calls are left: %v", calls.byPlace)
	}
}

// patientStore is an innerStore whose Put and Stat wait for the end of their context.
type patientStore struct{ *innerStore }

func (patientStore) Put(ctx context.Context, _ string, _ []byte) error {
	<-ctx.Done()
	return ctx.Err()
}

func (patientStore) Stat(ctx context.Context, _ string) (target.Object, error) {
	<-ctx.Done()
	return target.Object{}, ctx.Err()
}
