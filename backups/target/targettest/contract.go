// Package targettest has the contract of target.Store as tests for every store. Only tests import the package.
package targettest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
)

// Run tests the stores that open makes. Each store must be empty.
func Run(t *testing.T, open func(t *testing.T) target.Store) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s target.Store)
	}{
		{"an object comes back unchanged", testWhole},
		{"a range has exactly its bytes", testRanges},
		{"a missing object is not found", testMissing},
		{"a list has all objects of a prefix", testList},
		{"a list of folders has each folder once", testFolders},
		{"delete removes the named objects", testDelete},
		{"a put replaces an object whole", testReplace},
		{"a list shows no half object", testListDuringPuts},
		{"the end of a context ends the operation", testContext},
		{"bad names are refused", testNames},
		{"the store's clock runs forward", testModified},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

// Body makes n bytes in aligned memory that seed determines.
func Body(n int, seed uint64) []byte {
	b := block.AlignedBuffer(n)
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

// List is the objects of s with prefix, by name.
func List(t *testing.T, s target.Store, prefix string) map[string]target.Object {
	t.Helper()
	objects := map[string]target.Object{}
	err := s.List(t.Context(), prefix, func(o target.Object) error {
		if _, twice := objects[o.Name]; twice {
			t.Errorf("the list has %s twice", o.Name)
		}
		objects[o.Name] = o
		return nil
	})
	if err != nil {
		t.Fatalf("list %q: %v", prefix, err)
	}
	return objects
}

func mustPut(t *testing.T, s target.Store, name string, body []byte) {
	t.Helper()
	if err := s.Put(t.Context(), name, body); err != nil {
		t.Fatalf("put %s: %v", name, err)
	}
}

func mustHave(t *testing.T, s target.Store, name string, body []byte) {
	t.Helper()
	got, err := s.Get(t.Context(), name, 0, -1)
	if err != nil || !bytes.Equal(got, body) {
		t.Fatalf("get %s: %d bytes, equal: %v, %v; want %d", name, len(got), bytes.Equal(got, body), err, len(body))
	}
	o, err := s.Stat(t.Context(), name)
	if err != nil || o.Name != name || o.Size != int64(len(body)) {
		t.Fatalf("stat %s: %+v, %v; want %d bytes", name, o, err, len(body))
	}
}

func mustBe(t *testing.T, err error, kind api.Kind, what string) {
	t.Helper()
	if !api.Is(err, kind) {
		t.Errorf("%s: error %v of kind %v, want kind %v", what, err, api.KindOf(err), kind)
	}
}

// testWhole: Put and Get keep bodies of any size, from aligned and from other memory, and Put takes no part of the
// memory over.
func testWhole(t *testing.T, s target.Store) {
	sizes := []int{0, 1, 511, block.Size - 1, block.Size, block.Size + 1, 1<<20 + 1, 4 << 20, 4<<20 + block.Size + 3,
		32 << 20, 32<<20 + 123}
	for i, n := range sizes {
		for _, shift := range []int{0, 1} {
			name := fmt.Sprintf("data/%02d/%d-%d", i, n, shift)
			mem := Body(n+shift, uint64(i))
			body := mem[shift:]
			want := slices.Clone(body)
			mustPut(t, s, name, body)
			if !bytes.Equal(body, want) {
				t.Fatalf("%s: Put changed the body", name)
			}
			clear(mem)
			mustHave(t, s, name, want)
		}
	}
}

// testRanges: Get returns the bytes of a range, and an error of kind invalid for a range beyond the object, never fewer
// bytes.
func testRanges(t *testing.T, s target.Store) {
	const size = 10_000
	body := Body(size, 1)
	mustPut(t, s, "data/a", body)
	for _, c := range []struct{ off, n int64 }{
		{0, size}, {0, 1}, {size - 1, 1}, {4096, 4096}, {1, size - 1}, {0, -1}, {1, -1}, {size - 1, -1}, {size, -1},
		{0, 0}, {5, 0}, {size, 0},
	} {
		want := body[c.off:]
		if c.n >= 0 {
			want = want[:c.n]
		}
		got, err := s.Get(t.Context(), "data/a", c.off, c.n)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes from %d: got %d bytes, %v", c.n, c.off, len(got), err)
		}
	}
	for _, c := range []struct{ off, n int64 }{
		{0, size + 1}, {size, 1}, {size - 1, 2}, {size + 1, -1}, {size + 1, 0}, {size + 1, 1}, {1 << 40, 1 << 20},
		{-1, 1}, {-1, -1}, {1 << 62, 1 << 62}, {size, 1<<63 - 1},
	} {
		got, err := s.Get(t.Context(), "data/a", c.off, c.n)
		mustBe(t, err, api.Invalid, fmt.Sprintf("%d bytes from %d (got %d)", c.n, c.off, len(got)))
	}
	mustPut(t, s, "empty", nil)
	mustHave(t, s, "empty", nil)
	_, err := s.Get(t.Context(), "empty", 0, 1)
	mustBe(t, err, api.Invalid, "a byte of an empty object")
}

// testMissing: Get and Stat of a missing object have kind not found, also where the name is a folder; Delete succeeds,
// and a list is empty.
func testMissing(t *testing.T, s target.Store) {
	mustPut(t, s, "data/ab/c", []byte("x"))
	for _, name := range []string{"config", "data/zz", "data/ab/c1", "data/ab", "data", "none/of/this"} {
		for _, n := range []int64{-1, 0, 1} {
			_, err := s.Get(t.Context(), name, 0, n)
			mustBe(t, err, api.NotFound, fmt.Sprintf("get %d bytes of %s", n, name))
		}
		_, err := s.Stat(t.Context(), name)
		mustBe(t, err, api.NotFound, "stat "+name)
		if err := s.Delete(t.Context(), name); err != nil {
			t.Errorf("delete %s: %v", name, err)
		}
	}
	for _, prefix := range []string{"none", "none/", "none/of/", "data/ab/c/"} {
		if got := List(t, s, prefix); len(got) != 0 {
			t.Errorf("list %q: %v, want nothing", prefix, got)
		}
	}
	mustHave(t, s, "data/ab/c", []byte("x"))
}

// many is more than a page of a list and more than a batch of a delete.
const many = 1_100

func putMany(t *testing.T, s target.Store) []string {
	var names []string
	for i := range many {
		names = append(names, fmt.Sprintf("data/%02x/%04d", i%7, i))
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < many; i += 8 {
				if err := s.Put(t.Context(), names[i], make([]byte, i%5)); err != nil {
					t.Errorf("put %s: %v", names[i], err)
					return
				}
			}
		})
	}
	wg.Wait()
	return names
}

