package stack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file/lossy"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/layer"
)

// modelLoop is the loop on which a worker of the model test runs programs.
type modelLoop struct{ *uring.Loop }

// The blocks which programs touch: the first blocks, and some around the border between two pages of the index.
const (
	hotLow    = int64(64)
	hotHigh   = int64(32)
	highStart = pageBlocks - hotHigh/2
	smallSize = hotLow << blockBits
	largeSize = (highStart + hotHigh) << blockBits
)

// An image is the content of a volume or a snapshot: a number for every sector other than zero.
type image map[int64]uint64

// mvol is the model of a volume.
type mvol struct {
	uid      string
	size     int64
	now      image
	maybe    map[int64][]uint64 // values which a power loss may bring back
	flying   map[int64][]uint64 // values which the process was writing at the kill
	snaps    []*msnap
	epoch    int64
	r        *Replica
	head     string // the head's name, before a revert which a crash interrupted
	target   image  // the content after the interrupted revert
	grow     int64
	spec     Spec
	creating bool // the replica may or may not exist, until after a crash
	removing bool
}

// msnap is the model of a snapshot.
type msnap struct {
	uid      string
	size     int64
	img      image
	pending  bool // the snapshot may or may not exist
	dropping bool
}

// mreader is a reader of an open snapshot.
type mreader struct {
	src block.Source
	img image
}

// mimage is the model of an image record with a snapshot's layers.
type mimage struct {
	rec      block.Image
	size     int64
	img      image
	open     bool // the record may or may not exist
	removing bool
}

// model is a disk and the content which the disk must hold.
type model struct {
	dir     string
	loop    *modelLoop
	p       *power
	d       *Disk
	vols    []*mvol
	images  []*mimage
	readers []mreader
	holds   []*mhold
	next    uint64
	disks   int
	power   bool // the coming kill is a loss of power
	chance  uint64
}

func newModel(on *modelLoop, dir string) (*model, error) {
	w := &model{dir: dir, loop: on, next: 1}
	root := filepath.Join(dir, "0")
	if err := os.Mkdir(root, 0o700); err != nil {
		return nil, err
	}
	f, err := lossy.New(root)
	if err != nil {
		return nil, err
	}
	w.p = &power{on.Loop, f, root, 128 << 10}
	if err := initDisk(f, root); err != nil {
		return nil, err
	}
	w.d, err = openModel(f, root)
	return w, err
}

// openModel opens a disk with small windows, so that a merge has many.
func openModel(f *lossy.FS, root string) (*Disk, error) {
	d, err := openOn(f, root)
	if err == nil {
		d.window, d.piece = 128<<10, 1
	}
	return d, err
}

func (w *model) abandon() {
	for _, r := range w.readers {
		_ = r.src.Close()
	}
	for _, v := range w.vols {
		if v.r != nil {
			_ = v.r.Close()
		}
	}
	_ = w.d.Close()
	_ = w.p.fs.Close()
}

// mark is the content of a sector with the number v.
func mark(v uint64, sector int64) uint64 {
	if v == 0 {
		return 0
	}
	return v<<24 | uint64(sector&0xffffff)
}

func fillBlocks(b []byte, v uint64, off int64) {
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], mark(v, (off+int64(i))/512))
	}
}

// sectors checks the data read at off, and calls found with the number of each sector.
func sectors(b []byte, off int64, found func(sector int64, v uint64) error) error {
	for i := 0; i < len(b); i += 512 {
		sector := (off + int64(i)) / 512
		word := binary.LittleEndian.Uint64(b[i:])
		for j := i; j < i+512; j += 8 {
			if binary.LittleEndian.Uint64(b[j:]) != word {
				return fmt.Errorf("sector %d is torn", sector)
			}
		}
		if word != 0 && word&0xffffff != uint64(sector&0xffffff) {
			return fmt.Errorf("sector %d holds sector %d of %d", sector, word&0xffffff, word>>24)
		}
		if err := found(sector, word>>24); err != nil {
			return err
		}
	}
	return nil
}

// hot returns the ranges of a volume which may hold data.
func hot(size int64) []block.Span {
	all := []block.Span{{Off: 0, Len: min(size, smallSize)}}
	if size > highStart<<blockBits {
		all = append(all, block.Span{Off: highStart << blockBits, Len: min(size, largeSize) - highStart<<blockBits})
	}
	return all
}

