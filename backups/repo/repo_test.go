package repo

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// TestRandomPolynomialIsIrreducible: the test of irreducibility accepts a polynomial of restic's documents and refuses
// products, and a random polynomial has the right degree.
func TestRandomPolynomialIsIrreducible(t *testing.T) {
	if !polynomial(0x3DA3358B4DC173).isIrreducible() {
		t.Error("the polynomial of restic's documents is refused")
	}
	product := func(a, b polynomial) (p polynomial) {
		for ; b != 0; a, b = a<<1, b>>1 {
			p ^= a * (b & 1)
		}
		return p
	}
	for _, p := range []polynomial{
		0, 1, 2, 1 << 53, 0x3DA3358B4DC172, // divided by x
		product(1<<52|1, 3), product(1<<20|0x155, 1<<33|0x1003), product(7, 1<<51|5), 0x3DA3358B4DC173 << 1,
	} {
		if p.isIrreducible() {
			t.Errorf("%#x is no irreducible polynomial of degree 53", uint64(p))
		}
	}
	// One of 53 random polynomials of degree 53 is irreducible: half of them end in 1.
	count := 0
	for f := polynomial(1<<53 | 1); f < 1<<53|1<<14; f += 2 {
		if f.isIrreducible() {
			count++
		}
	}
	if want := 1 << 14 / 53; count < want*8/10 || count > want*12/10 {
		t.Errorf("%d of %d polynomials are irreducible, want about %d", count, 1<<13, want)
	}
	if p, q := randomPolynomial(), randomPolynomial(); p == q || !p.isIrreducible() {
		t.Errorf("random polynomials %#x and %#x", uint64(p), uint64(q))
	}
}

// TestOpenTellsFailuresApart: a missing repository, a wrong password, a damaged config or key file, and a foreign
// version have their own kinds, and no message has a password.
func TestOpenTellsFailuresApart(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	must(t, r.AddPassword(t.Context(), "second"))
	for _, c := range []struct {
		name     string
		password string
		change   func(s *memoryStore)
		want     api.Kind
	}{
		{"as it is", password, nil, api.Other},
		{"second password", "second", nil, api.Other},
		{"wrong password", "swordfish", nil, api.Denied},
		{"no config", password, func(s *memoryStore) { delete(s.objects, "config") }, api.NotFound},
		{"no key files", password, func(s *memoryStore) {
			for _, name := range s.names("keys/") {
				delete(s.objects, name)
			}
		}, api.Corrupt},
		{"damaged config", password, func(s *memoryStore) { s.change("config", flipLast) }, api.Corrupt},
		{"huge config", password, func(s *memoryStore) {
			s.change("config", func([]byte) []byte { return make([]byte, smallFile+1) })
		}, api.Corrupt},
		{"damaged key files", password, func(s *memoryStore) {
			for _, name := range s.names("keys/") {
				s.change(name, flipLast)
			}
		}, api.Corrupt},
		{"version 1", password, func(s *memoryStore) { s.change("config", version(t, r, 1)) }, api.Unsupported},
		{"version 3", password, func(s *memoryStore) { s.change("config", version(t, r, 3)) }, api.Unsupported},
	} {
		changed := newMemoryStore()
		changed.load(t, store.save(t))
		if c.change != nil {
			c.change(changed)
		}
		_, err := Open(t.Context(), changed, c.password, Options{})
		if (err == nil) != (c.want == api.Other) || err != nil && !api.Is(err, c.want) {
			t.Errorf("%s: %v, want kind %v", c.name, err, c.want)
		}
		if IsWrongPassword(err) != (c.name == "wrong password") {
			t.Errorf("%s: a wrong password is %v", c.name, IsWrongPassword(err))
		}
		if err != nil && (strings.Contains(err.Error(), password) || strings.Contains(err.Error(), "swordfish")) {
			t.Errorf("%s: the message has the password: %v", c.name, err)
		}
		if strings.HasPrefix(c.name, "version") && !strings.Contains(err.Error(), "only version 2 is") {
			t.Errorf("%s: the message is not clear: %v", c.name, err)
		}
	}
}

func flipLast(body []byte) []byte {
	body[len(body)-1] ^= 1
	return body
}