// testList: a list of more than one page has each object with the prefix once, with the right size, and nothing else.
// An error of the callback ends the list.
func testList(t *testing.T, s target.Store) {
	names := putMany(t, s)
	mustPut(t, s, "data-other", []byte("x"))
	mustPut(t, s, "index/1", []byte("x"))
	for prefix, want := range map[string]int{
		"": many + 2, "d": many + 1, "data/": many, "data/00/": many/7 + 1, "data/0": many, "data/00/0": 143,
		"data/00/0007": 1, "index/": 1, "index/2": 0,
	} {
		if got := List(t, s, prefix); len(got) != want {
			t.Errorf("list %q: %d objects, want %d", prefix, len(got), want)
		}
	}
	all := List(t, s, "data/")
	for i, name := range names {
		if o, ok := all[name]; !ok || o.Size != int64(i%5) || o.Modified.IsZero() {
			t.Fatalf("the list has %+v for %s, want %d bytes", o, name, i%5)
		}
	}
	stop, calls := errors.New("enough"), 0
	err := s.List(t.Context(), "", func(target.Object) error { calls++; return stop })
	if !errors.Is(err, stop) || calls != 1 {
		t.Errorf("after an error of the callback: %d calls, %v", calls, err)
	}
}

// testDelete: Delete removes more objects than one batch has, among them missing ones, and no other object.
func testFolders(t *testing.T, s target.Store) {
	for _, name := range []string{"a/b/1", "a/b/2", "a/c/d/1", "a/file", "ab/x/1", "b"} {
		mustPut(t, s, name, Body(8, 1))
	}
	for prefix, want := range map[string][]string{"a/": {"b", "c"}, "a/c/": {"d"}, "a/b/": nil, "x/": nil} {
		var got []string
		err := target.ListFolders(t.Context(), s, prefix, func(name string) error {
			got = append(got, name)
			return nil
		})
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("folders of %s: %v, %v; want %v", prefix, got, err, want)
		}
	}
	stop := errors.New("stop")
	if err := target.ListFolders(t.Context(), s, "a/", func(string) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("an error of each: %v", err)
	}
	if err := target.ListFolders(t.Context(), s, "../", nil); !api.Is(err, api.Invalid) {
		t.Errorf("a bad prefix: %v", err)
	}
}

func testDelete(t *testing.T, s target.Store) {
	names := putMany(t, s)
	mustPut(t, s, "data/00/stays", []byte("x"))
	if err := s.Delete(t.Context()); err != nil {
		t.Fatalf("delete nothing: %v", err)
	}
	if err := s.Delete(t.Context(), append(names, "data/00/none", "none/none", names[0])...); err != nil {
		t.Fatalf("delete: %v", err)
	}
	if got := List(t, s, ""); len(got) != 1 || got["data/00/stays"].Size != 1 {
		t.Errorf("after the delete the list has %d objects, want data/00/stays alone", len(got))
	}
	mustPut(t, s, names[0], []byte("back"))
	mustHave(t, s, names[0], []byte("back"))
}