// place chooses a range of a volume.
func place(size int64, a, b uint64) block.Span {
	regions := hot(size)
	g := regions[a%uint64(len(regions))]
	blocks := g.Len >> blockBits
	first := int64(a >> 8 % (1 << 40) % uint64(blocks))
	n := 1 + int64(b%16)
	if b>>8%8 == 0 {
		n = blocks
	}
	n = min(n, blocks-first)
	return block.Span{Off: g.Off + first<<blockBits, Len: n << blockBits}
}

// readSource calls found for every sector in the data extents of a source.
func readSource(src block.Source, found func(sector int64, v uint64) error) error {
	for off := int64(0); off < src.Size(); {
		e, err := src.Next(off)
		if err != nil {
			return err
		}
		if e.Kind == block.Data {
			b := make([]byte, e.Len)
			if _, err := src.ReadAt(b, e.Off); err != nil {
				return err
			}
			if err := sectors(b, e.Off, found); err != nil {
				return err
			}
		}
		off = e.End()
	}
	return nil
}

// same compares a source with an image.
func same(src block.Source, img image) error {
	left := maps.Clone(img)
	err := readSource(src, func(sector int64, v uint64) error {
		if img[sector] != v {
			return fmt.Errorf("sector %d holds %d, not %d", sector, v, img[sector])
		}
		delete(left, sector)
		return nil
	})
	for sector, v := range left {
		if err == nil && v != 0 {
			err = fmt.Errorf("sector %d is empty, not %d", sector, v)
		}
	}
	return err
}

// becomes records the content of a range from now on, which may not be durable yet.
func (v *mvol) becomes(s block.Span, value uint64) {
	for i := s.Off / 512; i < (s.Off+s.Len)/512; i++ {
		if v.now[i] != value || len(v.maybe[i]) > 0 {
			v.maybe[i] = append(v.maybe[i], v.now[i])
		}
		v.now[i] = value
	}
}

// flies records the possible content of a range after the death of the process.
func (v *mvol) flies(s block.Span, value uint64) {
	for i := s.Off / 512; i < (s.Off+s.Len)/512; i++ {
		v.flying[i] = append(v.flying[i], value)
	}
}

func (v *mvol) durable() { clear(v.maybe) }

func newVol(uid string, size int64, img image) *mvol {
	return &mvol{uid: uid, size: size, now: maps.Clone(img), maybe: map[int64][]uint64{}, flying: map[int64][]uint64{}}
}

// settle reads a volume after a crash, and takes the content into the model if the model allows the content.
func (v *mvol) settle(src block.Source, power bool) error {
	if v.target != nil { // a revert had begun
		if v.head != "" {
			v.now = v.target
			clear(v.maybe)
			clear(v.flying)
		}
		v.target, v.head = nil, ""
	}
	is := image{}
	err := readSource(src, func(sector int64, n uint64) error {
		if n != 0 {
			is[sector] = n
		}
		return nil
	})
	if err != nil {
		return err
	}
	all := map[int64]bool{}
	for _, m := range []map[int64][]uint64{v.maybe, v.flying} {
		for s := range m {
			all[s] = true
		}
	}
	for s := range v.now {
		all[s] = true
	}
	for s := range is {
		all[s] = true
	}
	for s := range all {
		n := is[s]
		if n != v.now[s] && !slices.Contains(v.flying[s], n) && !(power && slices.Contains(v.maybe[s], n)) {
			return fmt.Errorf("sector %d holds %d; %d was acknowledged, flying %v, not durable over %v (power %v)", s, n,
				v.now[s], v.flying[s], v.maybe[s], power)
		}
		if !power && (len(v.flying[s]) > 0 || n != v.now[s]) {
			v.maybe[s] = append(append(v.maybe[s], v.now[s]), v.flying[s]...)
		}
	}
	v.now = is
	clear(v.flying)
	if power {
		clear(v.maybe)
	}
	return nil
}

