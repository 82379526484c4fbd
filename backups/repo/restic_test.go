package repo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/block/suite"
)

// restic is Debian's restic, the oracle of the format.
func restic(t testing.TB, folder string, args ...string) (output string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "restic", append([]string{"--no-cache", "--repo", folder}, args...)...)
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+password)
	cmd.WaitDelay = time.Second
	var all bytes.Buffer
	cmd.Stdout, cmd.Stderr = &all, &all
	err = cmd.Run()
	return all.String(), err
}

func mustRestic(t testing.TB, folder string, args ...string) string {
	t.Helper()
	output, err := restic(t, folder, args...)
	if err != nil {
		t.Fatalf("restic %v: %v\n%.2000s", args, err, output)
	}
	return output
}

// mustCheck demands that restic finds every byte in order.
func mustCheck(t testing.TB, folder string) {
	t.Helper()
	output := mustRestic(t, folder, "check", "--read-data", "--no-lock")
	if !strings.Contains(output, "no errors were found") {
		t.Errorf("restic check: %.2000s", output)
	}
}

// TestResticReadsOurRepository: restic opens the repository with both passwords, finds no error, and returns our config
// and blobs.
func TestResticReadsOurRepository(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	must(t, Init(t.Context(), store, "first", Options{}))
	r, err := Open(t.Context(), store, "first", Options{Cache: t.TempDir()})
	must(t, err)
	must(t, r.AddPassword(t.Context(), password))
	writeBlobs(t, r, 0, 200)
	b := loadIndex(t, r)
	w := newWriter(t, b, WriterOptions{})
	large := make([]byte, 3<<20)
	for i := range large[:2<<20] {
		large[i] = byte(rand.Uint32())
	}
	var ids []string
	for _, plain := range [][]byte{large[:2<<20], large[2<<20:]} {
		id, _, err := w.Add(t.Context(), blob.Data, plain)
		must(t, err)
		ids = append(ids, id.String())
	}
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	folder := store.save(t)
	mustCheck(t, folder)
	var c config
	must(t, json.Unmarshal([]byte(mustRestic(t, folder, "cat", "config")), &c))
	if c != r.config || c.Version != 2 {
		t.Errorf("restic reads the config %+v, want %+v", c, r.config)
	}
	for i, id := range ids {
		if got := mustRestic(t, folder, "cat", "blob", id); got != string(large[i*2<<20:min(i*2+2, 3)<<20]) {
			t.Errorf("restic reads %d other bytes of blob %s", len(got), id)
		}
	}
	if got := mustRestic(t, folder, "cat", "blob", blob.Sum(content(1)).String()); got != string(content(1)) {
		t.Errorf("restic reads %d other bytes of a compressed blob", len(got))
	}
	if n := strings.Count(mustRestic(t, folder, "list", "blobs"), "\n"); n != 202 {
		t.Errorf("restic lists %d blobs, want 202", n)
	}
}

// TestWeReadResticsRepository: we open a repository that restic wrote, and read the blobs of all pack headers by the
// index; we add blobs, and restic finds no error.
func TestWeReadResticsRepository(t *testing.T) {
	suite.System(t)
	folder, files := t.TempDir(), t.TempDir()
	random := make([]byte, 3<<20)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	for name, body := range map[string][]byte{"random": random, "empty": nil,
		"text": bytes.Repeat([]byte("words of text\n"), 200_000)} {
		must(t, os.WriteFile(filepath.Join(files, name), body, 0o600))
	}
	mustRestic(t, folder, "init", "--repository-version", "2")
	mustRestic(t, folder, "backup", files)
	must(t, os.WriteFile(filepath.Join(files, "more"), random[1<<20:2<<20], 0o600))
	mustRestic(t, folder, "backup", files)
	store := newMemoryStore()
	store.load(t, folder)
	r, err := Open(t.Context(), store, password, Options{Cache: t.TempDir()})
	must(t, err)
	b := loadIndex(t, r)
	total := 0
	for h := range packEntries(t, r, store) {
		plain, err := b.Read(t.Context(), h.id, h.kind, nil)
		must(t, err)
		total += len(plain)
	}
	if total < 5<<20 {
		t.Errorf("the blobs have %d bytes, less than the files", total)
	}
	w := newWriter(t, b, WriterOptions{})
	addBlobs(t, w, 0, 50)
	must(t, w.Flush(t.Context()))
	must(t, w.Close())
	mustCheck(t, store.save(t))
}

