package replicas

import (
	"context"
	"strconv"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/semaphore"
)

// bringer owns what copies layers to the disks of this node, one job for a replica at a time. A job touches disks and
// nothing else; the replica's loop is woken to tell of it. An end of the process leaves what is copied on the disk, and
// the loop of the next one starts the job anew, which goes on there.
type bringer struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  semaphore.Set[string] // of running jobs: key "copy"

	mu    sync.Mutex
	ended bool
	jobs  map[api.UID]*bringing // by replica
}

// bringing is one job.
type bringing struct {
	from   api.UID // disk
	cancel context.CancelFunc
	ended  chan struct{} // closed at the end; then err is set
	err    error

	mu          sync.Mutex
	done, total int64
	moved       time.Time // the last progress
	stopped     time.Time
}

func newBringer() *bringer {
	b := &bringer{jobs: map[api.UID]*bringing{}}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

// close ends all jobs and waits for them.
func (b *bringer) close() {
	b.mu.Lock()
	b.ended = true
	b.mu.Unlock()
	b.cancel()
	b.wg.Wait()
}

// get is the job of a replica, running or ended; nil: there is none.
func (b *bringer) get(replica api.UID) *bringing {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.jobs[replica]
}

// stop ends the job of a replica, waits for it, and forgets it.
func (b *bringer) stop(replica api.UID) {
	if j := b.get(replica); j != nil {
		j.cancel()
		<-j.ended
		b.forget(replica)
	}
}

func (b *bringer) forget(replica api.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.jobs, replica)
}

// start begins a job, unless one runs. It waits until fewer than limit run; tell is called when there is news.
func (b *bringer) start(replica, from api.UID, limit int, tell func(),
	run func(ctx context.Context, j *bringing) error) *bringing {
	b.mu.Lock()
	defer b.mu.Unlock()
	if j := b.jobs[replica]; j != nil && j.running() || b.ended {
		return j
	}
	ctx, cancel := context.WithCancel(b.ctx)
	j := &bringing{from: from, cancel: cancel, ended: make(chan struct{}), moved: time.Now()}
	if was := b.jobs[replica]; was != nil { // a new try of the same
		j.moved = was.moved
	}
	b.jobs[replica] = j
	b.wg.Go(func() {
		defer cancel()
		told := make(chan struct{})
		go func() {
			defer close(told)
			j.watch(tell)
		}()
		release, err := b.slots.Acquire(ctx, "copy", semaphore.Limit(limit))
		if err == nil {
			err = run(ctx, j)
			release()
		}
		j.mu.Lock()
		j.err, j.stopped = err, time.Now()
		j.mu.Unlock()
		close(j.ended)
		<-told
	})
	return j
}

// watch tells of progress, at most once a second, and of the end.
func (j *bringing) watch(tell func()) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := int64(-1)
	for {
		select {
		case <-j.ended:
			tell()
			return
		case <-tick.C:
			j.mu.Lock()
			done := j.done
			j.mu.Unlock()
			if done != last {
				last = done
				tell()
			}
		}
	}
}

func (j *bringing) running() bool {
	select {
	case <-j.ended:
		return false
	default:
		return true
	}
}

// at takes note of progress.
func (j *bringing) at(done, total int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if done > j.done {
		j.moved = time.Now()
	}
	j.done, j.total = done, total
}

// status is the job in the words of the API, and when it last got on.
func (j *bringing) status() (*api.CopyStatus, time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := &api.CopyStatus{From: j.from, Done: j.done, Total: j.total}
	if j.total > 0 {
		s.Progress = int32(j.done * 100 / j.total)
	}
	return s, j.moved
}

// bringRetry is when what failed is tried again; nobody tells of what it failed for.
const bringRetry = 5 * time.Second

// tellReplica has a replica looked at.
func (d *Data) tellReplica(name string) func() {
	return func() {
		if q := d.replicaQueue.Load(); q != nil {
			(*q).Add(watch.Request(name))
		}
	}
}

// setting is a number set by the user, or its default.
func (d *Data) setting(ctx context.Context, name string) int64 {
	var s api.Setting
	if err := d.client.Get(ctx, client.ObjectKey{Name: name}, &s); err == nil {
		if n, err := strconv.ParseInt(s.Value, 10, 64); err == nil && n >= 0 {
			return n
		}
	}
	n, _ := strconv.ParseInt(api.Settings[name], 10, 64)
	return n
}

// rate is how fast a job may read, in bytes per second: a change of the setting counts within a second.
func (d *Data) rate(ctx context.Context) func() int64 {
	var mu sync.Mutex
	var until time.Time
	var rate int64
	return func() int64 {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.After(until) {
			rate, until = d.setting(ctx, "replica-copy-rate-limit")<<20, now.Add(time.Second)
		}
		return rate
	}
}
