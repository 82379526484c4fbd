package layer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// A frozen layer is a former head without map and digests: its folder holds data and zero, second names of the head's
// files, and frozen.json. Readers can open a frozen layer; Finish makes a finished layer. The layer counts once a stack
// names the layer: before, the data belongs to a head.
const (
	FrozenFile   = "frozen.json"
	ZeroFile     = "zero"
	FormatFrozen = "drover-frozen"
)

// FrozenRecord is frozen.json.
type FrozenRecord struct {
	UID     string    `json:"uid"`
	Size    int64     `json:"size"`
	Created time.Time `json:"created"`
}

// FrozenMap is the map of a frozen layer: the data that the file system reports, and the zero records.
type FrozenMap struct {
	Size  int64
	Data  file.Handle
	Zeros format.Index // 1: zero
}

// Length is the size of the layer in bytes.
func (m *FrozenMap) Length() int64 { return m.Size }

// Uniform knows only the pages beyond the layer.
func (m *FrozenMap) Uniform(p int) (block.Kind, bool) {
	return block.Hole, int64(p)<<(pageBits+blockBits) >= m.Size
}

// Load fills kinds with the kinds of page p. Data overrides zero records.
func (m *FrozenMap) Load(p int, kinds *[pageBlocks]block.Kind) error {
	clear(kinds[:])
	base := int64(p) << pageBits
	end := min(base+pageBlocks, m.Size>>blockBits)
	for b := base; b < min(end, m.Zeros.Blocks); {
		v, n := m.Zeros.Run(b, min(end, m.Zeros.Blocks))
		for i := b; v == 1 && i < b+n; i++ {
			kinds[i-base] = block.Zero
		}
		b += n
	}
	for off := base << blockBits; ; {
		from, to, err := file.NextData(int(m.Data.Fd()), off, end<<blockBits)
		if err != nil {
			return err
		}
		if from >= end<<blockBits {
			return nil
		}
		for b := from >> blockBits; b < (to+blockSize-1)>>blockBits; b++ {
			kinds[b-base] = block.Data
		}
		off = to
	}
}

// Frozen reads frozen.json; a missing file is an error of kind not found.
func (d *Store) Frozen(uid string) (FrozenRecord, error) {
	var rec FrozenRecord
	err := format.ReadMeta(d.FS, d.Join(Dir, uid, FrozenFile), FormatFrozen, &rec)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return rec, api.Errorf(api.NotFound, "the layer does not exist")
	case err != nil:
		return rec, err
	case rec.UID != uid || rec.Size <= 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize:
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", FrozenFile)
	}
	return rec, nil
}

// openFrozen opens a frozen layer into l.
func (d *Store) openFrozen(l *Layer, uid string, flag int, owner bool) error {
	rec, err := d.Frozen(uid)
	if err != nil {
		return err
	}
	l.Rec = Record{UID: uid, Size: rec.Size, Created: rec.Created}
	if err := d.openData(l, uid, flag, owner); err != nil {
		return err
	}
	zero, err := d.FS.Open(d.Join(Dir, uid, ZeroFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	m := &FrozenMap{Size: rec.Size, Data: l.Data, Zeros: format.NewIndex(rec.Size>>blockBits, 0)}
	st, err := zero.Stat()
	if err == nil {
		log := format.ZeroLog{Zeros: m.Zeros}
		_, err = format.ReadZeroLog(bufio.NewReaderSize(io.NewSectionReader(zero, 0, st.Size()), 1<<16), log.Mark)
		m.Zeros = log.Zeros
	}
	if err = errors.Join(err, zero.Close()); err != nil {
		return fmt.Errorf("%s: %w", ZeroFile, err)
	}
	l.Map = m
	return nil
}
