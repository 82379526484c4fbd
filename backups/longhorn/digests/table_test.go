package digests

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// key is the key of chunk n.
func key(n int) Key {
	return Key{sha256.Sum256(fmt.Appendf(nil, "name %d", n/8)), uint32(n % 8)} //nolint:gosec // small
}

func digestOf(n int) [Size]byte { return sha256.Sum256(fmt.Appendf(nil, "digest %d", n)) }

func openTable(t testing.TB, path string, most uint) *Table {
	t.Helper()
	table, err := open(path, most)
	must(t, err)
	t.Cleanup(func() { _ = table.Close() })
	return table
}

// countKnown counts the known chunks among the first n, and demands their own digests.
func countKnown(t *testing.T, table *Table, n int) (known int) {
	t.Helper()
	for i := range n {
		e, ok := table.Find(key(i))
		if ok && e.Digest != digestOf(i) {
			t.Fatalf("chunk %d has the digest %x", i, e.Digest)
		}
		if ok {
			known++
		}
	}
	return known
}

// TestTableGrowsAndIsFoundAgain: a table knows all of many chunks, also after a restart, in a file of a bounded size.
func TestTableGrowsAndIsFoundAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "below", "digests")
	table := openTable(t, path, mostBits)
	const n = 5000
	for i := range n {
		if table.Put(key(i), digestOf(i), uint64(i%3)) {
			t.Fatal("a new chunk contradicts")
		}
	}
	must(t, table.Close())
	table = openTable(t, path, mostBits)
	if known := countKnown(t, table, n); known != n {
		t.Errorf("%d of %d chunks are known", known, n)
	}
	info, err := os.Stat(path)
	must(t, err)
	if info.Size() > n*entrySize*2*leastLoad {
		t.Errorf("%d chunks take %d bytes", n, info.Size())
	}
	if _, ok := table.Find(key(n)); ok {
		t.Error("a chunk is known that nobody put")
	}
	var none *Table
	if _, ok := none.Find(key(1)); ok || none.Put(key(1), digestOf(1), 0) || none.Close() != nil {
		t.Error("no table knows a chunk")
	}
}

// TestMarksStay: a Put without a mark leaves the mark. Put reports another digest, which replaces the former.
func TestMarksStay(t *testing.T) {
	table := openTable(t, filepath.Join(t.TempDir(), "digests"), mostBits)
	table.Put(key(1), digestOf(1), 7)
	table.Put(key(1), digestOf(1), 0)
	if e, ok := table.Find(key(1)); !ok || e != (Entry{digestOf(1), 7}) {
		t.Errorf("after a Put without a mark: %+v", e)
	}
	if !table.Put(key(1), digestOf(2), 8) {
		t.Error("another digest is not told")
	}
	if e, ok := table.Find(key(1)); !ok || e != (Entry{digestOf(2), 8}) {
		t.Errorf("after a Put of another digest: %+v", e)
	}
}

