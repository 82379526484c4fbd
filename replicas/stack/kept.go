package stack

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
	"drover.io/drover/replicas/stack/format"
)

// A layer that is being made can be kept, to be continued by another process: its record says up to where it is whole.
// The record is replaced atomically, after all that it says is durable; what is written later does not count.

const (
	formatKept  = "drover-kept-layer"
	keptFile    = "kept.json"
	keptMapFile = "kept.map"
	keptFor     = 7 * 24 * time.Hour // then nobody will continue it

	besidePrefix = "beside-"
)

// keptRecord says what is there of a half-made layer.
type keptRecord struct {
	UID  string          `json:"uid"`
	Size int64           `json:"size"`
	UpTo int64           `json:"upTo"`           // all before this is there; a multiple of the chunk size
	Open []int64         `json:"open,omitempty"` // chunks before it whose digest is not noted
	At   time.Time       `json:"at"`
	Note json.RawMessage `json:"note"`
}

// Keep implements block.Keeper.
func (w *layerWriter) Keep(upTo int64, note []byte) error {
	size, err := w.check(0, upTo)
	if err != nil {
		return w.name(err)
	}
	if upTo%chunkSize != 0 {
		return w.name(api.Errorf(api.OutOfRange, "%d bytes are no whole chunks", upTo))
	}
	if err := w.sync(w.sums.Datasync, w.crcs.Datasync); err != nil {
		return w.name(err)
	}
	rec := keptRecord{UID: w.uid, Size: size, UpTo: upTo, At: time.Now().UTC().Truncate(time.Second), Note: note}
	w.mu.Lock()
	m := format.EncodeMap(&w.kinds)
	for c := range upTo / chunkSize {
		if !w.known[c] && !w.blank(c) {
			rec.Open = append(rec.Open, c)
		}
	}
	w.mu.Unlock()
	if err := format.ReplaceFile(w.d.fs, w.dir+"/"+keptMapFile, m); err != nil {
		return w.name(err)
	}
	if err := format.WriteMeta(w.d.fs, w.dir+"/"+keptFile, formatKept, rec); err != nil {
		return w.name(err)
	}
	return w.name(w.d.fs.SyncDir(w.d.path(layersDir)))
}

// Leave implements block.Keeper.
func (w *layerWriter) Leave() error {
	w.mu.Lock()
	was := w.state
	if was == writing {
		w.state = aborted
	}
	w.mu.Unlock()
	if was != writing {
		return nil
	}
	return w.name(w.closeFiles())
}

// Beside implements block.Keeper.
func (w *layerWriter) Beside(name string) (block.Scratch, error) {
	if _, err := w.check(0, 0); err != nil {
		return nil, w.name(err)
	}
	if name == "" || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz") != "" {
		return nil, w.name(api.Errorf(api.Invalid, "%q is no name for a file beside it", name))
	}
	h, err := w.d.fs.Open(w.dir+"/"+besidePrefix+name, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		// Its name is to survive as what is in it does.
		if err = w.d.fs.SyncDir(w.dir); err != nil {
			err = errors.Join(err, h.Close())
		}
	}
	if err != nil {
		return nil, w.name(err)
	}
	return h, nil
}

// ReadAt implements block.Keeper.
func (w *layerWriter) ReadAt(p []byte, off int64) (int, error) {
	if _, err := w.check(off, int64(len(p))); err != nil {
		return 0, w.name(err)
	}
	n, err := w.data.ReadAt(p, off)
	return n, w.name(err)
}

// unkeep removes what is of use only while the layer is made. What is left of it harms nobody.
func (w *layerWriter) unkeep() {
	all, err := w.d.fs.ReadDir(w.dir)
	if err != nil {
		return
	}
	for _, e := range all {
		if n := e.Name(); n == keptFile || n == keptMapFile || strings.HasPrefix(n, besidePrefix) {
			_ = w.d.fs.Remove(w.dir + "/" + n)
		}
	}
}

// kept reports whether a half-made layer may still be continued. A record that makes no sense is of no use to anybody.
func (d *Disk) kept(uid string, now time.Time) (bool, error) {
	var rec keptRecord
	err := format.ReadMeta(d.fs, d.path(layersDir, uid, keptFile), formatKept, &rec)
	if errors.Is(err, fs.ErrNotExist) || api.Is(err, api.Corrupt) {
		return false, nil
	}
	return err == nil && now.Sub(rec.At) < keptFor, err
}

