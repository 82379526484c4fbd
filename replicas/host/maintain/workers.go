package maintain

import (
	"context"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Workers owns goroutines that end with Close.
type Workers struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	ended bool
}

// NewWorkers has no goroutine yet.
func NewWorkers() *Workers {
	w := &Workers{}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	return w
}

// Go runs fn in a goroutine, with a context that ends with Close. False: Close was called, and fn does not run.
func (w *Workers) Go(fn func(ctx context.Context)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return false
	}
	w.wg.Go(func() { fn(w.ctx) })
	return true
}

// Close ends the goroutines and awaits them.
func (w *Workers) Close() {
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	w.cancel()
	w.wg.Wait()
}

// lowestPriority locks the calling goroutine to its thread, and makes the thread give way to all others at the disk,
// but not at the processor: the garbage collector waits for every thread, and would wait for a thread that never runs.
func lowestPriority() {
	runtime.LockOSThread()
	const who, idle = 1, 3 << 13 // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, who, 0, idle)
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