// testReplace: after a second Put an object has the second body, longer or shorter. A read meanwhile has one of the
// two bodies, whole.
func testReplace(t *testing.T, s target.Store) {
	long, short := Body(3<<20, 1), Body(5000, 2)
	mustPut(t, s, "config", long)
	mustPut(t, s, "config", short)
	mustHave(t, s, "config", short)
	if got := List(t, s, ""); len(got) != 1 || got["config"].Size != int64(len(short)) {
		t.Fatalf("the list has %v, want one object", got)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for i := range 20 {
			if err := s.Put(t.Context(), "config", [][]byte{long, short}[i%2]); err != nil {
				t.Error(err)
			}
		}
	})
	for range 20 {
		got, err := s.Get(t.Context(), "config", 0, -1)
		if err != nil || !bytes.Equal(got, long) && !bytes.Equal(got, short) {
			t.Fatalf("a read during a replacement: %d bytes, %v", len(got), err)
		}
	}
}

// testListDuringPuts: each object of a list has the final size, and Get reads the object whole, while several callers
// put objects.
func testListDuringPuts(t *testing.T, s target.Store) {
	const writers, each, size = 4, 8, 2<<20 + 5
	bodies := make([][]byte, writers)
	for w := range writers {
		bodies[w] = Body(size, uint64(w))
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if err := s.Put(t.Context(), fmt.Sprintf("data/%d/%d", i, w), bodies[w]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	go func() { wg.Wait(); close(done) }()
	defer func() { <-done }()
	for last := false; !last; {
		select {
		case <-done:
			last = true
		default:
		}
		objects := List(t, s, "data/")
		for name, o := range objects {
			if o.Size != size {
				t.Fatalf("the list shows %s with %d bytes, want %d", name, o.Size, size)
			}
		}
		for name := range objects { // any
			mustHave(t, s, name, bodies[name[len(name)-1]-'0'])
			break
		}
		if last && len(objects) != writers*each {
			t.Fatalf("in the end the list has %d objects, want %d", len(objects), writers*each)
		}
	}
}

// testContext: with an ended context each operation fails with the context's error, and changes nothing.
func testContext(t *testing.T, s target.Store) {
	mustPut(t, s, "data/a", []byte("a"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, get := s.Get(ctx, "data/a", 0, -1)
	_, empty := s.Get(ctx, "data/a", 0, 0)
	_, stat := s.Stat(ctx, "data/a")
	for name, err := range map[string]error{
		"get": get, "get of nothing": empty, "stat": stat,
		"put":    s.Put(ctx, "data/b", Body(1<<20, 1)),
		"list":   s.List(ctx, "data/", func(target.Object) error { return nil }),
		"delete": s.Delete(ctx, "data/a"),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s with an ended context: %v", name, err)
		}
	}
	if got := List(t, s, ""); len(got) != 1 || got["data/a"].Size != 1 {
		t.Errorf("the list has %v, want data/a alone", got)
	}
}

// testNames: each operation refuses the names that CheckName refuses, with kind invalid, and changes nothing; a Delete
// with a bad name among good names deletes no object.
func testNames(t *testing.T, s target.Store) {
	mustPut(t, s, "data/a", []byte("a"))
	for _, name := range []string{"", "/", "..", "../x", "data/../../x", "data/../a", "/etc/passwd", "data/", "data//a",
		".hidden", "data/.a", "data/a\x00", "\x00", "a\\b", "a b", "data/\xff"} {
		_, get := s.Get(t.Context(), name, 0, -1)
		_, stat := s.Stat(t.Context(), name)
		for operation, err := range map[string]error{
			"get": get, "stat": stat,
			"put":    s.Put(t.Context(), name, []byte("x")),
			"delete": s.Delete(t.Context(), "data/a", name),
		} {
			mustBe(t, err, api.Invalid, fmt.Sprintf("%s %q", operation, name))
		}
	}
	for _, prefix := range []string{"..", "../", "/", "/etc", "data/../", "data//", ".", "a\x00"} {
		err := s.List(t.Context(), prefix, func(target.Object) error { return nil })
		mustBe(t, err, api.Invalid, fmt.Sprintf("list %q", prefix))
	}
	if got := List(t, s, ""); len(got) != 1 || got["data/a"].Size != 1 {
		t.Errorf("the list has %v, want data/a alone", got)
	}
}

// testModified: a later object is not older than an earlier one, and Stat and List give the same time, to the second.
func testModified(t *testing.T, s target.Store) {
	var last time.Time
	for i := range 5 {
		mustPut(t, s, fmt.Sprintf("locks/%d", i), nil)
	}
	all := List(t, s, "locks/")
	for i := range 5 {
		o := all[fmt.Sprintf("locks/%d", i)]
		if o.Modified.Before(last) {
			t.Errorf("%s is from %v, an earlier object from %v", o.Name, o.Modified, last)
		}
		last = o.Modified
		st, err := s.Stat(t.Context(), o.Name)
		if err != nil || st.Modified.Sub(o.Modified).Abs() > time.Second {
			t.Errorf("%s: %v by Stat, %v by List, %v", o.Name, st.Modified, o.Modified, err)
		}
	}
}