// Resume continues a layer that was kept.
func (d *Disk) Resume(ctx context.Context, uid string) (_ block.Keeper, upTo int64, note []byte, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("continue layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := errors.Join(api.UID(uid).Validate(), ctx.Err()); err != nil {
		return nil, 0, nil, err
	}
	unlock, err := d.lock()
	if err != nil {
		return nil, 0, nil, err
	}
	defer unlock()
	if away, err := d.mergedAway(uid); err != nil {
		return nil, 0, nil, err
	} else if away { // its files may be the result's by now
		return nil, 0, nil, api.Errorf(api.NotFound, "nothing of it was kept")
	}
	var rec keptRecord
	err = format.ReadMeta(d.fs, d.path(layersDir, uid, keptFile), formatKept, &rec)
	if errors.Is(err, fs.ErrNotExist) {
		err = api.Errorf(api.NotFound, "nothing of it was kept")
	}
	if err != nil {
		return nil, 0, nil, err
	}
	if err := d.unmade(uid); err != nil {
		return nil, 0, nil, err
	}
	if rec.UID != uid || rec.UpTo%chunkSize != 0 || rec.UpTo < 0 || rec.UpTo > rec.Size || rec.Size <= 0 ||
		rec.Size > api.MaxVolumeSize || rec.Size%blockSize != 0 {
		return nil, 0, nil, api.Errorf(api.Corrupt, "its record makes no sense")
	}
	w := &layerWriter{d: d, uid: uid, dir: d.path(layersDir, uid), size: rec.Size,
		kinds: format.NewIndex(rec.Size>>blockBits, uint16(block.Hole)), known: make(map[int64]bool),
		dirty: make(map[int64]int)}
	if err := w.reopen(&rec); err != nil {
		return nil, 0, nil, errors.Join(err, w.closeFiles())
	}
	return w, rec.UpTo, rec.Note, nil
}

// reopen opens the files and forgets what is behind the kept part.
func (w *layerWriter) reopen(rec *keptRecord) (err error) {
	name := w.dir + "/" + dataFile
	if w.data, err = w.d.fs.Open(name, os.O_RDWR, 0); err != nil {
		return err
	}
	err = tryLock(w.data, unix.LOCK_EX)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "somebody else is making it")
	}
	if err != nil {
		return err
	}
	if err := w.d.unmade(w.uid); err != nil { // by who had the lock before
		return err
	}
	if err := errors.Join(w.data.Truncate(rec.UpTo), w.data.Truncate(rec.Size)); err != nil {
		return err
	}
	if w.direct, err = w.d.fs.Open(name, os.O_RDWR|w.d.direct, 0); err != nil {
		return err
	}
	if w.sums, err = w.d.fs.Open(w.dir+"/"+sumsFile, os.O_RDWR, 0); err != nil {
		return err
	}
	had := true
	w.crcs, err = w.d.fs.Open(w.dir+"/"+crcsFile, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		had = false
		w.crcs, err = w.d.fs.Open(w.dir+"/"+crcsFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
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
		return nil // all is read again in the end
	}
	for c := range rec.UpTo / chunkSize {
		if !w.blank(c) {
			w.known[c] = true
		}
	}
	for _, c := range rec.Open {
		delete(w.known, c)
	}
	return nil
}

// blank reports whether nothing was written to a chunk. Its digest follows from that.
func (w *layerWriter) blank(c int64) bool {
	b := c * (chunkSize >> blockBits)
	end := min(b+chunkSize>>blockBits, w.kinds.Blocks)
	v, n := w.kinds.Run(b, end)
	return v == uint16(block.Hole) && n == end-b
}

// readKinds takes what the kept part holds from its map.
func (w *layerWriter) readKinds(rec *keptRecord) error {
	var h file.Handle
	h, err := w.d.fs.Open(w.dir+"/"+keptMapFile, os.O_RDONLY, 0)
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

var _ block.Keeper = (*layerWriter)(nil)
