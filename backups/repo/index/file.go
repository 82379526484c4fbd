package index

import (
	"crypto/sha256"
	"encoding/binary"
	"io"
	"strconv"
	"time"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
)

// FileBlobs is how many blobs an index file that Drover writes names at most.
const FileBlobs = 50_000

// Pack is the part of an index file about one pack.
type Pack struct {
	ID      blob.ID
	Entries []pack.Entry // valid until the call that got the Pack returns
	Hidden  bool         // a sweep is about to delete the pack: no new backup may rely on the pack
	Time    time.Time    // since when the pack is hidden
	Damaged bool         // a verification marked the pack: no new backup may rely on it; the mark has no entries
}

// Scan reads an index file and calls each with the packs and the marks in the file. session is the session of Drover
// that wrote the file, if any. Scan ignores unknown fields, and "supersedes", which no current program writes. An error
// of kind Corrupt says that the file is no index file; other errors are those of file and of each.
func Scan(file io.Reader, each func(Pack) error) (session string, err error) {
	f := fileScanner{scanner: newScanner(file), each: each}
	f.object(func(key []byte) {
		switch string(key) {
		case "packs":
			f.array(func() { f.pack(false) })
		case "packs_to_delete":
			f.array(func() { f.pack(true) })
		case sessionField:
			session = string(f.text())
		case damagedField:
			f.array(f.mark)
		default:
			f.skip(0)
		}
	})
	f.expectEnd()
	return session, f.err
}

type fileScanner struct {
	*scanner
	each    func(Pack) error
	entries []pack.Entry
}

func (f *fileScanner) pack(hidden bool) {
	p, named := Pack{Hidden: hidden}, false
	f.entries = f.entries[:0]
	f.object(func(key []byte) {
		switch string(key) {
		case "id":
			p.ID, named = f.id(), true
		case "blobs":
			f.array(f.entry)
		case "time":
			p.Time = f.time()
		default:
			f.skip(0)
		}
	})
	if !named {
		f.fail("the JSON has a pack without an id")
	}
	if f.err == nil {
		p.Entries = f.entries
		f.err = f.each(p)
	}
}

func (f *fileScanner) mark() {
	if id := f.id(); f.err == nil {
		f.err = f.each(Pack{ID: id, Damaged: true})
	}
}

func (f *fileScanner) entry() {
	var e pack.Entry
	var id, kind, length bool
	f.object(func(key []byte) {
		switch string(key) {
		case "id":
			e.ID, id = f.id(), true
		case "type":
			k, err := blob.ParseKind(f.text())
			if e.Kind, kind = k, true; err != nil {
				f.fail("the JSON has a blob of an unknown type: %w", err)
			}
		case "offset":
			e.Offset = f.number()
		case "length":
			e.Length, length = f.number(), true
		case "uncompressed_length":
			e.Plain = f.number()
		default:
			f.skip(0)
		}
	})
	if !id || !kind || !length {
		f.fail("the JSON has a blob without id, type or length")
	}
	if err := e.Check(); err != nil && f.err == nil {
		f.err = err
	}
	if len(f.entries) == pack.MaxEntries {
		f.fail("the JSON has a pack with more than %d blobs", pack.MaxEntries)
	}
	if f.err == nil {
		f.entries = append(f.entries, e)
	}
}

func (f *fileScanner) id() blob.ID {
	var id blob.ID
	if text := f.text(); f.err == nil {
		f.err = id.UnmarshalText(text)
	}
	return id
}

func (f *fileScanner) time() (t time.Time) {
	if f.peekToken() == 'n' {
		f.skipWord("null")
		return t
	}
	text := f.text()
	if err := t.UnmarshalText(text); err != nil {
		f.fail("the JSON has a malformed time: %w", err)
	}
	return t
}

// sessionField names the session that wrote an index file. Other programs ignore the field.
const sessionField = "droverSession"

// damagedField lists packs that a verification found damaged or missing. Other programs ignore the field, and drop it
// when they write the index again: the next verification finds the damage again.
const damagedField = "droverDamaged"

// Sum is the same for equal lists of entries.
func (p *Pack) Sum() (sum blob.ID) {
	h := sha256.New()
	var numbers [13]byte
	for _, e := range p.Entries {
		h.Write(e.ID[:])
		binary.LittleEndian.PutUint32(numbers[:], e.Offset)
		binary.LittleEndian.PutUint32(numbers[4:], e.Length)
		binary.LittleEndian.PutUint32(numbers[8:], e.Plain)
		numbers[12] = byte(e.Kind)
		h.Write(numbers[:])
	}
	h.Sum(sum[:0])
	return sum
}

// FileBuilder collects the packs for the next index file.
type FileBuilder struct {
	Session        string // letters and digits; empty: none
	live, hidden   []byte
	damaged        []byte
	packs, entries int
}

// Add adds a pack. The file is full when Full says so; a larger pack than the file's room still belongs into one file.
func (f *FileBuilder) Add(p Pack) {
	if f.packs++; p.Damaged {
		f.damaged = appendMark(f.damaged, p.ID)
		f.entries++
		return
	}
	to := &f.live
	if p.Hidden {
		to = &f.hidden
	}
	*to = appendPack(*to, p)
	f.entries += len(p.Entries)
}

// Packs is how many packs and marks the file names.
func (f *FileBuilder) Packs() int { return f.packs }

// Full reports whether the file with n more blobs would be larger than FileBlobs.
func (f *FileBuilder) Full(n int) bool { return f.packs > 0 && f.entries+n > FileBlobs }

// Bytes is the file's content.
func (f *FileBuilder) Bytes() []byte {
	b := []byte("{")
	if f.Session != "" {
		b = append(append(append(b, `"`+sessionField+`":"`...), f.Session...), `",`...)
	}
	b = append(append(append(b, `"packs":[`...), f.live...), ']')
	if len(f.hidden) > 0 {
		b = append(append(append(b, `,"packs_to_delete":[`...), f.hidden...), ']')
	}
	if len(f.damaged) > 0 {
		b = append(append(append(b, `,"`+damagedField+`":[`...), f.damaged...), ']')
	}
	return append(b, '}')
}

func appendMark(b []byte, id blob.ID) []byte {
	if len(b) > 0 {
		b = append(b, ',')
	}
	return append(append(append(b, '"'), id.String()...), '"')
}

func appendPack(b []byte, p Pack) []byte {
	if len(b) > 0 {
		b = append(b, ',')
	}
	b = append(append(append(b, `{"id":"`...), p.ID.String()...), `","blobs":[`...)
	for i, e := range p.Entries {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, `{"id":"`...), e.ID.String()...), `","type":"`...)
		b = append(append(append(b, e.Kind.String()...), `","offset":`...), strconv.FormatUint(uint64(e.Offset), 10)...)
		b = strconv.AppendUint(append(b, `,"length":`...), uint64(e.Length), 10)
		if e.Plain > 0 {
			b = strconv.AppendUint(append(b, `,"uncompressed_length":`...), uint64(e.Plain), 10)
		}
		b = append(b, '}')
	}
	b = append(b, ']')
	if p.Hidden && !p.Time.IsZero() {
		b = append(append(append(b, `,"time":"`...), p.Time.UTC().Format(time.RFC3339Nano)...), '"')
	}
	return append(b, '}')
}