// TestResticPruneIsRefusedWhileWeLock: restic respects our shared and exclusive locks, shows the holder, and prunes
// after we unlocked.
func TestResticPruneIsRefusedWhileWeLock(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	r := newRepository(t, store)
	writeBlobs(t, r, 0, 50)
	shared, err := r.Lock(t.Context(), Shared)
	must(t, err)
	folder := store.save(t)
	if output, err := restic(t, folder, "prune"); err == nil || !strings.Contains(output, "already locked") ||
		!strings.Contains(output, "node-1") {
		t.Errorf("restic prune beside our lock: %v\n%.1000s", err, output)
	}
	mustRestic(t, folder, "snapshots")
	must(t, shared.Close(t.Context()))
	exclusive, err := r.Lock(t.Context(), Exclusive)
	must(t, err)
	output, err := restic(t, store.save(t), "snapshots")
	if err == nil || !strings.Contains(output, "locked exclusively") {
		t.Errorf("restic snapshots beside our exclusive lock: %v\n%.1000s", err, output)
	}
	must(t, exclusive.Close(t.Context()))
	folder = store.save(t)
	mustRestic(t, folder, "prune", "--max-unused", "0")
	pruned := newMemoryStore()
	pruned.load(t, folder)
	after := openRepository(t, pruned)
	if ok, err := loadIndex(t, after).Has(t.Context(), blob.Sum(content(0)), kindOf(0)); ok || err != nil {
		t.Errorf("a blob without a snapshot after prune: %v, %v", ok, err)
	}
	writeBlobs(t, after, 0, 50)
	mustCheck(t, pruned.save(t))
}

var errKilled = errors.New("killed")

// killAt makes a store fail from operation at on, as the store of a process that dies, or with once at this operation
// alone. With effect, the operation has its effect, although the caller gets an error. count returns the operations.
func killAt(store *memoryStore, at int, effect, once bool) (count func() int) {
	n := 0
	store.before = func(string, string) error {
		store.mu.Lock()
		defer store.mu.Unlock()
		if n++; n == at && !effect || n > at && !once {
			return errKilled
		}
		return nil
	}
	store.after = func(string, string) error {
		store.mu.Lock()
		defer store.mu.Unlock()
		if n == at && effect {
			return errKilled
		}
		return nil
	}
	return func() int {
		store.mu.Lock()
		defer store.mu.Unlock()
		return n
	}
}

// TestEveryKillLeavesAGoodRepository: a session that dies at, or is failed once at, any operation of the store leaves a
// repository that opens, holds every blob that a Flush promised, lets the next session write the rest, and is clean for
// restic.
func TestEveryKillLeavesAGoodRepository(t *testing.T) {
	suite.System(t)
	for variant, c := range []struct{ effect, once bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
		for at := 1; ; at++ {
			store := newMemoryStore()
			r := newRepository(t, store)
			count := killAt(store, at, c.effect, c.once)
			promised := writeInSteps(t.Context(), r)
			reached := count() >= at
			store.before, store.after = nil, nil
			next := openRepository(t, store)
			b := loadIndex(t, next)
			compareBlobs(t, b, 0, promised)
			must(t, b.Close())
			if at%20 == 5*variant || suite.All() {
				mustCheck(t, store.save(t))
			}
			if n := writeInSteps(t.Context(), next); n != steps*stepBlobs {
				t.Fatalf("after a kill at %d (%+v), the next session wrote %d blobs", at, c, n)
			}
			compareBlobs(t, loadIndex(t, next), 0, steps*stepBlobs)
			if at%20 == 5*variant+3 || suite.All() {
				mustCheck(t, store.save(t))
			}
			if !reached {
				break
			}
		}
	}
}

const steps, stepBlobs = 3, 6

// writeInSteps is a session that writes blobs in steps; the result is how many blobs a Flush promised to be durable.
func writeInSteps(ctx context.Context, r *Repository) (promised int) {
	lock, err := r.Lock(ctx, Shared)
	if err != nil {
		return 0
	}
	defer func() { _ = lock.Close(ctx) }()
	b, err := r.LoadIndex(ctx)
	if err != nil {
		return 0
	}
	defer b.Close()
	w, err := NewWriter(lock.Context(), b, WriterOptions{PackSize: 5000})
	if err != nil {
		return 0
	}
	defer func() { _ = w.Close() }()
	for step := range steps {
		for i := range stepBlobs {
			n := step*stepBlobs + i
			if _, _, err := w.Add(ctx, kindOf(n), content(n)); err != nil {
				return promised
			}
		}
		if w.Flush(ctx) != nil {
			return promised
		}
		promised += stepBlobs
	}
	return promised
}

// TestEveryKillOfInitCanBeRepeated: Init that died at any operation is repeated, and restic opens the result.
func TestEveryKillOfInitCanBeRepeated(t *testing.T) {
	suite.System(t)
	for _, effect := range []bool{false, true} {
		for at := 1; ; at++ {
			store := newMemoryStore()
			count := killAt(store, at, effect, false)
			err := Init(t.Context(), store, password, Options{})
			reached := count() >= at
			store.before, store.after = nil, nil
			if again := Init(t.Context(), store, password, Options{}); again != nil && len(store.names("config")) == 0 ||
				err == nil && again == nil {
				t.Errorf("killed at %d: %v, then %v", at, err, again)
			}
			if !reached {
				mustCheck(t, store.save(t))
				break
			}
			_, err = Open(t.Context(), store, password, Options{})
			must(t, err)
		}
	}
}
