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
	"drover.io/drover/api/watch"
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

	guestsDid func() uint64 // how many requests guests have had answered
	pause     func(ctx context.Context, t time.Duration)
}

func newTidier(guestsDid func() uint64) *tidier {
	t := &tidier{again: map[*stack.Disk]bool{}, guestsDid: guestsDid, pause: pause}
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

// tidy has a disk looked at. Before the API is there that is left to the first look at the disk.
func (d *Data) tidy(disk *stack.Disk) {
	if !d.api.Load() {
		return
	}
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
			wait, failed := d.finishAll(t.ctx, disk)
			d.blame(disk, failed)
			d.findMergeable(disk)
			merged := make(chan bool)
			go func() { merged <- d.mergeAll(t.ctx, disk, failed) }() // not of low priority: it holds I/O back for moments
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

// A small layer is mostly syncs, and those of a thousand in a row take half of their reads from guests. So there is a
// rest after each layer as long as it took, and more of them while guests have I/O answered: not without end, since the
// digests are to be made under a steady load, too.
const (
	restLongest = 100 * time.Millisecond
	restsAtMost = 10
)

// rest lets guests go first after work that took so long; did is what they had had answered before.
func (t *tidier) rest(ctx context.Context, took time.Duration, did uint64) {
	for range restsAtMost {
		t.pause(ctx, min(took, restLongest))
		now := t.guestsDid()
		if now == did {
			return
		}
		did = now
	}
}

// pause waits, or for the end of ctx.
func pause(ctx context.Context, t time.Duration) {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// guestsDid is how many requests of the volumes that are attached on this node were answered.
func (d *Data) guestsDid() (n uint64) {
	for _, s := range d.all() {
		for _, c := range s.engine.Stats() {
			n += c.Ops
		}
	}
	return n
}

// lowest makes the calling thread give way to all others at the disk. Not at the processor: the collector of garbage
// waits for every thread, and all would wait for one that does not get to run.
func lowest() {
	const who, idle = 1, 3 << 13 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, who, 0, idle)
}

// untidy is a replica in which layers may be merged.
type untidy struct {
	disk   *stack.Disk
	volume string
}

// mergeAll merges layers of the disk's replicas, and reports whether something is left. failed are layers that could
// not be finished.
func (d *Data) mergeAll(ctx context.Context, disk *stack.Disk, failed map[string]error) (left bool) {
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
		before := snapshotLayers(disk, uid)
		did, err := d.merge(ctx, disk, uid, volume)
		if did {
			d.changed(api.UID(uid), otherLayers(before, snapshotLayers(disk, uid))...)
		}
		if err == nil {
			err = unfinished(disk, uid, failed)
		}
		switch {
		case err == nil:
			d.mergeEnded(ctx, uid, volume, nil)
			// A layer that was cut off meanwhile has to be finished before it can be merged.
			if rest, err := disk.Unfinished(); err == nil && len(rest) > 0 {
				d.mergeSoon(disk, uid, volume)
				d.tidy(disk)
			}
			continue
		case ctx.Err() != nil:
			continue
		case api.Is(err, api.NotFound) && replicaGone(disk, uid):
			d.mergeGone(api.UID(uid))
			continue
		case errors.Is(err, context.Canceled): // somebody wanted the volume
			d.mergeSoon(disk, uid, volume)
			d.tidy(disk)
			continue
		case !api.Is(err, api.Busy) && !api.Is(err, api.Unavailable): // else it was closed in between
			d.Log.Warn("layers cannot be merged yet", "volume", volume, "disk", disk.Path(), "err", err)
			d.mergeEnded(ctx, uid, volume, err)
		}
		d.mergeSoon(disk, uid, volume)
		left = true
	}
	return left
}

func replicaGone(disk *stack.Disk, uid string) bool {
	_, err := disk.Stack(uid)
	return api.Is(err, api.NotFound)
}

// snapshotLayers are the layers of a replica's snapshots, by their names.
func snapshotLayers(disk *stack.Disk, uid string) map[string]string {
	layers := map[string]string{}
	if m, err := disk.Stack(uid); err == nil {
		for _, s := range m.Snapshots {
			layers[s.Name] = s.Layer
		}
	}
	return layers
}

// otherLayers are the snapshots that have another layer now, so that another size, too, is to be told of them.
func otherLayers(before, now map[string]string) (names []string) {
	for name, layer := range now {
		if before[name] != layer {
			names = append(names, name)
		}
	}
	return names
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
			more, err := r.Merge(ctx, stack.MergeOptions{BytesPerSecond: d.number(ctx, "merge-rate-limit") << 20})
			if did = did || more; err != nil || !more {
				return err
			}
		}
	}
	if s := d.session(volume); s != nil {
		if open := s.local(api.UID(uid)); open != nil {
			return did, all(ctx, open)
		}
	}
	if l := d.lentOf(uid); l != nil {
		return did, all(ctx, l.Replica)
	}
	ctx, unlock, ok := d.lockYielding(ctx, volume)
	if !ok {
		return false, api.Errorf(api.Busy, "something takes long with the volume")
	}
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
	if lacks, err := disk.Lacking(uid); err == nil && len(lacks) > 0 {
		d.openLenders(ctx, api.UID(disk.UID()), []api.UID{api.UID(lacks[0])})
	}
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

