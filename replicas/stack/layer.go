package stack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

// A finished layer is a folder: data (sparse, offset = offset in the volume), map (which blocks it holds), sums (one
// digest per chunk), and layer.json, its commit point.
const (
	dataFile  = "data"
	mapFile   = "map"
	sumsFile  = "sums"
	layerFile = "layer.json"

	mapMagic  = "DROVERM1"
	mapHeader = 64
	mapEntry  = 16
	mapPage   = pageBlocks / 4 // bytes of a page with 2 bits per block

	entryUniform = 0
	entryPacked  = 1
)

// layerRecord is layer.json.
type layerRecord struct {
	UID       string    `json:"uid"`
	Size      int64     `json:"size"`
	Root      string    `json:"root"`      // digest over the sums and the map
	Data      int64     `json:"data"`      // bytes in blocks of kind data
	Zero      int64     `json:"zero"`      // bytes in blocks of kind zero
	Allocated int64     `json:"allocated"` // bytes on the disk when it was finished
	Durable   bool      `json:"durable"`   // the data was synced before this was written
	Created   time.Time `json:"created"`
}

// layerMap is the opened map of a layer: its table in memory, its pages on the disk.
type layerMap struct {
	size  int64
	pages int
	table []byte
	h     io.ReaderAt
}

// openMap reads and checks the header and the table.
func openMap(h io.ReaderAt, length, size int64) (*layerMap, error) {
	var b [mapHeader]byte
	if _, err := h.ReadAt(b[:], 0); err != nil {
		return nil, api.Errorf(api.Corrupt, "header of the map: %w", err)
	}
	pages := (size + pageSize - 1) / pageSize
	if string(b[:8]) != mapMagic || binary.LittleEndian.Uint32(b[8:]) != version ||
		crc32.Checksum(b[:60], castagnoli) != binary.LittleEndian.Uint32(b[60:]) ||
		int64(binary.LittleEndian.Uint64(b[16:])) != size || int64(binary.LittleEndian.Uint64(b[24:])) != pages ||
		length < mapHeader+pages*mapEntry {
		return nil, api.Errorf(api.Corrupt, "header of the map is damaged")
	}
	m := &layerMap{size: size, pages: int(pages), table: make([]byte, pages*mapEntry), h: h}
	if _, err := h.ReadAt(m.table, mapHeader); err != nil {
		return nil, fmt.Errorf("table of the map: %w", err)
	}
	if crc32.Checksum(m.table, castagnoli) != binary.LittleEndian.Uint32(b[32:]) {
		return nil, api.Errorf(api.Corrupt, "table of the map is damaged")
	}
	for p := range m.pages {
		t, k, off := m.entry(p)
		if t > entryPacked || k > byte(block.Data) ||
			t == entryPacked && (off < mapHeader+pages*mapEntry || off > length-mapPage) {
			return nil, api.Errorf(api.Corrupt, "table of the map: entry %d makes no sense", p)
		}
	}
	return m, nil
}

func (m *layerMap) length() int64 { return m.size }

func (m *layerMap) entry(p int) (typ, kind byte, off int64) {
	e := m.table[p*mapEntry:]
	return e[0], e[1], int64(binary.LittleEndian.Uint64(e[8:]))
}

// uniform is the one kind of page p, if it has one.
func (m *layerMap) uniform(p int) (block.Kind, bool) {
	if p >= m.pages {
		return block.Hole, true
	}
	t, k, _ := m.entry(p)
	return block.Kind(k), t == entryUniform
}

// load fills kinds, one byte per block of page p, up to the end of the layer; the rest is holes.
func (m *layerMap) load(p int, kinds *[pageBlocks]block.Kind) error {
	end := pageBlocks
	if last := m.size>>blockBits - int64(p)<<pageBits; last < pageBlocks {
		end = int(max(last, 0))
	}
	clear(kinds[end:])
	if k, ok := m.uniform(p); ok {
		for i := range kinds[:end] {
			kinds[i] = k
		}
		return nil
	}
	_, _, off := m.entry(p)
	var b [mapPage]byte
	if _, err := m.h.ReadAt(b[:], off); err != nil {
		return fmt.Errorf("page %d of the map: %w", p, err)
	}
	if crc32.Checksum(b[:], castagnoli) != binary.LittleEndian.Uint32(m.table[p*mapEntry+4:]) {
		return api.Errorf(api.Corrupt, "page %d of the map is damaged", p)
	}
	for i := range kinds[:end] {
		k := block.Kind(b[i>>2] >> (i & 3 * 2) & 3)
		if k > block.Data {
			return api.Errorf(api.Corrupt, "page %d of the map holds a kind that does not exist", p)
		}
		kinds[i] = k
	}
	return nil
}

