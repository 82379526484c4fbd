package format

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
)

// The intents file lists the regions of a volume that may differ between the members after an unclean end: a header of
// 4 KiB, then pages of 4 KiB, each a header of 16 bytes and bits, lowest first, one per region. A page with a wrong
// checksum counts as all dirty: the loss of power interrupted its write, and a resync may copy too much.
const (
	intentsMagic    = "DROVERI1"
	IntentsPageSize = 4096
	RegionsPerPage  = (IntentsPageSize - 16) * 8 // regions per page
	IntentsRegion   = int64(16) << 20
	MaxIntentsSize  = 16 << 20
)

// Intents is the write-intent bitmap of a replica.
type Intents struct {
	Size   int64 // of the volume
	Region int64 // bytes per bit
	Epoch  int64 // the last common epoch; the bits are relative to this epoch
	Bits   []uint64
}

// NewIntents makes the intents of a new replica: all regions are clean.
func NewIntents(size int64) *Intents {
	n := (size + IntentsRegion - 1) / IntentsRegion
	return &Intents{Size: size, Region: IntentsRegion, Bits: make([]uint64, (n+63)/64)}
}

// FitIntents makes the file cover a volume of size bytes. New regions are clean: nothing was ever written there.
func FitIntents(fsys file.FS, name string, size int64) error {
	h, err := fsys.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer h.Close()
	data, err := io.ReadAll(io.NewSectionReader(h, 0, MaxIntentsSize))
	if err != nil {
		return err
	}
	t, err := DecodeIntents(data)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if t.Size >= size {
		return nil
	}
	t.Size = size
	t.Bits = append(t.Bits, make([]uint64, (t.Regions()+63)/64-int64(len(t.Bits)))...)
	return ReplaceFile(fsys, name, EncodeIntents(t))
}

// Regions is the number of regions of the volume.
func (t *Intents) Regions() int64 { return (t.Size + t.Region - 1) / t.Region }

// mark makes the regions of a range dirty, and reports whether any was clean.
func (t *Intents) mark(off, n int64) (changed bool) {
	for g := off / t.Region; g <= (off+n-1)/t.Region; g++ {
		w, bit := &t.Bits[g/64], uint64(1)<<(g%64)
		changed = changed || *w&bit == 0
		*w |= bit
	}
	return changed
}

// Used reports whether the replica ever noted an intent, or removed one when all members were equal.
func (t *Intents) Used() bool {
	return t.Epoch > 0 || slices.ContainsFunc(t.Bits, func(w uint64) bool { return w != 0 })
}

// Dirty reports whether the members may differ in region g.
func (t *Intents) Dirty(g int64) bool { return t.Bits[g/64]>>(g%64)&1 != 0 }

// EncodeIntents encodes the whole file.
func EncodeIntents(t *Intents) []byte {
	pages := (t.Regions() + RegionsPerPage - 1) / RegionsPerPage
	out := make([]byte, IntentsPageSize*(1+pages))
	copy(out, intentsMagic)
	binary.LittleEndian.PutUint32(out[8:], version)
	binary.LittleEndian.PutUint64(out[16:], uint64(t.Size))
	binary.LittleEndian.PutUint64(out[24:], uint64(t.Region))
	binary.LittleEndian.PutUint64(out[32:], uint64(t.Epoch))
	binary.LittleEndian.PutUint32(out[60:], crc32.Checksum(out[:60], castagnoli))
	for p := range pages {
		t.EncodePage(out[IntentsPageSize*(1+p):][:IntentsPageSize], p)
	}
	return out
}

// EncodePage encodes page p into b.
func (t *Intents) EncodePage(b []byte, p int64) {
	clear(b)
	copy(b, "INTP")
	binary.LittleEndian.PutUint64(b[4:], uint64(p))
	for g := p * RegionsPerPage; g < min((p+1)*RegionsPerPage, t.Regions()); g++ {
		if t.Dirty(g) {
			i := g - p*RegionsPerPage
			b[16+i/8] |= 1 << (i % 8)
		}
	}
	binary.LittleEndian.PutUint32(b[12:], pageSum(b))
}

// pageSum is the checksum of a page without the checksum itself.
func pageSum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:])
}

// DecodeIntents decodes the file. Only a damaged header is an error.
func DecodeIntents(data []byte) (*Intents, error) {
	if len(data) < IntentsPageSize || string(data[:8]) != intentsMagic ||
		binary.LittleEndian.Uint32(data[8:]) != version ||
		crc32.Checksum(data[:60], castagnoli) != binary.LittleEndian.Uint32(data[60:]) {
		return nil, api.Errorf(api.Corrupt, "header of the intents is damaged")
	}
	t := &Intents{Size: int64(binary.LittleEndian.Uint64(data[16:])), Region: int64(binary.LittleEndian.Uint64(data[24:])),
		Epoch: int64(binary.LittleEndian.Uint64(data[32:]))}
	if t.Size <= 0 || t.Size > api.MaxVolumeSize || t.Region < BlockSize || t.Size/t.Region > 1<<24 {
		return nil, api.Errorf(api.Corrupt, "header of the intents makes no sense")
	}
	t.Bits = make([]uint64, (t.Regions()+63)/64)
	for p := int64(0); p*RegionsPerPage < t.Regions(); p++ {
		var b []byte
		if off := IntentsPageSize * (1 + p); off+IntentsPageSize <= int64(len(data)) {
			b = data[off:][:IntentsPageSize]
		}
		good := b != nil && string(b[:4]) == "INTP" && binary.LittleEndian.Uint64(b[4:]) == uint64(p) &&
			pageSum(b) == binary.LittleEndian.Uint32(b[12:])
		for g := p * RegionsPerPage; g < min((p+1)*RegionsPerPage, t.Regions()); g++ {
			i := g - p*RegionsPerPage
			if !good || b[16+i/8]>>(i%8)&1 != 0 {
				t.Bits[g/64] |= 1 << (g % 64)
			}
		}
	}
	return t, nil
}
