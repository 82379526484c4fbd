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

// tidier finishes the layers that snapshots froze, in the background: one disk at a time has one worker, which ends when
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
		// The thread is not given back: what follows is of the lowest priority, and a thread keeps that.
		runtime.LockOSThread()
		lowest()
		for {
			wait := d.finishAll(t.ctx, disk)
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

// lowest makes the calling thread give way to all others, at the processor and at the disk.
func lowest() {
	const who, idle = 1, 3 << 13 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, who, 0, idle)
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), 19)
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