// mapWriter writes the file of a map, some pages after others, and in the end what makes it one.
type mapWriter struct {
	w    io.WriterAt
	head []byte // header and table
	at   int64  // where the next page goes
}

func newMapWriter(w io.WriterAt, pages int) *mapWriter {
	m := &mapWriter{w: w, head: make([]byte, mapHeader+pages*mapEntry)}
	m.at = int64(len(m.head))
	return m
}

// table is what tells of the pages [from, end).
func (m *mapWriter) table(from, end int) []byte {
	return m.head[mapHeader+from*mapEntry : mapHeader+end*mapEntry]
}

// put writes the pages [from, end) of an index whose values are kinds, and not yet what tells of them. No more than a
// few are in memory a second time.
func (m *mapWriter) put(x *index, from, end int) error {
	some := make([]byte, 0, 64*mapPage)
	flush := func() error {
		_, err := m.w.WriteAt(some, m.at)
		m.at, some = m.at+int64(len(some)), some[:0]
		return err
	}
	for p := from; p < end; p++ {
		e := m.table(p, p+1)
		q := x.packed[p]
		if q == nil {
			e[0], e[1] = entryUniform, byte(x.uniform[p])
			continue
		}
		n := len(some)
		some = some[:n+mapPage]
		b := some[n:]
		clear(b)
		for i := range q.blocks {
			b[i>>2] |= byte(q.pal[q.code(i)]) << (i & 3 * 2)
		}
		e[0] = entryPacked
		binary.LittleEndian.PutUint32(e[4:], crc32.Checksum(b, castagnoli))
		binary.LittleEndian.PutUint64(e[8:], uint64(m.at)+uint64(n))
		if len(some) == cap(some) {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if len(some) > 0 {
		return flush()
	}
	return nil
}

// end writes the header and the table: all pages of a layer of that many blocks are there.
func (m *mapWriter) end(blocks int64) error {
	pages := (len(m.head) - mapHeader) / mapEntry
	copy(m.head, mapMagic)
	binary.LittleEndian.PutUint32(m.head[8:], version)
	binary.LittleEndian.PutUint64(m.head[16:], uint64(blocks)<<blockBits)
	binary.LittleEndian.PutUint64(m.head[24:], uint64(pages))
	binary.LittleEndian.PutUint32(m.head[32:], crc32.Checksum(m.table(0, pages), castagnoli))
	binary.LittleEndian.PutUint32(m.head[60:], crc32.Checksum(m.head[:60], castagnoli))
	_, err := m.w.WriteAt(m.head, 0)
	return err
}

// putMap writes the file of a map from an index whose values are kinds.
func putMap(w io.WriterAt, x *index) error {
	m := newMapWriter(w, len(x.uniform))
	if err := m.put(x, 0, len(x.uniform)); err != nil {
		return err
	}
	return m.end(x.blocks)
}

// writeMap makes the file of a map with durable content; its name is durable once the folder is synced.
func writeMap(fsys file.FS, name string, x *index) error {
	h, err := fsys.Open(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := putMap(h, x); err != nil {
		return errors.Join(err, h.Close())
	}
	return errors.Join(h.Datasync(), h.Close())
}

// encodeMap is what putMap writes.
func encodeMap(x *index) []byte {
	n := mapHeader + len(x.uniform)*mapEntry
	for _, q := range x.packed {
		if q != nil {
			n += mapPage
		}
	}
	out := make(inMemory, n)
	_ = putMap(out, x) // it has room for all
	return out
}

// inMemory is a file in memory, of a length that is known.
type inMemory []byte

// WriteAt implements io.WriterAt.
func (m inMemory) WriteAt(b []byte, off int64) (int, error) { return copy(m[off:], b), nil }

// layer is an open, finished layer. It stays readable whatever happens to its name.
type layer struct {
	rec     layerRecord
	m       blockMap
	data    file.Handle
	mapping file.Handle
	mapped  file.Handle // of a layer that is being merged: what m has of the result's map
	crcs    file.Handle // nil: it has none
	damage  []Damage
	disk    *Disk
	pages   map[int64]*crcPage // of crcs, that are in memory; the loop's
	hy      *hydration         // of a layer that sources supply until it is finished here; else nil
}

// openLayer opens a finished or frozen layer; flag is added to the flags of the data file.
func (d *Disk) openLayer(uid string, flag int) (*layer, error) {
	return d.openLayerAs(uid, flag, false)
}

// openLayerAs opens a layer; its owner may do so while it is being merged.
func (d *Disk) openLayerAs(uid string, flag int, owner bool) (_ *layer, err error) {
	if err := api.UID(uid).Validate(); err != nil {
		return nil, fmt.Errorf("layer: %w", err)
	}
	l := &layer{disk: d}
	defer func() {
		if err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
			_ = l.close()
		}
	}()
	if l.rec, err = d.layerRecord(uid); api.Is(err, api.NotFound) {
		missing := err
		if err = d.openFrozen(l, uid, flag, owner); err == nil {
			return l, nil
		}
		if !api.Is(err, api.NotFound) && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		_ = l.close()
		*l = layer{disk: d}
		if l.rec, err = d.layerRecord(uid); api.Is(err, api.NotFound) { // else it was finished meanwhile
			err = missing
		}
	}
	if err != nil {
		return nil, err
	}
	if err = d.openData(l, uid, flag, owner); err != nil {
		return nil, err
	}
	if err = d.openTables(l, flag); err != nil {
		return nil, err
	}
	if owner {
		if err = d.openMapped(l); err != nil {
			return nil, err
		}
	}
	l.damage = d.damaged(uid, l.rec.Size)
	return l, nil
}

// openTables opens what a finished layer has beside its data: the map, and the checksums if there are any.
func (d *Disk) openTables(l *layer, flag int) (err error) {
	if l.mapping, err = d.fs.Open(d.path(layersDir, l.rec.UID, mapFile), os.O_RDONLY, 0); err != nil {
		return err
	}
	st, err := l.mapping.Stat()
	if err != nil {
		return err
	}
	if l.m, err = openMap(l.mapping, st.Size(), l.rec.Size); err != nil {
		return err
	}
	l.crcs, err = d.openCRCs(l.rec.UID, l.rec.Size, flag)
	return err
}

// openData opens the data of a layer. Readers other than its owner hold a shared lock on it, so that nobody begins to
// merge it, and are refused while it is being merged, or is still a head.
func (d *Disk) openData(l *layer, uid string, flag int, owner bool) (err error) {
	if l.data, err = d.fs.Open(d.path(layersDir, uid, dataFile), os.O_RDONLY|flag, 0); err != nil || owner {
		return err
	}
	err = tryLock(l.data, unix.LOCK_SH)
	if err == nil {
		st, serr := l.data.Stat()
		if serr != nil {
			return serr
		}
		if names(st) == 0 { // removed between the two, and perhaps emptied
			return api.Errorf(api.NotFound, "it was removed")
		}
		var merging, there bool
		if merging, err = d.beingMerged(uid); merging {
			err = unix.EWOULDBLOCK
		} else if err == nil {
			// The lock may have been that of a merge that has ended since: the file is another layer's now.
			there, err = d.exists(d.path(layersDir, uid, dataFile))
			if err == nil && there {
				var away bool
				away, err = d.mergedAway(uid)
				there = !away
			}
			if err == nil && !there {
				err = unix.EWOULDBLOCK
			}
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "it is being cut off or merged; try again")
	}
	return err
}

// layerRecord reads layer.json. A layer that has none, or that was merged into another one, is an error of kind not
// found.
func (d *Disk) layerRecord(uid string) (layerRecord, error) {
	var rec layerRecord
	err := readMeta(d.fs, d.path(layersDir, uid, layerFile), formatLayer, &rec)
	away := false
	if err == nil {
		away, err = d.mergedAway(uid)
	}
	switch {
	case away || errors.Is(err, fs.ErrNotExist):
		return layerRecord{}, api.Errorf(api.NotFound, "no finished layer of that uid")
	case err != nil:
		return rec, err
	case rec.UID != uid || rec.Size < 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize:
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", layerFile)
	}
	return rec, nil
}

func (l *layer) close() error {
	var errs []error
	if l.hy != nil {
		l.hy.leave(l)
		l.hy = nil
	}
	for _, h := range []file.Handle{l.data, l.mapping, l.mapped, l.crcs} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	return errors.Join(errs...)
}