// lockYielding takes the lock of a volume, if that can be had soon, until somebody else wants it: then the context
// ends.
func (d *Data) lockYielding(ctx context.Context, volume string) (_ context.Context, unlock func(), ok bool) {
	release, ok := d.lockSoon(volume)
	if !ok {
		return ctx, nil, false
	}
	ctx, cancel := context.WithCancel(ctx)
	d.mu.Lock()
	l := d.locks[volume]
	l.yield = cancel
	if l.users > 1 {
		l.giveWay()
	}
	d.mu.Unlock()
	return ctx, func() {
		d.mu.Lock()
		l.yield = nil
		d.mu.Unlock()
		cancel()
		release()
	}, true
}

// finishAll finishes what is there to finish, and reports whether something is left, and what failed.
func (d *Data) finishAll(ctx context.Context, disk *stack.Disk) (left bool, failed map[string]error) {
	layers, err := disk.ToFinish()
	if err != nil {
		d.Log.Warn("which layers are to be finished is not known", "disk", disk.Path(), "err", err)
		return true, nil
	}
	failed = map[string]error{}
	done, told := map[string]bool{}, time.Now()
	defer func() { d.tellDigests(disk, done) }()
	for _, uid := range layers {
		began, did := time.Now(), d.tidier.guestsDid()
		err := disk.Finish(ctx, uid)
		switch {
		case err == nil:
			done[uid] = true
			d.Log.Info("layer finished", "disk", disk.Path(), "layer", uid, "took", time.Since(began).Round(time.Millisecond))
		case ctx.Err() != nil:
			return false, nil
		case errors.Is(err, os.ErrNotExist) || api.Is(err, api.NotFound) || api.Is(err, api.Invalid):
			// It went meanwhile.
		default:
			left = true
			if !api.Is(err, api.Busy) {
				d.Log.Warn("a layer cannot be finished yet", "disk", disk.Path(), "layer", uid, "err", err)
				failed[uid] = err
			}
		}
		d.tidier.rest(ctx, time.Since(began), did)
		if time.Since(told) > digestsSoFar {
			d.tellDigests(disk, done)
			done, told = map[string]bool{}, time.Now()
		}
	}
	return left, failed
}

// digestsTold is when the digests of finished layers are told: by then most of the snapshots are looked at anyway.
// While more layers are finished, those so far are told now and then: not the snapshots of a thousand at once in the
// end.
const (
	digestsTold  = 2 * time.Second
	digestsSoFar = 10 * time.Second
)

// tellDigests has the snapshots looked at whose layers have their digests now.
func (d *Data) tellDigests(disk *stack.Disk, layers map[string]bool) {
	q := d.snapshots.Load()
	if q == nil || len(layers) == 0 {
		return
	}
	left := len(layers)
	tell := func(m stack.Meta) {
		for _, s := range m.Snapshots {
			if layers[s.Layer] && s.Name != "" {
				left--
				(*q).AddAfter(watch.Request(s.Name), digestsTold)
			}
		}
	}
	for _, s := range d.all() { // mostly theirs
		if m := s.member(); m != nil && string(s.Disk) == disk.UID() {
			tell(m.Meta())
		}
	}
	if left <= 0 {
		return
	}
	all, err := disk.Replicas()
	if err != nil {
		d.Log.Warn("some replicas cannot be read", "disk", disk.Path(), "err", err)
	}
	for _, m := range all {
		tell(m)
	}
}
