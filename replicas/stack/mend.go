package stack

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
	"drover.io/drover/replicas/stack/format"
)

// Mend makes a finished layer whole again where it is, under those who use it. root is the digest that it is known to
// have; src has that content, from anywhere. Only what is wrong is written, into the files that are there, so that who
// has them open reads what is right from then on. Files that are gone are made; layer.json is written last.
//
// It is no change of a sealed layer: its content is what its uid has meant from the beginning. Nothing is written
// before all of src was read once and has that digest.
func (d *Disk) Mend(ctx context.Context, uid, root string, src block.Source) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("repair layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	m := &mending{d: d, dir: d.path(layersDir, uid), src: src, size: src.Size(), sums: map[int64][sumSize]byte{}}
	if err := m.learn(ctx, root); err != nil {
		return err
	}
	if err := m.open(uid); err != nil {
		return errors.Join(err, m.close())
	}
	if err := errors.Join(m.write(ctx), m.close()); err != nil {
		return err
	}
	rec := layerRecord{UID: uid, Size: m.size, Root: root, Allocated: m.allocated, Durable: true,
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
	unlock, err := d.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if err := format.WriteMeta(d.fs, m.dir+"/"+layerFile, formatLayer, rec); err != nil {
		return err
	}
	return errors.Join(d.putDamage(uid, m.size, nil), d.fs.SyncDir(d.path(layersDir)))
}

type mending struct {
	d    *Disk
	dir  string
	src  block.Source
	size int64

	kinds format.Index
	mu    sync.Mutex
	sums  map[int64][sumSize]byte

	data, direct, crcs file.Handle
	allocated          int64
}

// learn reads all of the source and compares it with the digest.
func (m *mending) learn(ctx context.Context, root string) error {
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
	err := eachChunk(ctx, &m.kinds, func(c int64, buf []byte) error {
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

// open opens the files, and keeps merges away until close.
func (m *mending) open(uid string) (err error) {
	unlock, err := m.d.lock() // no merge begins or ends meanwhile
	if err != nil {
		return err
	}
	defer unlock()
	if err := m.d.fs.Mkdir(m.dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	name := m.dir + "/" + dataFile
	if m.data, err = m.d.fs.Open(name, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	if err = tryLock(m.data, unix.LOCK_SH); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "somebody is making it")
	}
	var merging, away bool
	if err == nil {
		merging, err = m.d.beingMerged(uid)
	}
	if err == nil {
		away, err = m.d.mergedAway(uid)
	}
	if err == nil && (merging || away) { // what is in its files is another layer's, too
		return api.Errorf(api.Busy, "it is being merged, or what a merge left of it is not removed yet; try again")
	}
	if err == nil {
		m.direct, err = m.d.fs.Open(name, os.O_RDWR|m.d.direct, 0)
	}
	if err == nil {
		m.crcs, err = m.d.fs.Open(m.dir+"/"+crcsFile, os.O_RDWR|os.O_CREATE, 0o600)
	}
	return err
}

func (m *mending) close() error {
	var errs []error
	for _, h := range []file.Handle{m.data, m.direct, m.crcs} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	m.data, m.direct, m.crcs = nil, nil, nil
	return errors.Join(errs...)
}

// write puts right what is wrong.
func (m *mending) write(ctx context.Context) error {
	st, err := m.data.Stat()
	if err == nil && st.Size() != m.size {
		err = m.data.Truncate(m.size)
	}
	if err != nil {
		return err
	}
	if err := eachChunk(ctx, &m.kinds, m.chunk); err != nil {
		return err
	}
	if err := errors.Join(m.data.Datasync(), m.data.Chmod(0o444), format.SealCRCs(m.crcs, m.size)); err != nil {
		return err
	}
	if st, err = m.data.Stat(); err != nil {
		return err
	}
	m.allocated = allocated(st)
	if err := m.side(sumsFile, m.writeSums); err != nil {
		return err
	}
	if err := m.side(mapFile, m.writeMap); err != nil {
		return err
	}
	return m.d.fs.SyncDir(m.dir)
}

// chunk compares one chunk, and writes the blocks of it that are not what they should be.
func (m *mending) chunk(c int64, buf []byte) error {
	kinds := m.kinds.Chunk(c)
	if !kinds.Data {
		return nil // nobody reads the file there
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

// side puts one of the files beside the data right, in place.
func (m *mending) side(name string, write func(h file.Handle) (size int64, err error)) error {
	h, err := m.d.fs.Open(m.dir+"/"+name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	size, err := write(h)
	if err == nil {
		err = errors.Join(h.Truncate(size), h.Datasync(), h.Chmod(0o444))
	}
	return errors.Join(err, h.Close())
}

func (m *mending) writeSums(h file.Handle) (int64, error) {
	_, err := h.WriteAt(format.SumsHeaderOf(m.size), 0)
	for c := range m.kinds.Chunks() {
		sum := m.sums[c]
		if err == nil {
			_, err = h.WriteAt(sum[:], sumsHeader+c*sumSize)
		}
	}
	return sumsHeader + (m.size+chunkSize-1)/chunkSize*sumSize, err
}

// WriteMap leaves a map that says the same as it is: who has it open knows where its pages are.
func (m *mending) writeMap(h file.Handle) (int64, error) {
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
