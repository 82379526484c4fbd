package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// ring is the part of a loop that a Replica needs.
type ring interface {
	Post(fn func()) bool
	Read(op *uring.Op, fd int, buf []byte, off int64)
	Write(op *uring.Op, fd int, buf []byte, off int64)
	Fdatasync(op *uring.Op, fd int)
	Fallocate(op *uring.Op, fd int, mode uint32, off, n int64)
}

// Replica is an open stack: immutable layers with one writable head. Submit serves I/O on the loop's thread; the other
// methods may be called from any other goroutine while the loop runs.
type Replica struct {
	disk   *Disk
	dir    string
	ring   ring
	owner  file.Handle // the flock of the opener
	head   file.Handle
	layers []*layer.Layer
	log    *format.ZeroLog // the worker's
	work   *worker

	mu      sync.Mutex // serialises Adopt, Expand and Close; guards adopted
	adopted bool       // this opener began a session, which Close may end
	metaMu  sync.Mutex // guards meta, closed, over and unsure, and head against readers without mu
	meta    Meta
	closed  bool  // Close was called
	over    bool  // Close is done: no record is written any more
	unsure  error // set: the content of stack.json on the disk is unknown

	merging     sync.Mutex     // one merge at a time
	replaced    []*layer.Layer // hydrated layers that copies replaced, until they can be closed; under mu
	strays      []file.Handle  // files of a cut with an unknown outcome; under mu
	onLost      func(lost bool)
	sourceFails bool // onLost was told that a source fails; the loop's

	fetchNotifier

	*intentTracker // the intents
	path           // the loop thread's
}

// OpenReplica opens a replica for I/O on loop. A replica has one opener: if another process or Replica has the replica
// open, the error is of kind busy. OpenReplica waits for disk I/O of a dead process, which could overtake later writes.
func (d *Disk) OpenReplica(ctx context.Context, uid string, loop *uring.Loop) (*Replica, error) {
	return d.openReplica(ctx, uid, loop)
}

func (d *Disk) openReplica(ctx context.Context, uid string, on ring) (_ *Replica, err error) {
	r := &Replica{disk: d, dir: d.Join(replicaDir, uid), ring: on}
	defer func() {
		if err != nil {
			_ = r.closeFiles()
			if api.KindOf(err) == api.Other && errors.Is(err, fs.ErrNotExist) { // its record was there
				err = api.Errorf(api.Corrupt, "one of its files is missing: %w", err)
			}
			err = fmt.Errorf("open replica %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if _, err = d.readStack(uid); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, api.Errorf(api.NotFound, "the replica does not exist: %w", err)
		}
		return nil, err
	}
	if r.owner, err = d.FS.Open(r.dir+"/"+ownerFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := diskfs.TryLock(r.owner, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, api.Errorf(api.Busy, "another process or session has the replica open")
	} else if err != nil {
		return nil, err
	}
	// Again under the lock: the former owner may have written the record meanwhile.
	if r.meta, err = d.readStack(uid); errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.NotFound, "the replica was removed: %w", err)
	}
	if err != nil {
		return nil, err
	}
	base := r.dir + "/" + r.meta.Head
	if r.head, err = d.FS.Open(base+dataSuffix, os.O_RDWR|d.Direct, 0); err != nil {
		return nil, err
	}
	if err := diskfs.Drain(ctx, r.head, r.meta.Size); err != nil {
		return nil, err
	}
	if st, err := r.head.Stat(); err != nil {
		return nil, err
	} else if st.Size() < r.meta.Size {
		return nil, api.Errorf(api.Corrupt, "the head has %d bytes, not %d", st.Size(), r.meta.Size)
	}
	for _, l := range r.meta.Layers {
		lay, err := d.Find(l, d.Direct, true)
		if api.Is(err, api.NotFound) {
			return nil, api.Errorf(api.Corrupt, "a layer of the replica's stack is missing: %w", err)
		}
		if err != nil {
			return nil, err
		}
		r.layers = append(r.layers, lay)
	}
	if r.log, err = format.OpenZeroLog(d.FS, base+zeroSuffix, r.meta.Size>>blockBits); err != nil {
		return nil, err
	}
	if len(r.layers) > 0 {
		r.log.Reserve()
	}
	if err := format.FitIntents(d.FS, r.dir+"/"+intentsFile, r.meta.Size); err != nil {
		return nil, err
	}
	r.intentTracker = &intentTracker{host: r, ring: on, fs: d.FS, path: r.dir + "/" + intentsFile}
	if err := r.intentTracker.openFile(); err != nil {
		return nil, err
	}
	if err := d.removeFormerHeads(r.dir, r.meta.Head); err != nil {
		return nil, err
	}
	if err := r.syncFormerWrites(ctx); err != nil {
		return nil, err
	}
	first, _, err := file.NextData(int(r.head.Fd()), 0, r.meta.Size)
	if err != nil {
		return nil, err
	}
	r.path.init(r, first == r.meta.Size)
	r.merge = r.meta.Merge
	r.work = newWorker()
	r.intentTracker.work = r.work
	for _, l := range r.layers {
		r.subscribeFetches(l)
	}
	d.open.add(r)
	return r, nil
}

func (r *Replica) closeFiles() error {
	var errs []error
	if r.log != nil {
		errs = append(errs, r.log.Close())
	}
	for _, l := range append(r.replaced, r.layers...) {
		errs = append(errs, l.Close())
	}
	for _, h := range r.strays {
		errs = append(errs, h.Close())
	}
	if r.head != nil {
		errs = append(errs, r.now.closeCached(), r.head.Close())
	}
	if r.intentTracker != nil && r.intentTracker.file != nil {
		errs = append(errs, r.intentTracker.file.Close())
	}
	if r.owner != nil {
		errs = append(errs, r.owner.Close())
	}
	return errors.Join(errs...)
}

// Meta returns the present record.
func (r *Replica) Meta() Meta {
	r.metaMu.Lock()
	defer r.metaMu.Unlock()
	return r.meta.clone()
}

// Blank reports whether the replica has no layers and its head no data.
func (r *Replica) Blank() bool {
	r.metaMu.Lock()
	head, size, alone := r.head, r.meta.Size, len(r.meta.Layers) == 0
	r.metaMu.Unlock()
	if !alone {
		return false
	}
	first, _, err := file.NextData(int(head.Fd()), 0, size)
	return err == nil && first >= size
}

// Used is the room that the head takes on the disk, in bytes, without the layers.
func (r *Replica) Used() int64 {
	r.metaMu.Lock()
	head := r.head
	r.metaMu.Unlock()
	st, err := head.Stat()
	if err != nil {
		return 0
	}
	return diskfs.Allocated(st)
}

// IndexMemory is the memory of the built part of the index, in bytes.
func (r *Replica) IndexMemory() (n int64, err error) {
	err = r.onLoop(func() { n = r.idx.Memory() })
	return n, err
}

var _ block.Submitter = (*Replica)(nil)

// Knows sets the known damage of a layer in an open replica: reads of the damage fail from now on.
func (r *Replica) Knows(uid string, list []Damage) error {
	return r.nameError(r.onLoop(func() {
		for _, l := range r.layers {
			if l.Rec.UID == uid && l.Hydration == nil {
				l.Damage = list
			}
		}
	}))
}
