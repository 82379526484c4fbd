package transfer

import (
	"errors"
	"io"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

var (
	_ block.DigestSource  = (*View)(nil)
	_ block.CacheBypasser = (*View)(nil)
)

// View is a whole stack as a block.Source: the content that a guest reads. The caller sets the head of a replica, the
// lock of its owner and its merge before Open; Close closes all of them.
type View struct {
	size   int64
	Owner  file.Handle
	Head   file.Handle // nil: layers only
	layers []*layer.Layer
	Log    *format.ZeroLog
	Merge  *layer.Merge // of the replica: blocks below Done have moved

	digests []*layer.ChunkDigests // of layers

	mu    sync.Mutex
	idx   format.Index
	built int // pages of idx
}

// keptPages is after how many built pages of its index a View forgets those that no reader used meanwhile. A backup
// reads a whole volume once, and a page of many layers takes kilobytes.
const keptPages = 256

// OpenStack opens finished layers, bottom first, as one source of size bytes.
func OpenStack(d *layer.Store, layers []string, size int64) (block.Source, error) {
	return openLayersBy(layers, size, func(uid string) (*layer.Layer, error) { return d.Find(uid, 0, false) })
}

// OpenWhole is OpenStack with the size of the largest layer.
func OpenWhole(d *layer.Store, layers []string) (block.Source, error) {
	size, err := d.StackSize(layers)
	if err != nil {
		return nil, err
	}
	return OpenStack(d, layers, size)
}

// OpenLayers is OpenStack with each layer on the first disk that has the layer. OpenLayers writes to no disk.
func OpenLayers(disks []*layer.Store, layers []string, size int64) (block.Source, error) {
	return openLayersBy(layers, size, func(uid string) (*layer.Layer, error) { return layer.OpenFirst(disks, uid, 0) })
}

func openLayersBy(layers []string, size int64, open func(uid string) (*layer.Layer, error)) (block.Source, error) {
	v := &View{Log: &format.ZeroLog{Zeros: format.NewIndex(size>>blockBits, 0)}}
	if err := v.Open(size, layers, open); err != nil {
		_ = v.Close()
		return nil, err
	}
	return v, nil
}

// Open opens the layers, bottom first, as one source of size bytes, and calls open for each layer.
func (v *View) Open(size int64, layers []string, open func(uid string) (*layer.Layer, error)) error {
	v.size, v.idx = size, format.NewIndex(size>>blockBits, unbuilt)
	for _, uid := range layers {
		l, err := open(uid)
		if err != nil {
			return err
		}
		v.layers, v.digests = append(v.layers, l), append(v.digests, layer.NewChunkDigests(l))
		if l.Rec.Size > size {
			return api.Errorf(api.Invalid, "layer %s on disk %s is larger than %d bytes", uid, l.Store.Root, size)
		}
	}
	return nil
}

// BypassCache implements block.CacheBypasser.
func (v *View) BypassCache() {
	for _, l := range v.layers {
		l.OpenDirect()
	}
}

// Size implements block.Source.
func (v *View) Size() int64 { return v.size }

// runAt returns the value of block b in the index, and how many blocks of the page, below end, have the same value.
func (v *View) runAt(b, end int64) (uint16, int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := int(b >> pageBits)
	if !v.idx.Built(p) {
		if v.built++; v.built%keptPages == 0 {
			v.idx.DropUnused()
		}
		vals := make([]uint16, v.idx.PageLen(p))
		head := -1
		if v.Head != nil {
			head = int(v.Head.Fd())
		}
		if err := layer.Resolve(vals, p, v.layers, &v.Log.Zeros, head); err != nil {
			return 0, 0, err
		}
		v.Merge.Redirect(vals, int64(p)<<pageBits, v.layers)
		v.idx.Load(p, vals)
	}
	v.idx.Used[p] = true
	val, n := v.idx.RunInPage(p, int(b&(pageBlocks-1)), int(min(end-int64(p)<<pageBits, pageBlocks)))
	return val, int64(n), nil
}

// ReadAt implements io.ReaderAt.
func (v *View) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off >= v.size {
		return 0, io.EOF
	}
	want := p[:min(int64(len(p)), v.size-off)]
	for done := 0; done < len(want); {
		at := off + int64(done)
		last := off + int64(len(want))
		from, n, err := v.runAt(at>>blockBits, (last+blockSize-1)>>blockBits)
		if err != nil {
			return done, err
		}
		part := want[done:min(int64(len(want)), int64(done)+(at>>blockBits+n)<<blockBits-at)]
		switch {
		case from < fromHead:
			clear(part)
		case from == fromHead:
			_, err = v.Head.ReadAt(part, at)
		default:
			l := v.layers[from-fromLayer]
			if moved, gave := v.Merge.Moved(v.layers, int(from-fromLayer)); at < moved {
				err = l.ReadMoved(part, at, gave)
			} else {
				err = l.ReadData(part, at)
			}
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return done, err
		}
		done += len(part)
	}
	if len(want) < len(p) {
		return len(want), io.EOF
	}
	return len(want), nil
}

// Next implements block.Source.
func (v *View) Next(off int64) (block.Extent, error) {
	if off < 0 || off >= v.size {
		return block.Extent{}, io.EOF
	}
	kind := func(val uint16) block.Kind { return block.Kind(min(val, fromHead)) }
	b, end := off>>blockBits, v.size>>blockBits
	val, n, err := v.runAt(b, end)
	if err != nil {
		return block.Extent{}, err
	}
	k := kind(val)
	for b += n; b < end && b&(pageBlocks-1) != 0; b += n {
		if val, n, err = v.runAt(b, end); err != nil {
			return block.Extent{}, err
		}
		if kind(val) != k {
			break
		}
	}
	return block.Extent{Off: off, Len: b<<blockBits - off, Kind: k}, nil
}

// Close implements io.Closer.
func (v *View) Close() error {
	var errs []error
	for _, h := range []file.Handle{v.Head, v.Owner} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	if v.Log != nil && v.Log.File != nil {
		errs = append(errs, v.Log.Close())
	}
	for i, l := range v.layers {
		errs = append(errs, v.digests[i].Close(), l.Close())
	}
	return errors.Join(errs...)
}
