package replicas

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// tidier finishes the layers that snapshots froze, and merges those that nobody needs by themselves any more, in the
// background: one disk at a time has one worker, which ends when
// nothing is left to do. What an end of the process interrupts, the next one finds again.
type tidier struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	again map[*stack.Disk]bool // disks that have a worker; true: it has to look once more
	ended bool
}

func newTidier() *tidier {
	t := &tidier{again: map[*stack.Disk]bool{}}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

// close ends the workers and waits for them.
func (t *tidier) close() {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	t.cancel()
	t.wg.Wait()
}

// tidyRetry is when work that failed is tried again; nobody tells of what it failed for.
const tidyRetry = 10 * time.Second

// tidy has a disk looked at.
func (d *Data) tidy(disk *stack.Disk) {
	t := d.tidier
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, works := t.again[disk]; works || t.ended {
		t.again[disk] = true
		return
	}
	t.again[disk] = false
	t.wg.Add(1)
	go func() {
		defer t.wg.Done()
		// The thread is not given back: its disk I/O is of the lowest priority, and it keeps that.
		runtime.LockOSThread()
		lowest()
		for {
			wait := d.finishAll(t.ctx, disk)
			merged := make(chan bool)
			go func() { merged <- d.mergeAll(t.ctx, disk) }() // not of low priority: it holds I/O back for moments
			wait = <-merged || wait
			t.mu.Lock()
			if t.ctx.Err() != nil || !wait && !t.again[disk] {
				delete(t.again, disk)
				t.mu.Unlock()
				return
			}
			t.again[disk] = false
			t.mu.Unlock()
			if wait {
				select {
				case <-time.After(tidyRetry):
				case <-t.ctx.Done():
				}
			}
		}
	}()
}

// lowest makes the calling thread give way to all others at the disk. Not at the processor: the collector of garbage
// waits for every thread, and all would wait for one that does not get to run.
func lowest() {
	const who, idle = 1, 3 << 13 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, who, 0, idle)
}

// mergeRate bounds what merges copy, so that volumes have the disk.
const mergeRate = 200 << 20

// untidy is a replica in which layers may be merged.
type untidy struct {
	disk   *stack.Disk
	volume string
}

// mergeAll merges layers of the disk's replicas, and reports whether something is left.
func (d *Data) mergeAll(ctx context.Context, disk *stack.Disk) (left bool) {
	d.mu.Lock()
	all := map[string]string{}
	for uid, u := range d.untidy {
		if u.disk == disk {
			all[uid] = u.volume
			delete(d.untidy, uid)
		}
	}
	d.mu.Unlock()
	for uid, volume := range all {
		if ctx.Err() != nil {
			return false
		}
		did, err := d.merge(ctx, disk, uid, volume)
		if did {
			d.changed(api.UID(uid))
		}
		switch {
		case err == nil:
			// A layer that was cut off meanwhile has to be finished before it can be merged.
			if rest, err := disk.Unfinished(); err == nil && len(rest) > 0 {
				d.mergeSoon(disk, uid, volume)
				d.tidy(disk)
			}
			continue
		case ctx.Err() != nil || api.Is(err, api.NotFound):
			continue
		case errors.Is(err, context.Canceled): // somebody wanted the volume
			d.mergeSoon(disk, uid, volume)
			d.tidy(disk)
			continue
		case !api.Is(err, api.Busy):
			d.Log.Warn("layers cannot be merged yet", "volume", volume, "disk", disk.Path(), "err", err)
		}
		d.mergeSoon(disk, uid, volume)
		left = true
	}
	return left
}

func (d *Data) mergeSoon(disk *stack.Disk, uid, volume string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.untidy[uid] = untidy{disk, volume}
}

// merge merges what can be merged in one replica: through the session of an attached volume; one that nobody has
// attached is opened for it, and given up as soon as somebody wants it.
func (d *Data) merge(ctx context.Context, disk *stack.Disk, uid, volume string) (did bool, err error) {
	all := func(ctx context.Context, r *stack.Replica) error {
		for {
			more, err := r.Merge(ctx, stack.MergeOptions{BytesPerSecond: mergeRate})
			if did = did || more; err != nil || !more {
				return err
			}
		}
	}
	if s := d.session(volume); s != nil && string(s.Replica) == uid {
		return did, all(ctx, s.member)
	}
	ctx, unlock := d.lockYielding(ctx, volume)
	defer unlock()
	if d.session(volume) != nil {
		return false, api.Errorf(api.Busy, "the volume is attached")
	}
	for _, held := range d.Host.Held() {
		if held.Name == volume {
			return false, api.Errorf(api.Busy, "the device of the volume is being taken over")
		}
	}
	loop, err := d.pick()
	if err != nil {
		return false, err
	}
	defer d.putBack(loop)
	r, err := disk.OpenReplica(ctx, uid, loop.Loop)
	if err != nil {
		return false, err
	}
	err = all(ctx, r)
	if cerr := r.Close(); err == nil {
		err = cerr
	}
	return did, err
}

// lockYielding takes the lock of a volume until somebody else wants it: then the context ends.
func (d *Data) lockYielding(ctx context.Context, volume string) (context.Context, func()) {
	unlock := d.lock(volume)
	ctx, cancel := context.WithCancel(ctx)
	d.mu.Lock()
	l := d.locks[volume]
	l.yield = cancel
	if l.users > 1 {
		cancel()
	}
	d.mu.Unlock()
	return ctx, func() {
		d.mu.Lock()
		l.yield = nil
		d.mu.Unlock()
		cancel()
		unlock()
	}
}

// finishAll finishes what is there to finish, and reports whether something is left.
func (d *Data) finishAll(ctx context.Context, disk *stack.Disk) (left bool) {
	layers, err := disk.Unfinished()
	if err != nil {
		d.Log.Warn("which layers are to be finished is not known", "disk", disk.Path(), "err", err)
		return true
	}
	for _, uid := range layers {
		began := time.Now()
		err := disk.Finish(ctx, uid)
		switch {
		case err == nil:
			d.Log.Info("layer finished", "disk", disk.Path(), "layer", uid, "took", time.Since(began).Round(time.Millisecond))
		case ctx.Err() != nil:
			return false
		case errors.Is(err, os.ErrNotExist) || api.Is(err, api.NotFound) || api.Is(err, api.Invalid):
			// It went meanwhile.
		default:
			left = true
			if !api.Is(err, api.Busy) {
				d.Log.Warn("a layer cannot be finished yet", "disk", disk.Path(), "layer", uid, "err", err)
			}
		}
	}
	return left
}