func version(t *testing.T, r *Repository, n int) func([]byte) []byte {
	return func([]byte) []byte {
		c := r.config
		c.Version = n
		content, err := json.Marshal(c)
		must(t, err)
		return r.key.Seal(nil, content)
	}
}

// TestInitKeepsARepository: Init refuses a store with a repository, or with foreign key files, and writes nothing
// then; Init continues an interrupted Init with the key of the interrupted one.
func TestInitKeepsARepository(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	before := len(store.names(""))
	if err := Init(t.Context(), store, password, Options{}); !api.Is(err, api.Exists) {
		t.Errorf("a second Init: %v, want an error of kind exists", err)
	}
	delete(store.objects, "config")
	if err := Init(t.Context(), store, "other", Options{}); !api.Is(err, api.Exists) {
		t.Errorf("Init beside a foreign key file: %v, want an error of kind exists", err)
	}
	if err := Init(t.Context(), store, "", Options{}); !api.Is(err, api.Invalid) {
		t.Errorf("Init with an empty password: %v, want an error of kind invalid", err)
	}
	must(t, Init(t.Context(), store, password, Options{}))
	again, err := Open(t.Context(), store, password, Options{})
	must(t, err)
	if again.secret != r.secret || len(store.names("")) != before {
		t.Errorf("Init did not continue with the key that the store has: %v", store.names(""))
	}
}

// TestFilesAreReadInBothEncodings: a file is plain JSON or compressed JSON; everything else is an error with a kind.
func TestFilesAreReadInBothEncodings(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	for _, c := range []struct {
		content []byte
		want    api.Kind
	}{
		{[]byte(`{"packs":[]}`), api.Other},
		{betterEncoder().EncodeAll([]byte(`{"packs":[]}`), []byte{compressedFile}), api.Other},
		{nil, api.Unsupported},
		{[]byte{3, 4, 5}, api.Unsupported},
		{[]byte{2}, api.Corrupt},
		{[]byte{2, 4, 5}, api.Corrupt},
		{[]byte(`[]`), api.Corrupt},
	} {
		sealed := r.key.Seal(nil, c.content)
		name := indexFolder + blob.Sum(sealed).String()
		must(t, store.Put(t.Context(), name, sealed))
		files, err := r.listIndex(t.Context())
		must(t, err)
		_, err = r.scanIndexFile(t.Context(), files[0], func(index.Pack) error { return nil })
		if (err == nil) != (c.want == api.Other) || err != nil && !api.Is(err, c.want) {
			t.Errorf("%.20q: %v, want kind %v", c.content, err, c.want)
		}
		if err != nil && !strings.Contains(err.Error(), name[len(indexFolder):][:8]) {
			t.Errorf("the message does not name the index file: %v", err)
		}
		must(t, store.Delete(t.Context(), name))
	}
}

// TestFilesAreBounded: a file that decompresses to more than its bound, and a sealed file below a wrong name, are
// errors of kind corrupt.
func TestFilesAreBounded(t *testing.T) {
	store := newMemoryStore()
	r := newRepository(t, store)
	save := func(n int) namedFile {
		id, err := r.saveFile(t.Context(), indexFolder, bytes.Repeat([]byte(" "), n))
		must(t, err)
		o, err := store.Stat(t.Context(), indexFolder+id.String())
		must(t, err)
		return namedFile{o, id}
	}
	read := func(f namedFile) (n int, err error) {
		err = r.loadFile(t.Context(), f, smallFile, 1<<20, func(plain io.Reader) error {
			content, err := io.ReadAll(plain)
			n = len(content)
			return err
		})
		return n, err
	}
	fits, bomb := save(1<<20), save(1<<20+1)
	if n, err := read(fits); err != nil || n != 1<<20 {
		t.Errorf("read %d bytes, %v, want 1 MiB", n, err)
	}
	if n, err := read(bomb); !api.Is(err, api.Corrupt) || n > 1<<20 {
		t.Errorf("read %d bytes, %v, want an error of kind corrupt", n, err)
	}
	store.objects[fits.Name] = store.objects[bomb.Name]
	fits.Size = bomb.Size
	if _, err := read(fits); !api.Is(err, api.Corrupt) || !strings.Contains(err.Error(), "do not match the name") {
		t.Errorf("a file below another name: %v, want an error of kind corrupt", err)
	}
}
