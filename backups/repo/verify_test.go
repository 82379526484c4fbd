package repo

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/suite"
)

var lastPack = blob.ID(bytes.Repeat([]byte{0xff}, len(blob.ID{})))

// verifyAll verifies all packs, as a new process.
func verifyAll(t testing.TB, store *memoryStore) VerifyStats {
	t.Helper()
	stats, err := openRepository(t, store).Verify(t.Context(), VerifyOptions{Until: lastPack,
		Writer: WriterOptions{PackSize: 20_000}})
	must(t, err)
	if !stats.Done || stats.Last != lastPack {
		t.Errorf("not all packs were verified: %+v", stats)
	}
	return stats
}

func check(t testing.TB, store *memoryStore) Damage {
	t.Helper()
	d, err := openRepository(t, store).Check(t.Context(), WriterOptions{PackSize: 20_000})
	must(t, err)
	return d
}

func (s *memoryStore) clone() *memoryStore {
	c := newMemoryStore()
	for _, name := range s.names("") {
		c.objects[name] = s.objects[name]
	}
	return c
}

// harms are ways to damage an object.
var harms = map[string]func(s *memoryStore, name string){
	"first bit":  func(s *memoryStore, name string) { s.change(name, flip(0)) },
	"middle bit": func(s *memoryStore, name string) { s.change(name, flip(-1)) },
	"shortened":  func(s *memoryStore, name string) { s.change(name, func(b []byte) []byte { return b[:len(b)-1] }) },
	"emptied":    func(s *memoryStore, name string) { s.change(name, func([]byte) []byte { return nil }) },
	"lengthened": func(s *memoryStore, name string) { s.change(name, func(b []byte) []byte { return append(b, 0) }) },
	"deleted": func(s *memoryStore, name string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.objects, name)
	},
}

func flip(at int) func([]byte) []byte {
	return func(b []byte) []byte {
		if at < 0 {
			b[len(b)/2] ^= 4
		} else {
			b[at] ^= 4
		}
		return b
	}
}

// TestDamageOfAnyObjectIsFound: each object of a repository is damaged in each way. Verify and Check name the object, or
// an earlier step refuses the repository with an error that names it, or Verify and Check repair the index. A deleted
// snapshot is no damage: a deletion looks the same. The next list writes a damaged snapshot record again.
func TestDamageOfAnyObjectIsFound(t *testing.T) {
	origin := newMemoryStore()
	r := newRepository(t, origin)
	saveFiles(t, r, 20_000, numbers(0, 30)...)
	saveFiles(t, r, 20_000, numbers(20, 40)...)
	if stats, d := verifyAll(t, origin), check(t, origin); len(stats.Damaged) > 0 || !d.IsZero() ||
		stats.Packs != len(origin.names(dataFolder)) {
		t.Fatalf("a whole repository: %+v, %+v", stats, d)
	}
	for _, name := range origin.names("") {
		for how, harm := range harms {
			if strings.HasPrefix(name, snapshotsFolder) && how == "deleted" || name == recordName {
				continue
			}
			store := origin.clone()
			harm(store, name)
			open := openRepository
			if name == configName || strings.HasPrefix(name, keysFolder) { // else the derivation of keys takes long
				open = nil
			}
			said, refused := whatIsDamaged(t, store, open)
			id := name[strings.LastIndex(name, "/")+1:]
			if how == "deleted" && strings.HasPrefix(name, keysFolder) {
				id = "no key file" // no other file has the name
			}
			if strings.HasPrefix(name, indexFolder) { // the headers of the packs tell what the file had
				id = ""
				hasFiles(t, openRepository(t, store), numbers(0, 40)...)
				if said != "" || refused != nil {
					t.Errorf("%s %s: found %q, refused %v after the repair", name, how, said, refused)
				}
			}
			if !strings.Contains(said, id[:min(len(id), 8)]) {
				t.Errorf("%s %s: found %q, refused %v", name, how, said, refused)
			}
		}
	}
}

// whatIsDamaged names all that a verification finds in a store.
func whatIsDamaged(t *testing.T, store *memoryStore, open func(testing.TB, target.Store) *Repository) (said string,
	refused error) {
	t.Helper()
	var r *Repository
	if open != nil {
		r = open(t, store)
	} else if r, refused = Open(t.Context(), store, password, Options{Cache: t.TempDir()}); refused != nil {
		return refused.Error(), refused
	}
	stats, err := r.Verify(t.Context(), VerifyOptions{Until: lastPack, Writer: WriterOptions{PackSize: 20_000}})
	if err != nil {
		return err.Error(), err
	}
	for _, p := range stats.Damaged {
		said += p.ID.String() + " "
	}
	d, err := r.Check(t.Context(), WriterOptions{PackSize: 20_000})
	must(t, err)
	for _, name := range d.Objects {
		said += name[strings.LastIndex(name, "/")+1:] + " "
	}
	if len(d.Blobs) > 0 && len(d.Snapshots) > 0 {
		said += "blob "
	}
	return said, nil
}

