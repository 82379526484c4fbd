package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// RepairLayer repairs a finished layer in place, while readers use the layer. root is the known root digest; src
// supplies the content. RepairLayer writes only wrong blocks, into the existing files, so that readers with open files
// read sound content from then on, and makes missing files; layer.json comes last.
//
// RepairLayer does not change a sealed layer: the uid keeps its one content. RepairLayer writes nothing before a read
// of all of src has led to the root digest.
func (d *Store) RepairLayer(ctx context.Context, uid, root string, src block.Source) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("repair layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	m := &layerRepair{d: d, dir: d.Join(Dir, uid), src: src, size: src.Size(), sums: map[int64][sumSize]byte{}}
	if err := m.verifySource(ctx, root); err != nil {
		return err
	}
	if err := m.openFiles(uid); err != nil {
		return errors.Join(err, m.closeFiles())
	}
	if err := errors.Join(m.repairFiles(ctx), m.closeFiles()); err != nil {
		return err
	}
	rec := Record{UID: uid, Size: m.size, Root: root, Allocated: m.allocated, Durable: true,
		Created: time.Now().UTC().Truncate(time.Second)}
	for b := int64(0); b < m.kinds.Blocks; {
		v, n := m.kinds.Run(b, m.kinds.Blocks)
		switch block.Kind(v) {
		case block.Data:
			rec.Data += n << blockBits
		case block.Zero:
			rec.Zero += n << blockBits
		}
		b += n
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := format.WriteMeta(d.FS, m.dir+"/"+LayerFile, FormatLayer, rec); err != nil {
		return err
	}
	return errors.Join(d.PutDamage(uid, m.size, nil), d.FS.SyncDir(d.Join(Dir)))
}

type layerRepair struct {
	d    *Store
	dir  string
	src  block.Source
	size int64

	kinds format.Index
	mu    sync.Mutex
	sums  map[int64][sumSize]byte

	data, direct, crcs file.Handle
	allocated          int64
}

// verifySource reads all of the source and compares the content with the root digest.
func (m *layerRepair) verifySource(ctx context.Context, root string) error {
	if m.size <= 0 || m.size%blockSize != 0 || m.size > api.MaxVolumeSize {
		return api.Errorf(api.Corrupt, "the other copy has %d bytes", m.size)
	}
	m.kinds = format.NewIndex(m.size>>blockBits, uint16(block.Hole))
	for off := int64(0); off < m.size; {
		e, err := m.src.Next(off)
		if err != nil {
			return err
		}
		if e.Kind != block.Hole {
			m.kinds.Set(off>>blockBits, e.End()>>blockBits, uint16(e.Kind))
		}
		off = e.End()
	}
	err := EachChunk(ctx, &m.kinds, func(c int64, buf []byte) error {
		sum, err := format.ChunkSum(m.src, m.kinds.Chunk(c), c, m.size, buf)
		if err == nil {
			m.mu.Lock()
			m.sums[c] = sum
			m.mu.Unlock()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("the other copy: %w", err)
	}
	h := format.NewRoot(m.size)
	for c := range m.kinds.Chunks() {
		format.AddRoot(h, c, m.sums[c], m.kinds.Chunk(c))
	}
	if hex.EncodeToString(h.Sum(nil)) != root {
		return api.Errorf(api.Corrupt, "the other copy does not match the digest")
	}
	return nil
}

// openFiles opens the files, and keeps merges from beginning until closeFiles.
func (m *layerRepair) openFiles(uid string) (err error) {
	unlock, err := m.d.Lock() // no merge begins or ends meanwhile
	if err != nil {
		return err
	}
	defer unlock()
	if err := m.d.FS.Mkdir(m.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	name := m.dir + "/" + DataFile
	if m.data, err = m.d.FS.Open(name, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	if err = diskfs.TryLock(m.data, unix.LOCK_SH); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "another process makes the layer")
	}
	var merging, away bool
	if err == nil {
		merging, err = m.d.BeingMerged(uid)
	}
	if err == nil {
		away, err = m.d.MergedAway(uid)
	}
	if err == nil && (merging || away) { // the files hold blocks of another layer
		return api.Errorf(api.Busy, "a merge is in progress, or its leftovers are not removed yet; try again")
	}
	if err == nil {
		m.direct, err = m.d.FS.Open(name, os.O_RDWR|m.d.Direct, 0)
	}
	if err == nil {
		m.crcs, err = m.d.FS.Open(m.dir+"/"+CRCsFile, os.O_RDWR|os.O_CREATE, 0o600)
	}
	return err
}

func (m *layerRepair) closeFiles() error {
	var errs []error
	for _, h := range []file.Handle{m.data, m.direct, m.crcs} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	m.data, m.direct, m.crcs = nil, nil, nil
	return errors.Join(errs...)
}

// repairFiles repairs all files.
func (m *layerRepair) repairFiles(ctx context.Context) error {
	st, err := m.data.Stat()
	if err == nil && st.Size() != m.size {
		err = m.data.Truncate(m.size)
	}
	if err != nil {
		return err
	}
	if err := EachChunk(ctx, &m.kinds, m.repairChunk); err != nil {
		return err
	}
	if err := errors.Join(m.data.Datasync(), m.data.Chmod(0o444), format.SealCRCs(m.crcs, m.size)); err != nil {
		return err
	}
	if st, err = m.data.Stat(); err != nil {
		return err
	}
	m.allocated = diskfs.Allocated(st)
	if err := m.repairFile(SumsFile, m.writeSums); err != nil {
		return err
	}
	if err := m.repairFile(MapFile, m.writeMap); err != nil {
		return err
	}
	return m.d.FS.SyncDir(m.dir)
}

// repairChunk compares one chunk and writes its wrong blocks.
func (m *layerRepair) repairChunk(c int64, buf []byte) error {
	kinds := m.kinds.Chunk(c)
	if !kinds.Data {
		return nil // no reader needs the file there
	}
	if sum, err := format.ChunkSum(m.direct, kinds, c, m.size, buf); err == nil && sum == m.sums[c] {
		return format.PutCRCs(m.crcs, c, buf[:min(chunkSize, m.size-c*chunkSize)])
	}
	right := buf[:min(chunkSize, m.size-c*chunkSize)]
	if n, err := m.src.ReadAt(right, c*chunkSize); n < len(right) {
		return fmt.Errorf("the other copy, chunk %d: %w", c, errors.Join(err, io.ErrUnexpectedEOF))
	}
	if sha256.Sum256(right) != m.sums[c] {
		return api.Errorf(api.Corrupt, "the other copy changed while it was read")
	}
	first := c * chunkBlks
	for b := first; b < first+int64(len(right))>>blockBits; {
		v, n := m.kinds.Run(b, first+int64(len(right))>>blockBits)
		at, end := (b-first)<<blockBits, (b-first+n)<<blockBits
		var err error
		if block.Kind(v) == block.Data {
			_, err = m.direct.WriteAt(right[at:end], b<<blockBits)
		} else {
			err = m.data.Punch(b<<blockBits, n<<blockBits)
		}
		if err != nil {
			return err
		}
		b += n
	}
	return format.PutCRCs(m.crcs, c, right)
}

// repairFile repairs one of the files beside the data, in place.
func (m *layerRepair) repairFile(name string, write func(h file.Handle) (size int64, err error)) error {
	h, err := m.d.FS.Open(m.dir+"/"+name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	size, err := write(h)
	if err == nil {
		err = errors.Join(h.Truncate(size), h.Datasync(), h.Chmod(0o444))
	}
	return errors.Join(err, h.Close())
}

func (m *layerRepair) writeSums(h file.Handle) (int64, error) {
	_, err := h.WriteAt(format.SumsHeaderOf(m.size), 0)
	for c := range m.kinds.Chunks() {
		sum := m.sums[c]
		if err == nil {
			_, err = h.WriteAt(sum[:], sumsHeader+c*sumSize)
		}
	}
	return sumsHeader + (m.size+chunkSize-1)/chunkSize*sumSize, err
}

// writeMap keeps a map with the same meaning: readers with the open map know the places of its pages.
func (m *layerRepair) writeMap(h file.Handle) (int64, error) {
	st, err := h.Stat()
	if err != nil {
		return 0, err
	}
	if old, err := format.OpenMap(h, st.Size(), m.size); err == nil {
		if x, err := format.IndexOf(old); err == nil && bytes.Equal(format.EncodeMap(x), format.EncodeMap(&m.kinds)) {
			return st.Size(), nil
		}
	}
	b := format.EncodeMap(&m.kinds)
	_, err = h.WriteAt(b, 0)
	return int64(len(b)), err
}
