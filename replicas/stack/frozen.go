package stack

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

// A frozen layer is a head that was cut off and not finished yet: its folder holds data and zero, which are second
// names of the head's files, and frozen.json. It is readable as it is; Finish makes map and sums, and a layer like any
// other of it. It counts only where a stack names it: before that, its data is still a head.
const (
	frozenFile   = "frozen.json"
	zeroFile     = "zero"
	formatFrozen = "drover-frozen"
)

// frozenRecord is frozen.json.
type frozenRecord struct {
	UID     string    `json:"uid"`
	Size    int64     `json:"size"`
	Created time.Time `json:"created"`
}

// frozenMap is the map of a frozen layer: what the file system says is data, and the record of zeros.
type frozenMap struct {
	size  int64
	data  file.Handle
	zeros format.Index // 1: zero
}

func (m *frozenMap) Length() int64 { return m.size }

func (m *frozenMap) Uniform(p int) (block.Kind, bool) {
	return block.Hole, int64(p)<<(pageBits+blockBits) >= m.size
}

func (m *frozenMap) Load(p int, kinds *[pageBlocks]block.Kind) error {
	clear(kinds[:])
	base := int64(p) << pageBits
	end := min(base+pageBlocks, m.size>>blockBits)
	for b := base; b < min(end, m.zeros.Blocks); {
		v, n := m.zeros.Run(b, min(end, m.zeros.Blocks))
		for i := b; v == 1 && i < b+n; i++ {
			kinds[i-base] = block.Zero
		}
		b += n
	}
	for off := base << blockBits; ; {
		from, to, err := file.NextData(int(m.data.Fd()), off, end<<blockBits)
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

// frozenRecord reads frozen.json; none is an error of kind not found.
func (d *Disk) frozenRecord(uid string) (frozenRecord, error) {
	var rec frozenRecord
	err := format.ReadMeta(d.fs, d.path(layersDir, uid, frozenFile), formatFrozen, &rec)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return rec, api.Errorf(api.NotFound, "no layer of that uid")
	case err != nil:
		return rec, err
	case rec.UID != uid || rec.Size <= 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize:
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", frozenFile)
	}
	return rec, nil
}

// openFrozen opens a frozen layer into l.
func (d *Disk) openFrozen(l *layer, uid string, flag int, owner bool) error {
	rec, err := d.frozenRecord(uid)
	if err != nil {
		return err
	}
	l.rec = layerRecord{UID: uid, Size: rec.Size, Created: rec.Created}
	if err := d.openData(l, uid, flag, owner); err != nil {
		return err
	}
	zero, err := d.fs.Open(d.path(layersDir, uid, zeroFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	m := &frozenMap{size: rec.Size, data: l.data, zeros: format.NewIndex(rec.Size>>blockBits, 0)}
	st, err := zero.Stat()
	if err == nil {
		log := format.ZeroLog{Zeros: m.zeros}
		_, err = format.ReadZeroLog(bufio.NewReaderSize(io.NewSectionReader(zero, 0, st.Size()), 1<<16), log.Mark)
		m.zeros = log.Zeros
	}
	if err = errors.Join(err, zero.Close()); err != nil {
		return fmt.Errorf("%s: %w", zeroFile, err)
	}
	l.m = m
	return nil
}