// crash handles the end of the process or the power, and starts the next process.
func (w *model) crash() error {
	for _, r := range w.readers {
		_ = r.src.Close()
	}
	w.readers = nil
	for _, v := range w.vols {
		if v.r != nil {
			_ = v.r.Close() // the dead process makes nothing durable
			v.r = nil
		}
	}
	_ = w.d.Close()
	if w.power {
		w.disks++
		into := filepath.Join(w.dir, strconv.Itoa(w.disks))
		if err := w.p.fs.Crash(rand.New(rand.NewPCG(w.chance, 1)), into); err != nil {
			return err
		}
		old := w.p.root
		_ = w.p.fs.Close()
		f, err := lossy.New(into)
		if err != nil {
			return err
		}
		w.p = &power{w.loop.Loop, f, into, 128 << 10}
		if err := os.RemoveAll(old); err != nil {
			return err
		}
	} else {
		w.p.fs.Restart()
	}
	var err error
	if w.d, err = openModel(w.p.fs, w.p.root); err != nil {
		return err
	}
	if w.chance&1 == 0 {
		if err := w.d.Collect(context.Background(), 0); err != nil {
			return err
		}
	}
	if err := w.recount(); err != nil {
		return fmt.Errorf("after a crash (power %v): %w", w.power, err)
	}
	return nil
}

// recount finds out which interrupted operations took effect, and compares everything.
func (w *model) recount() error {
	list, err := w.d.Replicas()
	if err != nil {
		return err
	}
	metas := map[string]Meta{}
	for _, m := range list {
		metas[m.UID] = m
	}
	// The new process repeats the interrupted requests, because the requests were not answered.
	var errs []error
	w.vols = slices.DeleteFunc(w.vols, func(v *mvol) bool {
		_, there := metas[v.uid]
		switch {
		case !there && v.removing:
			errs = append(errs, w.d.RemoveReplica(v.uid))
		case there && v.creating:
			errs = append(errs, w.d.CreateReplica(context.Background(), v.spec))
		}
		return !there && (v.creating || v.removing)
	})
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, v := range w.vols {
		m, there := metas[v.uid]
		if !there {
			return fmt.Errorf("volume %s is gone", v.uid)
		}
		if v.target != nil {
			if err := w.d.SyncRecord(v.uid); err != nil {
				return err
			}
		}
		v.creating, v.removing = false, false
		if m.Size != v.size && m.Size != v.grow {
			return fmt.Errorf("volume %s has %d bytes", v.uid, m.Size)
		}
		v.size, v.grow = m.Size, 0
		if v.epoch = max(v.epoch, m.Epoch); v.target != nil && m.Head == v.head {
			v.head = ""
		}
		src, err := w.d.OpenView(v.uid)
		if err == nil {
			err = errors.Join(v.settle(src, w.power), src.Close())
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.uid, err)
		}
		if err := w.recountSnapshots(v, m); err != nil {
			return fmt.Errorf("volume %s: %w", v.uid, err)
		}
	}
	images, err := w.d.Images()
	if err != nil {
		return err
	}
	w.images = slices.DeleteFunc(w.images, func(i *mimage) bool {
		there := slices.ContainsFunc(images, func(b block.Image) bool { return b.UID == i.rec.UID })
		switch {
		case !there && i.removing:
			errs = append(errs, w.d.RemoveImage(i.rec.UID))
		case there && i.open:
			errs = append(errs, w.d.PutImage(i.rec))
		}
		return (i.open || i.removing) && !there
	})
	if err := errors.Join(append(errs, w.recountHolds())...); err != nil {
		return err
	}
	for _, i := range w.images {
		i.open, i.removing = false, false
	}
	return w.check()
}

func (w *model) recountSnapshots(v *mvol, m Meta) error {
	there := func(s *msnap) bool {
		return slices.ContainsFunc(m.Snapshots, func(o Snapshot) bool { return o.UID == s.uid })
	}
	if err := w.d.SyncRecord(v.uid); err != nil { // for dropped snapshots
		return err
	}
	v.snaps = slices.DeleteFunc(v.snaps, func(s *msnap) bool { return !there(s) && (s.pending || s.dropping) })
	for _, s := range v.snaps {
		if !there(s) {
			return fmt.Errorf("snapshot %s is gone", s.uid)
		}
		if s.pending { // no write followed the cut
			s.img, s.pending = maps.Clone(v.now), false
		}
		s.dropping = false
		// No snapshot is reported before the sync.
		k := slices.IndexFunc(m.Snapshots, func(o Snapshot) bool { return o.UID == s.uid })
		if err := w.d.SyncRecord(v.uid, m.Snapshots[k].Layer); err != nil {
			return err
		}
	}
	if len(v.snaps) != len(m.Snapshots) {
		return fmt.Errorf("%d snapshots, not %d", len(m.Snapshots), len(v.snaps))
	}
	return nil
}

