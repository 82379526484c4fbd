package stack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// The intents file says which regions of a volume may differ between its members after an unclean end: a header of
// 4 KiB, then pages of 4 KiB, each a header of 16 bytes and bits, lowest first, one per region. A page whose checksum
// is wrong counts as all dirty: it was being written when the power went, and copying too much is safe.
const (
	intentsMagic  = "DROVERI1"
	intentsPage   = 4096
	intentsBits   = (intentsPage - 16) * 8 // regions per page
	intentsRegion = int64(16) << 20
	maxIntents    = 16 << 20
)

// intents is the write-intent bitmap of a replica.
type intents struct {
	size   int64 // of the volume
	region int64 // bytes per bit
	epoch  int64 // the last common epoch: what the bits are relative to
	bits   []uint64
}

func newIntents(size int64) *intents {
	n := (size + intentsRegion - 1) / intentsRegion
	return &intents{size: size, region: intentsRegion, bits: make([]uint64, (n+63)/64)}
}

// fitIntents makes the file cover a volume of size bytes. What is new is clean: nothing was ever written there.
func fitIntents(fsys file.FS, name string, size int64) error {
	h, err := fsys.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer h.Close()
	data, err := io.ReadAll(io.NewSectionReader(h, 0, maxIntents))
	if err != nil {
		return err
	}
	t, err := decodeIntents(data)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if t.size >= size {
		return nil
	}
	t.size = size
	t.bits = append(t.bits, make([]uint64, (t.regions()+63)/64-int64(len(t.bits)))...)
	return replaceFile(fsys, name, encodeIntents(t))
}

func (t *intents) regions() int64 { return (t.size + t.region - 1) / t.region }

// mark makes the regions of a range dirty, and reports whether any was clean.
func (t *intents) mark(off, n int64) (changed bool) {
	for g := off / t.region; g <= (off+n-1)/t.region; g++ {
		w, bit := &t.bits[g/64], uint64(1)<<(g%64)
		changed = changed || *w&bit == 0
		*w |= bit
	}
	return changed
}

// used reports whether intents were ever noted, or taken away again since all members were equal.
func (t *intents) used() bool {
	return t.epoch > 0 || slices.ContainsFunc(t.bits, func(w uint64) bool { return w != 0 })
}

func (t *intents) dirty(g int64) bool { return t.bits[g/64]>>(g%64)&1 != 0 }

func encodeIntents(t *intents) []byte {
	pages := (t.regions() + intentsBits - 1) / intentsBits
	out := make([]byte, intentsPage*(1+pages))
	copy(out, intentsMagic)
	binary.LittleEndian.PutUint32(out[8:], version)
	binary.LittleEndian.PutUint64(out[16:], uint64(t.size))
	binary.LittleEndian.PutUint64(out[24:], uint64(t.region))
	binary.LittleEndian.PutUint64(out[32:], uint64(t.epoch))
	binary.LittleEndian.PutUint32(out[60:], crc32.Checksum(out[:60], castagnoli))
	for p := range pages {
		t.encodePage(out[intentsPage*(1+p):][:intentsPage], p)
	}
	return out
}

func (t *intents) encodePage(b []byte, p int64) {
	clear(b)
	copy(b, "INTP")
	binary.LittleEndian.PutUint64(b[4:], uint64(p))
	for g := p * intentsBits; g < min((p+1)*intentsBits, t.regions()); g++ {
		if t.dirty(g) {
			i := g - p*intentsBits
			b[16+i/8] |= 1 << (i % 8)
		}
	}
	binary.LittleEndian.PutUint32(b[12:], pageSum(b))
}

// pageSum is the checksum of a page without the checksum itself.
func pageSum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:])
}

// decodeIntents reads the file. Only a header that is damaged is an error.
func decodeIntents(data []byte) (*intents, error) {
	if len(data) < intentsPage || string(data[:8]) != intentsMagic ||
		binary.LittleEndian.Uint32(data[8:]) != version ||
		crc32.Checksum(data[:60], castagnoli) != binary.LittleEndian.Uint32(data[60:]) {
		return nil, api.Errorf(api.Corrupt, "header of the intents is damaged")
	}
	t := &intents{size: int64(binary.LittleEndian.Uint64(data[16:])), region: int64(binary.LittleEndian.Uint64(data[24:])),
		epoch: int64(binary.LittleEndian.Uint64(data[32:]))}
	if t.size <= 0 || t.size > api.MaxVolumeSize || t.region < blockSize || t.size/t.region > 1<<24 {
		return nil, api.Errorf(api.Corrupt, "header of the intents makes no sense")
	}
	t.bits = make([]uint64, (t.regions()+63)/64)
	for p := int64(0); p*intentsBits < t.regions(); p++ {
		var b []byte
		if off := intentsPage * (1 + p); off+intentsPage <= int64(len(data)) {
			b = data[off:][:intentsPage]
		}
		good := b != nil && string(b[:4]) == "INTP" && binary.LittleEndian.Uint64(b[4:]) == uint64(p) &&
			pageSum(b) == binary.LittleEndian.Uint32(b[12:])
		for g := p * intentsBits; g < min((p+1)*intentsBits, t.regions()); g++ {
			i := g - p*intentsBits
			if !good || b[16+i/8]>>(i%8)&1 != 0 {
				t.bits[g/64] |= 1 << (g % 64)
			}
		}
	}
	return t, nil
}

// raiseIntents has the intents of a replica that nobody has open tell nothing to replicas that were members before an
// epoch alone.
func (d *Disk) raiseIntents(dir string, epoch int64) error {
	name := dir + "/" + intentsFile
	h, err := d.fs.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	data, err := io.ReadAll(io.NewSectionReader(h, 0, maxIntents))
	if err = errors.Join(err, h.Close()); err != nil {
		return err
	}
	t, err := decodeIntents(data)
	if err != nil || t.epoch >= epoch {
		return err
	}
	t.epoch = epoch
	return replaceFile(d.fs, name, encodeIntents(t))
}
