package vhdx

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/imagestore/format/oracle"
)

// The pieces of a file changed by FuzzOpen, in sequence in the input; the place determines all other bytes of the file.
// The pieces are MiB apart, so the input holds the pieces alone.
var pieces = []struct{ off, n int64 }{
	{0, 64}, {64 * kib, 80}, {128 * kib, 80}, {192 * kib, 112}, {256 * kib, 112}, {tinyTable, 256},
	{tinyMeta, 224}, {tinyItems, 96}, {tinyLog, 8 * logSector}, {tinyLog + mib - logTail, logTail},
}

const (
	fuzzSize = 10*mib + 512
	logTail  = 3 * logSector
)

// sparse is a file of pieces over bytes determined by the place.
type sparse map[int64][]byte

func (s sparse) ReadAt(p []byte, off int64) (n int, err error) {
	p = p[:max(min(int64(len(p)), fuzzSize-off), 0)]
	for i := 0; i < len(p); {
		at := off + int64(i)
		for n := int(min(512-at%512, int64(len(p)-i))); n > 0; n-- {
			if p[i] = byte(at>>20) ^ byte(at>>9); at < tinyData {
				p[i] = 0
			}
			i++
		}
	}
	for from, b := range s {
		lo, hi := max(from, off), min(from+int64(len(b)), off+int64(len(p)))
		if lo < hi {
			copy(p[lo-off:hi-off], b[lo-from:])
		}
	}
	if len(p) == 0 {
		err = io.EOF
	}
	return len(p), err
}

// build makes the file of an input, with right checksums.
func build(in []byte) sparse {
	s := sparse{}
	for _, p := range pieces {
		b := make([]byte, p.n)
		in = in[copy(b, in):]
		s[p.off] = b
	}
	whole := func(off, n int64) {
		b := make([]byte, n)
		copy(b, s[off])
		le.PutUint32(b[4:], checksum(b))
		s[off] = b
	}
	for i := range int64(2) {
		whole((1+i)*64*kib, headerSize)
		whole((3+i)*64*kib, tableSize)
	}
	log := append(bytes.Clone(s[tinyLog+mib-logTail]), s[tinyLog]...)
	for at := 0; at+logSector <= len(log); at += logSector {
		e := log[at:]
		if n := int(le.Uint32(e[8:])); string(e[:4]) == "loge" && n >= logSector && n <= len(e) {
			le.PutUint32(e[4:], checksum(e[:n]))
		}
	}
	s[tinyLog+mib-logTail], s[tinyLog] = log[:logTail], log[logTail:]
	return s
}

// take makes the input of a file.
func take(b []byte) (in []byte) {
	for _, p := range pieces {
		in = append(in, b[p.off:p.off+p.n]...)
	}
	return in
}

// TestPieces: the input of FuzzOpen is enough for a full replay.
func TestPieces(t *testing.T) {
	for _, r := range replays {
		if r.entries < 2 {
			continue
		}
		m := makeTiny(512)
		r.edit(m)
		im, err := Open(build(take(m.b)), fuzzSize, Limits{})
		if err != nil || im.Info().Replayed != r.entries {
			t.Errorf("%s: not replayed in full, %v", r.name, err)
		}
	}
}

// FuzzOpen: for arbitrary bytes, Open returns an image which reads the same in every way, or an error of a known kind.
// The seeds are handmade images and small images of qemu-img.
func FuzzOpen(f *testing.F) {
	f.Add(take(makeTiny(512).b))
	f.Add(take(makeTiny(4096).b))
	for _, o := range []string{"subformat=dynamic", "subformat=fixed,block_size=1M,log_size=2M"} {
		path := filepath.Join(f.TempDir(), "i.vhdx")
		oracle.Create(f, "vhdx", o, path, 5<<20+512)
		oracle.Write(f, "vhdx", path, "write -P 5 1M 2M")
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(take(b))
	}
	for _, r := range replays[:12] {
		m := makeTiny(512)
		r.edit(m)
		f.Add(take(m.b))
	}
	open := limited(Limits{VirtualSize: 1 << 40})
	f.Fuzz(func(t *testing.T, in []byte) {
		oracle.Sound(t, open, build(in), fuzzSize)
	})
}