// TestChangedFilesTellNothingWrong: a table whose file was cut, changed or replaced knows fewer chunks, tells no wrong
// digest, and takes the chunks again. An open table whose file was deleted or changed does the same.
func TestChangedFilesTellNothingWrong(t *testing.T) {
	const n = 400
	random := rand.New(rand.NewPCG(1, 2))
	other := filepath.Join(t.TempDir(), "other")
	o := openTable(t, other, mostBits)
	for i := range n {
		o.Put(key(i), digestOf(i+1), 0)
	}
	theirs, err := os.ReadFile(other)
	must(t, err)
	for name, change := range map[string]func([]byte) []byte{
		"a bit of each page": func(b []byte) []byte {
			for page := 0; page < len(b); page += pageSize {
				b[page+random.IntN(pageSize)] ^= 1 << random.IntN(8)
			}
			return b
		},
		"a bit of the entries": func(b []byte) []byte {
			for page := pageSize; page < len(b); page += pageSize {
				b[page+headerSize+random.IntN(perPage*entrySize)] ^= 1 << random.IntN(8)
			}
			return b
		},
		"cut":               func(b []byte) []byte { return b[:len(b)-100] },
		"cut by half":       func(b []byte) []byte { return b[:len(b)/2/pageSize*pageSize] },
		"empty":             func([]byte) []byte { return nil },
		"zeros":             func(b []byte) []byte { return make([]byte, len(b)) },
		"longer":            func(b []byte) []byte { return append(b, make([]byte, pageSize)...) },
		"pages of another":  func(b []byte) []byte { return append(b[:pageSize:pageSize], theirs[pageSize:]...) },
		"pages in disorder": func(b []byte) []byte { return append(b[:pageSize:pageSize], swapPages(b[pageSize:])...) },
	} {
		for _, isOpen := range []bool{false, true} {
			t.Run(fmt.Sprint(name, isOpen), func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "digests")
				table := openTable(t, path, mostBits)
				for i := range n {
					table.Put(key(i), digestOf(i), 0)
				}
				b, err := os.ReadFile(path)
				must(t, err)
				must(t, os.WriteFile(path, change(bytes.Clone(b)), 0o600))
				if !isOpen {
					must(t, table.Close())
					table = openTable(t, path, mostBits)
				}
				if known := countKnown(t, table, n); known == n && name != "longer" {
					t.Errorf("%d chunks are known", known)
				}
				for i := range n {
					if table.Put(key(i), digestOf(i), 0) {
						t.Fatal("a damaged entry contradicts")
					}
				}
				if known := countKnown(t, table, n); known != n {
					t.Errorf("%d of %d chunks are known again", known, n)
				}
			})
		}
	}
	path := filepath.Join(t.TempDir(), "digests")
	table := openTable(t, path, mostBits)
	table.Put(key(1), digestOf(1), 0)
	must(t, os.Remove(path))
	if known := countKnown(t, table, n); known != 1 {
		t.Errorf("after the deletion of the file %d chunks are known", known)
	}
	if known := countKnown(t, openTable(t, path, mostBits), n); known != 0 {
		t.Errorf("a new table knows %d chunks", known)
	}
}

func swapPages(b []byte) []byte {
	var swapped []byte
	for page := len(b) - pageSize; page >= 0; page -= pageSize {
		swapped = append(swapped, b[page:page+pageSize]...)
	}
	return swapped
}

// TestFullTableForgetsTheOldest: at the largest size, a table keeps the newest chunks.
func TestFullTableForgetsTheOldest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "digests")
	table := openTable(t, path, 1)
	now := time.Unix(0, 0)
	table.now = func() time.Time { return now }
	const n = 400
	for i := range n {
		now = now.Add(time.Hour)
		table.Put(key(i), digestOf(i), 0)
	}
	info, err := os.Stat(path)
	must(t, err)
	if info.Size() != 3*pageSize {
		t.Errorf("the file has %d bytes", info.Size())
	}
	if known := countKnown(t, table, n); known != 2*perPage {
		t.Errorf("%d chunks are known, %d fit", known, 2*perPage)
	}
	for i := n - perPage/2; i < n; i++ {
		if _, ok := table.Find(key(i)); !ok {
			t.Errorf("chunk %d, one of the last, is forgotten", i)
		}
	}
}

// TestChosenNamesMakeNoLargeFile: names that belong to one page leave the file small.
func TestChosenNamesMakeNoLargeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "digests")
	table := openTable(t, path, mostBits)
	for i := range 2000 {
		k := key(i)
		copy(k.Name[:8], make([]byte, 8))
		k.Part = 0
		table.Put(k, digestOf(i), 0)
	}
	info, err := os.Stat(path)
	must(t, err)
	if info.Size() > 16*pageSize {
		t.Errorf("the file has %d bytes", info.Size())
	}
}

// TestTableIsUsedAtOnce: readers and writers at once see whole entries.
func TestTableIsUsedAtOnce(t *testing.T) {
	table := openTable(t, filepath.Join(t.TempDir(), "digests"), mostBits)
	var group sync.WaitGroup
	for w := range 4 {
		group.Go(func() {
			for i := w; i < 1000; i += 4 {
				table.Put(key(i), digestOf(i), 1)
				if e, ok := table.Find(key(i)); !ok || e.Digest != digestOf(i) {
					t.Errorf("chunk %d: %+v, %v", i, e, ok)
				}
			}
		})
	}
	group.Wait()
}
