package layer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// A checkpoint lets another process continue a half-made layer: the record names the complete part. Checkpoint replaces
// the record atomically, after the complete part is durable; later writes do not count.

// Names and age of the checkpoint of an import.
const (
	FormatCheckpoint  = "drover-kept-layer"
	CheckpointFile    = "kept.json"
	CheckpointMapFile = "kept.map"
	CheckpointAge     = 7 * 24 * time.Hour // without progress; older checkpoints are garbage

	besidePrefix = "beside-"
)

// CheckpointRecord describes the complete part of a half-made layer.
type CheckpointRecord struct {
	UID  string          `json:"uid"`
	Size int64           `json:"size"`
	UpTo int64           `json:"upTo"`           // end of the complete part; a multiple of the chunk size
	Open []int64         `json:"open,omitempty"` // chunks before UpTo without a digest in sums
	At   time.Time       `json:"at"`
	Note json.RawMessage `json:"note"`
}

// Checkpoint implements block.CheckpointWriter.
func (w *Writer) Checkpoint(upTo int64, note []byte) error {
	size, err := w.checkAccess(0, upTo)
	if err != nil {
		return w.nameError(err)
	}
	if upTo%chunkSize != 0 {
		return w.nameError(api.Errorf(api.OutOfRange, "checkpoint at %d bytes: not a multiple of a chunk", upTo))
	}
	if err := w.syncData(w.sums.Datasync, w.crcs.Datasync); err != nil {
		return w.nameError(err)
	}
	rec := CheckpointRecord{UID: w.UID, Size: size, UpTo: upTo, At: time.Now().UTC().Truncate(time.Second), Note: note}
	w.Mu.Lock()
	m := format.EncodeMap(&w.kinds)
	for c := range upTo / chunkSize {
		if !w.known[c] && !w.isAllHoles(c) {
			rec.Open = append(rec.Open, c)
		}
	}
	w.Mu.Unlock()
	if err := format.ReplaceFile(w.d.FS, w.dir+"/"+CheckpointMapFile, m); err != nil {
		return w.nameError(err)
	}
	if err := format.WriteMeta(w.d.FS, w.dir+"/"+CheckpointFile, FormatCheckpoint, rec); err != nil {
		return w.nameError(err)
	}
	return w.nameError(w.d.FS.SyncDir(w.d.Join(Dir)))
}

// Leave implements block.CheckpointWriter.
func (w *Writer) Leave() error {
	w.Mu.Lock()
	was := w.State
	if was == writing {
		w.State = Aborted
	}
	w.Mu.Unlock()
	if was != writing {
		return nil
	}
	return w.nameError(w.closeFiles())
}

// Beside implements block.CheckpointWriter.
func (w *Writer) Beside(name string) (block.Scratch, error) {
	if _, err := w.checkAccess(0, 0); err != nil {
		return nil, w.nameError(err)
	}
	if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz") != "" {
		return nil, w.nameError(api.Errorf(api.Invalid, "%q is no name for a file beside it", name))
	}
	h, err := w.d.FS.Open(w.dir+"/"+besidePrefix+name, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		// The name survives like the content.
		if err = w.d.FS.SyncDir(w.dir); err != nil {
			err = errors.Join(err, h.Close())
		}
	}
	if err != nil {
		return nil, w.nameError(err)
	}
	return h, nil
}

// ReadAt implements block.CheckpointWriter.
func (w *Writer) ReadAt(p []byte, off int64) (int, error) {
	if _, err := w.checkAccess(off, int64(len(p))); err != nil {
		return 0, w.nameError(err)
	}
	n, err := w.data.ReadAt(p, off)
	return n, w.nameError(err)
}

// removeCheckpoint removes the files of checkpoints. A leftover does no harm.
func (w *Writer) removeCheckpoint() {
	all, err := w.d.FS.ReadDir(w.dir)
	if err != nil {
		return
	}
	for _, e := range all {
		if n := e.Name(); n == CheckpointFile || n == CheckpointMapFile || strings.HasPrefix(n, besidePrefix) {
			_ = w.d.FS.Remove(w.dir + "/" + n)
		}
	}
}

