package layer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Beside the digest of each chunk a finished layer has a checksum of each block, because a read cannot compute a digest
// of 2 MiB. A checksum alone decides nothing: after a mismatch the digest of the chunk tells whether the block or the
// checksum is damaged.

// CRCsFile has the checksums of a layer.
const CRCsFile = "crcs"

// openCRCs opens the checksums of a finished layer; layers of old versions have no checksums.
func (d *Store) openCRCs(uid string, size int64, flag int) (file.Handle, error) {
	h, err := d.FS.Open(d.Join(Dir, uid, CRCsFile), os.O_RDONLY|flag, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if st, err := h.Stat(); err != nil || st.Size() != format.CRCsLength(size) {
		return nil, errors.Join(err, h.Close()) // a file of another length counts as missing
	}
	return h, nil
}

// HasCRCs reports whether a layer has checksums of that length. If the file cannot be read, HasCRCs reports true.
func (d *Store) HasCRCs(uid string, length int64) bool {
	id, _, err := d.FileID(d.Join(Dir, uid, CRCsFile))
	return err == nil && id.size == length || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// makeCRCs gives a finished layer its missing checksums. Blocks of chunks with a wrong digest get no checksums, so that
// every read of such a block compares the digest.
func (d *Store) makeCRCs(ctx context.Context, uid string, each Walk) error {
	rec, err := d.Record(uid)
	if err != nil || d.HasCRCs(uid, format.CRCsLength(rec.Size)) {
		return nil
	}
	l, err := d.OpenLayer(uid, d.Direct) // an open layer is not merged
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }() // read only
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		return err
	}
	sums, err := d.FS.Open(d.Join(Dir, uid, SumsFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer sums.Close()
	name := d.Join(Dir, uid, CRCsFile)
	if err := file.RemoveAll(d.FS, name+".tmp"); err != nil {
		return err
	}
	h, err := d.FS.Open(name+".tmp", os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
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
		if sum, err := format.ChunkSum(l.Data, k, c, l.Rec.Size, buf); err != nil || sum != want {
			return nil
		}
		return format.PutCRCs(h, c, buf[:min(chunkSize, l.Rec.Size-c*chunkSize)])
	})
	if err == nil {
		err = format.SealCRCs(h, l.Rec.Size)
	}
	if err = errors.Join(err, h.Close()); err != nil {
		return errors.Join(err, d.FS.Remove(name+".tmp"))
	}
	return errors.Join(d.FS.Rename(name+".tmp", name), d.FS.SyncDir(d.Join(Dir, uid)))
}

// rightCRCs corrects the checksums of a chunk; buf is the content, which matches the digest.
func (d *Store) rightCRCs(l *Layer, c int64, buf []byte) error {
	if l.CRCs == nil {
		return nil
	}
	h, err := d.FS.Open(d.Join(Dir, l.Rec.UID, CRCsFile), os.O_RDWR, 0)
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

// compareChecksums compares bytes that were read from a layer with the checksums, and reads partial blocks as a whole.
// Holes have no checksum; with data there are none among the blocks.
func (l *Layer) compareChecksums(p []byte, off int64, data bool) error {
	first, end := off>>blockBits, (off+int64(len(p))+blockSize-1)>>blockBits
	from := first >> format.CRCPageBits
	crcs := block.AlignedBuffer(int(((end-1)>>format.CRCPageBits - from + 1) * format.CRCPageSize))
	if n, err := l.CRCs.ReadAt(crcs, from*format.CRCPageSize); n < len(crcs) {
		return l.judgeRead(p, off, fmt.Errorf("checksums: %w", err))
	}
	var part []byte
	for b := first; b < end; b++ {
		at := b<<blockBits - off // of the block in p
		var whole []byte
		if at >= 0 && at+blockSize <= int64(len(p)) {
			whole = p[at:][:blockSize]
		} else {
			if part == nil {
				part = block.AlignedBuffer(int(blockSize))
			}
			whole = part
			if n, err := l.Data.ReadAt(whole, b<<blockBits); n < len(whole) {
				return l.judgeRead(p, off, err)
			}
			copy(p[max(at, 0):min(at+blockSize, int64(len(p)))], whole[max(-at, 0):])
		}
		want := binary.LittleEndian.Uint32(crcs[(b-from<<format.CRCPageBits)*crcSize:])
		if hole := want == 0 && !data; format.BlockCRC(whole) != want && (!hole || !format.IsZero(whole)) {
			return l.judgeRead(p, off, api.Errorf(api.Corrupt, "block %d does not match its checksum", b))
		}
	}
	return nil
}

// judgeRead compares the digests of a read through a Source after a mismatch; why is the mismatch.
func (l *Layer) judgeRead(p []byte, off int64, why error) error {
	bad, err := l.Judge(p, off)
	switch {
	case err != nil:
		return fmt.Errorf("layer %s: %w (%w)", l.Rec.UID, err, why)
	case len(bad) > 0 && l.Hydration != nil:
		l.Hydration.Lose(bad)
		return ErrNotFetched
	case len(bad) > 0:
		l.Store.Learn(l, off, int64(len(p)), bad)
		return api.Errorf(api.Corrupt, "layer %s: the %d bytes at %d are damaged", l.Rec.UID, bad[0].Len, bad[0].Off)
	}
	return nil
}
