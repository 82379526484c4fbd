package stack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Beside the digest of each chunk a finished layer has a checksum of each block, since a digest of 2 MiB cannot be
// computed at every read. It decides nothing by itself: where it does not match, the digest of the chunk tells whether
// the block is damaged or its checksum.

const crcsFile = "crcs"

// openCRCs opens the checksums of a finished layer; one that was made before there were any has none.
func (d *Disk) openCRCs(uid string, size int64, flag int) (file.Handle, error) {
	h, err := d.fs.Open(d.path(layersDir, uid, crcsFile), os.O_RDONLY|flag, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if st, err := h.Stat(); err != nil || st.Size() != format.CRCsLength(size) {
		return nil, errors.Join(err, h.Close()) // it is as good as none, and made anew
	}
	return h, nil
}

// hasCRCs reports whether a layer has checksums of that length. Where that cannot be told, it is not for lack of them.
func (d *Disk) hasCRCs(uid string, length int64) bool {
	id, _, err := d.fileID(d.path(layersDir, uid, crcsFile))
	return err == nil && id.size == length || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// makeCRCs gives a finished layer the checksums that it lacks. Blocks of chunks that do not match their digest get
// none, so that every read of them is looked at.
func (d *Disk) makeCRCs(ctx context.Context, uid string, each eachBy) error {
	rec, err := d.layerRecord(uid)
	if err != nil || d.hasCRCs(uid, format.CRCsLength(rec.Size)) {
		return nil
	}
	l, err := d.openLayer(uid, d.direct) // nobody begins to merge it meanwhile
	if err != nil {
		return err
	}
	defer func() { _ = l.close() }() // read only
	kinds, err := format.IndexOf(l.m)
	if err != nil {
		return err
	}
	sums, err := d.fs.Open(d.path(layersDir, uid, sumsFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer sums.Close()
	name := d.path(layersDir, uid, crcsFile)
	if err := file.RemoveAll(d.fs, name+".tmp"); err != nil {
		return err
	}
	h, err := d.fs.Open(name+".tmp", os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = each(ctx, kinds, func(c int64, buf []byte) error {
		k := kinds.Chunk(c)
		if !k.Data {
			return nil
		}
		var want [sumSize]byte
		if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
			return err
		}
		if sum, err := format.ChunkSum(l.data, k, c, l.rec.Size, buf); err != nil || sum != want {
			return nil
		}
		return format.PutCRCs(h, c, buf[:min(chunkSize, l.rec.Size-c*chunkSize)])
	})
	if err == nil {
		err = format.SealCRCs(h, l.rec.Size)
	}
	if err = errors.Join(err, h.Close()); err != nil {
		return errors.Join(err, d.fs.Remove(name+".tmp"))
	}
	return errors.Join(d.fs.Rename(name+".tmp", name), d.fs.SyncDir(d.path(layersDir, uid)))
}

// rightCRCs puts the checksums of a chunk right whose content matches its digest.
func (d *Disk) rightCRCs(l *layer, c int64, buf []byte) error {
	if l.crcs == nil {
		return nil
	}
	h, err := d.fs.Open(d.path(layersDir, l.rec.UID, crcsFile), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer h.Close()
	var have, want [format.ChunkCRCsSize]byte
	w := format.AppendCRCs(want[:0], buf)
	if _, err := h.ReadAt(have[:len(w)], c*int64(format.ChunkCRCsSize)); err == nil && slices.Equal(have[:len(w)], w) {
		return nil
	}
	_, err = h.WriteAt(w, c*int64(format.ChunkCRCsSize))
	return errors.Join(err, h.Datasync())
}

// compare holds what was read of a layer against the checksums. Blocks that are there in part are read as a whole.
// Holes have no checksum.
func (l *layer) compare(p []byte, off int64) error {
	first, end := off>>blockBits, (off+int64(len(p))+blockSize-1)>>blockBits
	from := first >> format.CRCPageBits
	crcs := alignedBuffer(int(((end-1)>>format.CRCPageBits - from + 1) * format.CRCPageSize))
	if n, err := l.crcs.ReadAt(crcs, from*format.CRCPageSize); n < len(crcs) {
		return l.judged(p, off, fmt.Errorf("checksums: %w", err))
	}
	var part []byte
	for b := first; b < end; b++ {
		at := b<<blockBits - off // of the block in p
		var whole []byte
		if at >= 0 && at+blockSize <= int64(len(p)) {
			whole = p[at:][:blockSize]
		} else {
			if part == nil {
				part = alignedBuffer(int(blockSize))
			}
			whole = part
			if n, err := l.data.ReadAt(whole, b<<blockBits); n < len(whole) {
				return l.judged(p, off, err)
			}
			copy(p[max(at, 0):min(at+blockSize, int64(len(p)))], whole[max(-at, 0):])
		}
		want := binary.LittleEndian.Uint32(crcs[(b-from<<format.CRCPageBits)*crcSize:])
		if format.BlockCRC(whole) != want && (want != 0 || !format.IsZero(whole)) {
			return l.judged(p, off, api.Errorf(api.Corrupt, "block %d does not match its checksum", b))
		}
	}
	return nil
}

// judged is judge for who reads a layer through a Source; why is what made it necessary.
func (l *layer) judged(p []byte, off int64, why error) error {
	bad, err := l.judge(p, off)
	switch {
	case err != nil:
		return fmt.Errorf("layer %s: %w (%w)", l.rec.UID, err, why)
	case len(bad) > 0 && l.hy != nil:
		l.hy.lose(bad)
		return ErrNotFetched
	case len(bad) > 0:
		l.disk.learn(l, off, int64(len(p)), bad)
		return api.Errorf(api.Corrupt, "layer %s: the %d bytes at %d are damaged", l.rec.UID, bad[0].Len, bad[0].Off)
	}
	return nil
}