// TestWritingDamagedBlobsAgainHeals: one blob of a pack is damaged. Verify copies the others; Check names the blob and
// the snapshots that need it, and no others. A session that adds all files again stores this one blob. Afterwards all is
// whole, the sweep deletes the damaged pack, and restic finds no error.
func TestWritingDamagedBlobsAgainHeals(t *testing.T) {
	suite.System(t)
	store := newMemoryStore()
	r := newRepository(t, store)
	first := saveFiles(t, r, 60_000, numbers(0, 30)...)
	second := saveFiles(t, r, 60_000, numbers(10, 40)...)
	saveFiles(t, r, 60_000, numbers(25, 50)...)
	b := loadIndex(t, r)
	l, ok, err := b.Find(t.Context(), blob.Sum(content(20)), blob.Data)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	store.change(packName(l.Pack), flip(int(l.Offset)+20))
	stats := verifyAll(t, store)
	if len(stats.Damaged) != 1 || stats.Damaged[0].ID != l.Pack || stats.Copied == 0 {
		t.Fatalf("verified: %+v, want damage of pack %s", stats, l.Pack)
	}
	if again := verifyAll(t, store); again.Copied != 0 {
		t.Errorf("the second verification copies again: %+v", again)
	}
	d := check(t, store)
	slices.SortFunc(d.Snapshots, func(a, b blob.ID) int { return bytes.Compare(a[:], b[:]) })
	want := []blob.ID{first.ID, second.ID}
	slices.SortFunc(want, func(a, b blob.ID) int { return bytes.Compare(a[:], b[:]) })
	if _, found := d.Blobs[l.ID]; len(d.Blobs) != 1 || !found || !slices.Equal(d.Snapshots, want) {
		t.Fatalf("damage %+v, want blob %s and snapshots %v", d, l.ID, want)
	}
	again := openRepository(t, store)
	w := newWriter(t, loadIndex(t, again), WriterOptions{PackSize: 60_000})
	saveTree(t, again, w, numbers(0, 30)...)
	if n := w.Stats().NewBlobs; n != 1 {
		t.Errorf("%d blobs were stored again, want the damaged one", n)
	}
	must(t, w.Close())
	if d := check(t, store); !d.IsZero() || len(d.Snapshots) > 0 {
		t.Errorf("after the heal: %+v", d)
	}
	hasFiles(t, openRepository(t, store), numbers(0, 50)...)
	mustSweep(t, openRepository(t, store))
	if _, err := store.Stat(t.Context(), packName(l.Pack)); !api.Is(err, api.NotFound) {
		t.Errorf("the damaged pack is still there: %v", err)
	}
	hasFiles(t, openRepository(t, store), numbers(0, 50)...)
	mustCheck(t, store.save(t))
}

// TestReadTriesEveryPackOfABlob: two packs have the same blobs. Whichever is damaged, readers return all blobs, before
// any verification.
func TestReadTriesEveryPackOfABlob(t *testing.T) {
	store := newMemoryStore()
	one, two := newRepository(t, store), openRepository(t, store)
	blind := loadIndex(t, two) // does not see the first session's packs
	saveFiles(t, one, 60_000, numbers(0, 10)...)
	w := newWriter(t, blind, WriterOptions{PackSize: 60_000})
	saveTree(t, two, w, numbers(0, 10)...)
	must(t, w.Close())
	for _, name := range store.names(dataFolder) {
		broken := store.clone()
		broken.change(name, func(b []byte) []byte { return bytes.Repeat([]byte{1}, len(b)) })
		hasFiles(t, openRepository(t, broken), numbers(0, 10)...)
		delete(broken.objects, name)
		hasFiles(t, openRepository(t, broken), numbers(0, 10)...)
	}
}

// TestKilledVerificationLosesNothing: a verification of a damaged repository is killed at each operation. The next one,
// and a sweep, leave every whole blob, and restic's view does not lose one either.
func TestKilledVerificationLosesNothing(t *testing.T) {
	origin := newMemoryStore()
	r := newRepository(t, origin)
	saveFiles(t, r, 60_000, numbers(0, 30)...)
	l, _, err := loadIndex(t, r).Find(t.Context(), blob.Sum(content(7)), blob.Data)
	must(t, err)
	origin.change(packName(l.Pack), flip(int(l.Offset)+20))
	for kill := 0; ; kill++ {
		store, operations := origin.clone(), 0
		store.before = func(string, string) error {
			if operations++; operations > kill {
				return api.Errorf(api.Unavailable, "killed")
			}
			return nil
		}
		_, err := openRepository(t, store).Verify(t.Context(), VerifyOptions{Until: lastPack,
			Writer: WriterOptions{PackSize: 20_000}})
		store.before = nil
		must(t, store.Delete(t.Context(), store.names(locksFolder)...))
		verifyAll(t, store)
		_, _ = openRepository(t, store).Sweep(t.Context(), sweepOptions())
		hasFiles(t, openRepository(t, store), slices.Concat(numbers(0, 7), numbers(8, 30))...)
		if err == nil {
			return
		}
	}
}

// TestVanishedStoreIsNoDamage: the share of a store is unmounted in the middle of a verification, or of a check, so that
// no object exists any more, and is mounted again later. No pack has a mark, and nothing is reported as damage.
func TestVanishedStoreIsNoDamage(t *testing.T) {
	for name, do := range map[string]func(r *Repository) error{
		"verification": func(r *Repository) error {
			_, err := r.Verify(t.Context(), VerifyOptions{Until: lastPack, Writer: WriterOptions{PackSize: 20_000}})
			return err
		},
		"check": func(r *Repository) error {
			_, err := r.Check(t.Context(), WriterOptions{PackSize: 20_000})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := newMemoryStore()
			r := newRepository(t, store)
			saveFiles(t, r, 20_000, numbers(0, 10)...)
			indexes, gone := store.names(indexFolder), false
			store.before = func(operation, name string) error {
				gone = gone || operation != "put" && strings.HasPrefix(name, dataFolder)
				if gone && (operation == "get" || operation == "stat") {
					return api.Errorf(api.NotFound, "object %s does not exist", name)
				}
				return nil
			}
			if err := do(openRepository(t, store)); !api.Is(err, api.Unavailable) || !gone {
				t.Errorf("the %s of a store that vanished: %v", name, err)
			}
			store.before = nil
			if now := store.names(indexFolder); !slices.Equal(now, indexes) {
				t.Errorf("index files %v, want %v", now, indexes)
			}
		})
	}
}
