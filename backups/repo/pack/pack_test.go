package pack_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/block/suite"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// reader reads ranges of body, as a store does.
func reader(body []byte) func(off, n int64) ([]byte, error) {
	return func(off, n int64) ([]byte, error) {
		if off < 0 || n < 0 || off+n > int64(len(body)) {
			return nil, api.Errorf(api.Invalid, "range %d+%d of %d bytes", off, n, len(body))
		}
		return bytes.Clone(body[off : off+n]), nil
	}
}

// fill makes a pack of blobs of random sizes, until the memory is full.
func fill(key *blob.Key, random *rand.Rand, memory []byte, largest int) (body []byte, entries []pack.Entry) {
	b := pack.NewBuilder(key, memory)
	for {
		content := make([]byte, 1+random.IntN(largest))
		kind, plain := blob.Kind(random.IntN(int(blob.Kinds))), random.IntN(2)*len(content)*2
		room, ok := b.Reserve(blob.Sum(content), kind, len(content), plain)
		if !ok {
			break
		}
		key.Seal(room, content)
	}
	id, body, entries := b.Finish()
	if id != blob.Sum(body) {
		panic("the id is not that of the bytes")
	}
	return body, entries
}

// TestHeaderNamesEveryBlob: ReadHeader returns what the builder stored, for headers below and above the first read, and
// the pack stays within its memory.
func TestHeaderNamesEveryBlob(t *testing.T) {
	key, random := blob.NewKey(blob.NewSecret()), rand.New(rand.NewPCG(suite.Seed(t), 0))
	for _, c := range []struct{ memory, largest int }{{200, 64}, {64 << 10, 5000}, {1 << 20, 40}} {
		memory := make([]byte, c.memory)
		body, want := fill(key, random, memory, c.largest)
		if len(want) == 0 || &body[0] != &memory[0] || len(body) < len(memory)-c.largest-200 {
			t.Fatalf("%d blobs in %d of %d bytes", len(want), len(body), len(memory))
		}
		got, err := pack.ReadHeader(key, int64(len(body)), reader(body))
		must(t, err)
		if !slices.Equal(got, want) {
			t.Errorf("read %d entries, want %d", len(got), len(want))
		}
		for _, e := range got {
			if _, err := key.Open(bytes.Clone(body[e.Offset : e.Offset+e.Length])); err != nil {
				t.Fatalf("blob at %d: %v", e.Offset, err)
			}
		}
	}
}

// TestDamagedPackIsRefused: a cut or changed tail, and headers that are sealed well but lie, are errors of kind
// corrupt.
func TestDamagedPackIsRefused(t *testing.T) {
	key := blob.NewKey(blob.NewSecret())
	body, _ := fill(key, rand.New(rand.NewPCG(suite.Seed(t), 0)), make([]byte, 2000), 300)
	header := binary.LittleEndian.Uint32(body[len(body)-4:])
	for at := len(body) - 4 - int(header); at < len(body); at++ {
		damaged := bytes.Clone(body)
		damaged[at] ^= 0x40
		if _, err := pack.ReadHeader(key, int64(len(body)), reader(damaged)); !api.Is(err, api.Corrupt) {
			t.Fatalf("byte %d changed: %v, want an error of kind corrupt", at, err)
		}
	}
	for n := range body {
		if _, err := pack.ReadHeader(key, int64(n), reader(body[:n])); !api.Is(err, api.Corrupt) {
			t.Fatalf("cut to %d bytes: %v, want an error of kind corrupt", n, err)
		}
	}
	entry := func(kind byte, lengths ...uint32) (b []byte) {
		b = append(b, kind)
		for _, n := range lengths {
			b = binary.LittleEndian.AppendUint32(b, n)
		}
		return append(b, make([]byte, 32)...)
	}
	for name, header := range map[string][]byte{
		"unknown type":           entry(4, 100, 100),
		"short entry":            entry(0, 100)[:36],
		"blob beyond the header": entry(0, 101),
		"gap before the header":  entry(0, 99),
		"sum overflows":          append(entry(0, 1<<32-1), entry(0, 101)...),
		"blob without a MAC":     append(entry(0, 31), entry(0, 69)...),
		"plain length too large": entry(2, 100, 1<<31),
		"plain length zero":      entry(2, 100, 0),
		"no blobs":               nil,
	} {
		size, get := packed(key, header)
		if _, err := pack.ReadHeader(key, size, get); !api.Is(err, api.Corrupt) {
			t.Errorf("%s: %v, want an error of kind corrupt", name, err)
		}
	}
}

// packed puts a plain header behind 100 bytes of blobs.
func packed(key *blob.Key, header []byte) (int64, func(off, n int64) ([]byte, error)) {
	body := key.Seal(make([]byte, 100), header)
	body = binary.LittleEndian.AppendUint32(body, uint32(len(header)+blob.Overhead))
	return int64(len(body)), reader(body)
}

// FuzzReadHeader: no header, sealed well or not, makes ReadHeader panic or return entries outside of the pack.
func FuzzReadHeader(f *testing.F) {
	key := blob.NewKey(blob.NewSecret())
	f.Add([]byte{}, true)
	f.Add(append([]byte{0, 100, 0, 0, 0}, make([]byte, 32)...), true)
	f.Add(append([]byte{3, 100, 0, 0, 0, 9, 0, 0, 0}, make([]byte, 32)...), true)
	f.Add([]byte{255, 255, 255, 255}, false)
	f.Fuzz(func(t *testing.T, header []byte, sealed bool) {
		size, get := packed(key, header)
		if !sealed {
			size, get = int64(len(header)), reader(header)
		}
		entries, err := pack.ReadHeader(key, size, get)
		if err != nil {
			if !api.Is(err, api.Corrupt) {
				t.Errorf("%v, want an error of kind corrupt", err)
			}
			return
		}
		var end int64
		for _, e := range entries {
			if int64(e.Offset) != end || e.PlainLength() < 0 || e.PlainLength() > blob.Limit {
				t.Errorf("entry %+v begins behind byte %d", e, end)
			}
			end += int64(e.Length)
		}
		if end != 100 {
			t.Errorf("the blobs end at byte %d, want 100", end)
		}
	})
}
