// Package pack owns the layout of a pack: sealed blobs, the sealed header, and the length of the header in four bytes.
// restic's design document ("Pack Format") has the layout; version 2 adds compressed blobs, whose entry names the plain
// length, too.
//
// Invariants: a Builder never grows beyond the memory that the caller gave; the id of a pack is the SHA-256 of all its
// bytes; ReadHeader returns only entries that lie one after the other within the pack.
//
// The package starts no goroutine. A Builder has no lock: its owner calls Reserve and Finish one at a time, and fills
// reserved memory from any goroutine.
package pack

import (
	"encoding/binary"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// Sizes in bytes.
const (
	plainEntry      = 1 + 4 + len(blob.ID{})
	compressedEntry = plainEntry + 4
	lengthSize      = 4
	headerLimit     = 16 << 20
	firstRead       = 16 << 10 // covers the header of a usual pack

	// MaxEntries is how many blobs a pack has at most.
	MaxEntries = headerLimit / plainEntry
	// Limit is the largest pack that a reader accepts.
	Limit = 1 << 31
)

// The types of a header's entries.
const (
	typeData = iota
	typeTree
	typeCompressedData
	typeCompressedTree
	types
)

// Entry describes a sealed blob in a pack.
type Entry struct {
	ID     blob.ID
	Kind   blob.Kind
	Offset uint32
	Length uint32 // sealed
	Plain  uint32 // length of the plain blob if the blob is compressed, otherwise 0
}

// PlainLength is the length of the plain blob.
func (e Entry) PlainLength() int {
	if e.Plain > 0 {
		return int(e.Plain)
	}
	return int(e.Length) - blob.Overhead
}

// Check refuses an entry that no writer makes.
func (e Entry) Check() error {
	switch {
	case e.Length < blob.Overhead:
		return api.Errorf(api.Corrupt, "blob %s: a length of %d bytes is less than a nonce and a MAC", e.ID, e.Length)
	case e.Length > blob.Limit+blob.Overhead, e.Plain > blob.Limit:
		return api.Errorf(api.Corrupt, "blob %s: %d bytes, %d when decompressed, are more than the allowed %d", e.ID,
			e.Length, e.Plain, blob.Limit)
	case uint64(e.Offset)+uint64(e.Length) > Limit:
		return api.Errorf(api.Corrupt, "blob %s: offset %d lies beyond the largest pack", e.ID, e.Offset)
	}
	return nil
}

// Builder fills one pack.
type Builder struct {
	key     *blob.Key
	body    []byte
	entries []Entry
	header  int // bytes that the entries need
}

// NewBuilder fills a pack in memory, whose content is overwritten.
func NewBuilder(key *blob.Key, memory []byte) *Builder { return &Builder{key: key, body: memory[:0]} }

// Reserve adds a blob of n stored bytes and returns empty memory with just the capacity for the sealed blob; the caller
// seals into this memory before Finish. ok is false if the pack has no room.
func (b *Builder) Reserve(id blob.ID, kind blob.Kind, n, plain int) (memory []byte, ok bool) {
	length, entry := n+blob.Overhead, plainEntry
	if plain > 0 {
		entry = compressedEntry
	}
	at := len(b.body)
	if at+length+b.header+entry+blob.Overhead+lengthSize > cap(b.body) || b.header+entry > headerLimit-blob.Overhead {
		return nil, false
	}
	b.header += entry
	b.body = b.body[:at+length]
	b.entries = append(b.entries, Entry{id, kind, uint32(at), uint32(length), uint32(plain)})
	return b.body[at : at : at+length], true
}

// Finish appends the header. The body has the memory of the builder.
func (b *Builder) Finish() (id blob.ID, body []byte, entries []Entry) {
	header := make([]byte, 0, b.header)
	for _, e := range b.entries {
		kind := byte(e.Kind)
		if e.Plain > 0 {
			kind += typeCompressedData
		}
		header = binary.LittleEndian.AppendUint32(append(header, kind), e.Length)
		if e.Plain > 0 {
			header = binary.LittleEndian.AppendUint32(header, e.Plain)
		}
		header = append(header, e.ID[:]...)
	}
	b.body = b.key.Seal(b.body, header)
	b.body = binary.LittleEndian.AppendUint32(b.body, uint32(len(header)+blob.Overhead))
	return blob.Sum(b.body), b.body, b.entries
}

// ReadHeader returns the entries of a pack of size bytes. get reads a range of the pack; an error of get is returned as
// is, damage is an error of kind Corrupt.
func ReadHeader(key *blob.Key, size int64, get func(off, n int64) ([]byte, error)) ([]Entry, error) {
	if size < lengthSize+blob.Overhead || size > Limit {
		return nil, api.Errorf(api.Corrupt, "%d bytes are no size of a pack", size)
	}
	tail, err := readRange(get, size-min(size, firstRead), min(size, firstRead))
	if err != nil {
		return nil, err
	}
	length := int64(binary.LittleEndian.Uint32(tail[len(tail)-lengthSize:]))
	if length < blob.Overhead || length > min(headerLimit, size-lengthSize) {
		return nil, api.Errorf(api.Corrupt, "the header cannot have %d bytes in a pack of %d bytes", length, size)
	}
	start := size - lengthSize - length
	sealed := tail[:len(tail)-lengthSize]
	if int64(len(sealed)) < length {
		if sealed, err = readRange(get, start, length); err != nil {
			return nil, err
		}
	}
	header, err := key.Open(sealed[int64(len(sealed))-length:])
	if err != nil {
		return nil, api.Errorf(api.Corrupt, "the header is damaged: %w", err)
	}
	return parseHeader(header, start)
}

func readRange(get func(off, n int64) ([]byte, error), off, n int64) ([]byte, error) {
	b, err := get(off, n)
	if err == nil && int64(len(b)) != n {
		err = api.Errorf(api.Corrupt, "the store returned %d bytes instead of %d at offset %d", len(b), n, off)
	}
	return b, err
}

// parseHeader reads a plain header; the blobs end at byte end of the pack.
func parseHeader(header []byte, end int64) ([]Entry, error) {
	entries := make([]Entry, 0, len(header)/plainEntry)
	var offset int64
	for len(header) > 0 {
		kind, need := header[0], plainEntry
		if kind >= typeCompressedData {
			need = compressedEntry
		}
		if kind >= types || len(header) < need {
			return nil, api.Errorf(api.Corrupt, "the header's entry %d has the type %d and %d bytes", len(entries), kind,
				len(header))
		}
		e := Entry{Kind: blob.Kind(kind % typeCompressedData), Offset: uint32(offset),
			Length: binary.LittleEndian.Uint32(header[1:])}
		if need == compressedEntry {
			if e.Plain = binary.LittleEndian.Uint32(header[5:]); e.Plain == 0 {
				return nil, api.Errorf(api.Corrupt, "the header's entry %d is compressed and has no plain bytes", len(entries))
			}
		}
		e.ID = blob.ID(header[need-len(e.ID) : need])
		if err := e.Check(); err != nil {
			return nil, err
		}
		if offset += int64(e.Length); offset > end {
			return nil, api.Errorf(api.Corrupt, "blob %s ends at byte %d, beyond the header at byte %d", e.ID, offset, end)
		}
		entries, header = append(entries, e), header[need:]
	}
	if offset != end {
		return nil, api.Errorf(api.Corrupt, "the blobs end at byte %d, the header begins at byte %d", offset, end)
	}
	return entries, nil
}
