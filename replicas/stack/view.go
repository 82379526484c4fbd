package stack

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// view is a whole stack as a block.Source: what a guest would read.
type view struct {
	size   int64
	owner  file.Handle
	head   file.Handle // nil: layers only
	layers []*layer
	log    *format.ZeroLog
	merge  *Merge // of the replica: blocks below its Done have moved

	mu  sync.Mutex
	idx format.Index
}

// OpenView opens a whole replica for reading. While it is open nobody can open the replica for I/O, and the other way
// round (kind busy).
func (d *Disk) OpenView(uid string) (_ block.Source, err error) {
	v := &view{}
	defer func() {
		if err != nil {
			err = fmt.Errorf("read replica %s on disk %s: %w", uid, d.root, classify(err))
			_ = v.Close()
		}
	}()
	var m Meta
	_, err = d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.NotFound, "there is none: %w", err)
	}
	if err != nil {
		return nil, err
	}
	dir := d.path(replicaDir, uid)
	if v.owner, err = d.fs.Open(dir+"/"+ownerFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := tryLock(v.owner, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, api.Errorf(api.Busy, "another process or session has it open")
	} else if err != nil {
		return nil, err
	}
	if m, err = d.readStack(uid); err != nil {
		return nil, err
	}
	if v.head, err = d.fs.Open(dir+"/"+m.Head+dataSuffix, os.O_RDONLY, 0); err != nil {
		return nil, err
	}
	if err := tryLock(v.head, unix.LOCK_SH); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, api.Errorf(api.Busy, "disk I/O of its former owner is still under way")
	} else if err != nil {
		return nil, err
	}
	if v.log, err = format.OpenZeroLog(d.fs, dir+"/"+m.Head+zeroSuffix, m.Size>>blockBits); err != nil {
		return nil, err
	}
	v.merge = m.Merge
	return v, v.open(m.Size, m.Layers, func(uid string) (*layer, error) { return d.findLayer(uid, 0, true) })
}

// OpenStack opens finished layers, bottom first, as one source of size bytes.
func (d *Disk) OpenStack(layers []string, size int64) (block.Source, error) {
	return openStack(layers, size, func(uid string) (*layer, error) { return d.findLayer(uid, 0, false) })
}

// OpenLayers is OpenStack with each layer on the first of some disks that has it. It changes nothing on any of them.
func OpenLayers(disks []*Disk, layers []string, size int64) (block.Source, error) {
	return openStack(layers, size, func(uid string) (*layer, error) { return openFirst(disks, uid, 0) })
}

func openStack(layers []string, size int64, open func(uid string) (*layer, error)) (block.Source, error) {
	v := &view{log: &format.ZeroLog{Zeros: format.NewIndex(size>>blockBits, 0)}}
	if err := v.open(size, layers, open); err != nil {
		_ = v.Close()
		return nil, err
	}
	return v, nil
}

func (v *view) open(size int64, layers []string, open func(uid string) (*layer, error)) error {
	v.size, v.idx = size, format.NewIndex(size>>blockBits, unbuilt)
	for _, uid := range layers {
		l, err := open(uid)
		if err != nil {
			return err
		}
		v.layers = append(v.layers, l)
		if l.rec.Size > size {
			return api.Errorf(api.Invalid, "layer %s on disk %s is larger than %d bytes", uid, l.disk.root, size)
		}
	}
	return nil
}

// Size implements block.Source.
func (v *view) Size() int64 { return v.size }

// run is where block b is read from, and how many blocks, below end and in its page, are read from there too.
func (v *view) run(b, end int64) (uint16, int64, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	p := int(b >> pageBits)
	if !v.idx.Built(p) {
		vals := make([]uint16, v.idx.PageLen(p))
		head := -1
		if v.head != nil {
			head = int(v.head.Fd())
		}
		if err := resolve(vals, p, v.layers, &v.log.Zeros, head); err != nil {
			return 0, 0, err
		}
		v.merge.moved(vals, int64(p)<<pageBits, v.layers)
		v.idx.Load(p, vals)
	}
	val, n := v.idx.RunInPage(p, int(b&(pageBlocks-1)), int(min(end-int64(p)<<pageBits, pageBlocks)))
	return val, int64(n), nil
}

// ReadAt implements io.ReaderAt.
func (v *view) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off >= v.size {
		return 0, io.EOF
	}
	want := p[:min(int64(len(p)), v.size-off)]
	for done := 0; done < len(want); {
		at := off + int64(done)
		last := off + int64(len(want))
		from, n, err := v.run(at>>blockBits, (last+blockSize-1)>>blockBits)
		if err != nil {
			return done, err
		}
		part := want[done:min(int64(len(want)), int64(done)+(at>>blockBits+n)<<blockBits-at)]
		switch {
		case from < fromHead:
			clear(part)
		case from == fromHead:
			_, err = v.head.ReadAt(part, at)
		default:
			l := v.layers[from-fromLayer]
			if moved, gave := v.merge.movedTo(v.layers, int(from-fromLayer)); at < moved {
				err = l.readMoved(part, at, gave)
			} else {
				_, err = l.readAt(part, at)
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
func (v *view) Next(off int64) (block.Extent, error) {
	if off < 0 || off >= v.size {
		return block.Extent{}, io.EOF
	}
	kind := func(val uint16) block.Kind { return block.Kind(min(val, fromHead)) }
	b, end := off>>blockBits, v.size>>blockBits
	val, n, err := v.run(b, end)
	if err != nil {
		return block.Extent{}, err
	}
	k := kind(val)
	for b += n; b < end && b&(pageBlocks-1) != 0; b += n {
		if val, n, err = v.run(b, end); err != nil {
			return block.Extent{}, err
		}
		if kind(val) != k {
			break
		}
	}
	return block.Extent{Off: off, Len: b<<blockBits - off, Kind: k}, nil
}

// Close implements io.Closer.
func (v *view) Close() error {
	var errs []error
	for _, h := range []file.Handle{v.head, v.owner} {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	if v.log != nil && v.log.File != nil {
		errs = append(errs, v.log.Close())
	}
	for _, l := range v.layers {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}