func (w *model) meta(v *mvol) (Meta, error) {
	if v.r != nil {
		return v.r.Meta(), nil
	}
	return w.d.Stack(v.uid)
}

// check compares everything with the model.
func (w *model) check() error {
	for _, v := range w.vols {
		m, err := w.meta(v)
		if err != nil {
			return err
		}
		if v.r != nil {
			err = w.checkOpen(v)
		} else {
			var src block.Source
			if src, err = w.d.OpenView(v.uid); err == nil {
				err = errors.Join(same(src, v.now), src.Close())
			}
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.uid, err)
		}
		for _, s := range m.Snapshots {
			k := slices.IndexFunc(v.snaps, func(o *msnap) bool { return o.uid == s.UID })
			if k < 0 {
				return fmt.Errorf("volume %s: snapshot %s should not be there", v.uid, s.UID)
			}
			chain, err := m.Chain(s.Layer)
			if err != nil {
				return err
			}
			if err := w.checkStack(chain, v.snaps[k].size, v.snaps[k].img); err != nil {
				return fmt.Errorf("snapshot %s of volume %s: %w", s.UID, v.uid, err)
			}
		}
	}
	for _, i := range w.images {
		if err := w.checkStack(i.rec.Layers, i.size, i.img); err != nil {
			return fmt.Errorf("image %s: %w", i.rec.UID, err)
		}
	}
	for _, r := range w.readers {
		if err := same(r.src, r.img); err != nil {
			return fmt.Errorf("somebody who reads: %w", err)
		}
	}
	return w.checkHolds()
}

func (w *model) checkStack(layers []string, size int64, img image) error {
	src, err := w.d.OpenStack(layers, size)
	if api.Is(err, api.Busy) {
		return nil // readable after the merge
	}
	if err != nil {
		return err
	}
	return errors.Join(same(src, img), sameDigests(src), src.Close())
}

func (w *model) checkOpen(v *mvol) error {
	for _, h := range hot(v.size) {
		b := block.AlignedBuffer(int(h.Len))
		if err := issue(w.p, v.r, block.OpRead, h.Off, h.Len, b, false); err != nil {
			return err
		}
		err := sectors(b, h.Off, func(sector int64, n uint64) error {
			if v.now[sector] != n {
				return fmt.Errorf("sector %d holds %d, not %d", sector, n, v.now[sector])
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// finale compares everything, then removes everything, and no file may be left.
func (w *model) finale() error {
	w.p.fs.KillAfter(-1)
	if err := w.check(); err != nil {
		return fmt.Errorf("in the end: %w", err)
	}
	for _, r := range w.readers {
		if err := r.src.Close(); err != nil {
			return err
		}
	}
	w.readers = nil
	ctx := context.Background()
	for _, v := range w.vols {
		if err := w.close(v); err != nil {
			return err
		}
		if err := w.d.RemoveReplica(v.uid); err != nil {
			return err
		}
	}
	for _, i := range w.images {
		if err := w.d.RemoveImage(i.rec.UID); err != nil {
			return err
		}
	}
	w.vols, w.images = nil, nil
	err := errors.Join(w.releaseAll(), w.d.Collect(ctx, 0))
	for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); { // a starting process holds some layers
		if left, lerr := w.d.FS.ReadDir(w.d.Join(layer.Dir)); lerr != nil || len(left) == 0 {
			break
		}
		err = w.d.Collect(ctx, 0)
	}
	err = errors.Join(err, w.d.Collect(ctx, 0), w.d.Close())
	for _, dir := range []string{layer.Dir, replicaDir, imagesDir, trashDir} {
		left, lerr := w.d.FS.ReadDir(w.d.Join(dir))
		if lerr == nil && len(left) > 0 {
			lerr = fmt.Errorf("%s holds %v", dir, left)
		}
		err = errors.Join(err, lerr)
	}
	return err
}