// Resumable reports whether a half-made layer has a checkpoint, and a recent one, or recent data: a restore writes its
// checkpoint once, before the data. A damaged checkpoint counts as none.
func (d *Store) Resumable(uid string, now time.Time) (bool, error) {
	var rec CheckpointRecord
	err := format.ReadMeta(d.FS, d.Join(Dir, uid, CheckpointFile), FormatCheckpoint, &rec)
	if errors.Is(err, fs.ErrNotExist) || api.Is(err, api.Corrupt) {
		return false, nil
	}
	if err != nil || now.Sub(rec.At) < CheckpointAge {
		return err == nil, err
	}
	h, err := d.FS.Open(d.Join(Dir, uid, DataFile), os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer h.Close()
	st, err := h.Stat()
	return err == nil && now.Sub(st.ModTime()) < CheckpointAge, err
}

// Resume continues a layer from its checkpoint.
func (d *Store) Resume(ctx context.Context, uid string) (_ block.CheckpointWriter, upTo int64, note []byte, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("continue layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := errors.Join(api.UID(uid).Validate(), ctx.Err()); err != nil {
		return nil, 0, nil, err
	}
	unlock, err := d.Lock()
	if err != nil {
		return nil, 0, nil, err
	}
	defer unlock()
	if away, err := d.MergedAway(uid); err != nil {
		return nil, 0, nil, err
	} else if away { // the files may belong to the result of a merge by now
		return nil, 0, nil, api.Errorf(api.NotFound, "no checkpoint")
	}
	var rec CheckpointRecord
	err = format.ReadMeta(d.FS, d.Join(Dir, uid, CheckpointFile), FormatCheckpoint, &rec)
	if errors.Is(err, fs.ErrNotExist) {
		err = api.Errorf(api.NotFound, "no checkpoint")
	}
	if err != nil {
		return nil, 0, nil, err
	}
	if err := d.refuseFinished(uid); err != nil {
		return nil, 0, nil, err
	}
	if rec.UID != uid || rec.UpTo%chunkSize != 0 || rec.UpTo < 0 || rec.UpTo > rec.Size || rec.Size <= 0 ||
		rec.Size > api.MaxVolumeSize || rec.Size%blockSize != 0 {
		return nil, 0, nil, api.Errorf(api.Corrupt, "the checkpoint is damaged: wrong uid or sizes")
	}
	w := &Writer{d: d, UID: uid, dir: d.Join(Dir, uid), Size: rec.Size,
		kinds: format.NewIndex(rec.Size>>blockBits, uint16(block.Hole)), known: make(map[int64]bool),
		dirty: make(map[int64]int)}
	if err := w.reopenFiles(&rec); err != nil {
		return nil, 0, nil, errors.Join(err, w.closeFiles())
	}
	return w, rec.UpTo, rec.Note, nil
}

// reopenFiles opens the files and drops everything behind the complete part.
func (w *Writer) reopenFiles(rec *CheckpointRecord) (err error) {
	name := w.dir + "/" + DataFile
	if w.data, err = w.d.FS.Open(name, os.O_RDWR, 0); err != nil {
		return err
	}
	err = diskfs.TryLock(w.data, unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "another process makes the layer")
	}
	if err != nil {
		return err
	}
	if err := w.d.refuseFinished(w.UID); err != nil { // finished by the former holder of the lock
		return err
	}
	if err := errors.Join(w.data.Truncate(rec.UpTo), w.data.Truncate(rec.Size)); err != nil {
		return err
	}
	if w.direct, err = w.d.FS.Open(name, os.O_RDWR|w.d.Direct, 0); err != nil {
		return err
	}
	if w.sums, err = w.d.FS.Open(w.dir+"/"+SumsFile, os.O_RDWR, 0); err != nil {
		return err
	}
	had := true
	w.crcs, err = w.d.FS.Open(w.dir+"/"+CRCsFile, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		had = false
		w.crcs, err = w.d.FS.Open(w.dir+"/"+CRCsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return err
	}
	if err := w.crcs.Truncate(rec.UpTo >> blockBits * crcSize); err != nil {
		return err
	}
	if err := w.readKinds(rec); err != nil {
		return err
	}
	if !had {
		return nil // Seal reads all chunks again
	}
	for c := range rec.UpTo / chunkSize {
		if !w.isAllHoles(c) {
			w.known[c] = true
		}
	}
	for _, c := range rec.Open {
		delete(w.known, c)
	}
	return nil
}

// isAllHoles reports whether a chunk is all holes, so that its digest is known.
func (w *Writer) isAllHoles(c int64) bool {
	b := c * (chunkSize >> blockBits)
	end := min(b+chunkSize>>blockBits, w.kinds.Blocks)
	v, n := w.kinds.Run(b, end)
	return v == uint16(block.Hole) && n == end-b
}

// readKinds reads the map of the complete part.
func (w *Writer) readKinds(rec *CheckpointRecord) error {
	var h file.Handle
	h, err := w.d.FS.Open(w.dir+"/"+CheckpointMapFile, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil {
		return err
	}
	m, err := format.OpenMap(h, st.Size(), rec.Size)
	if err != nil {
		return err
	}
	var kinds [pageBlocks]block.Kind
	end := rec.UpTo >> blockBits
	for p := 0; int64(p)<<pageBits < end; p++ {
		if err := m.Load(p, &kinds); err != nil {
			return err
		}
		first := int64(p) << pageBits
		n := min(end-first, pageBlocks)
		for b := int64(0); b < n; {
			e := b + 1
			for e < n && kinds[e] == kinds[b] {
				e++
			}
			w.kinds.Set(first+b, first+e, uint16(kinds[b]))
			b = e
		}
	}
	return nil
}

var _ block.CheckpointWriter = (*Writer)(nil)
