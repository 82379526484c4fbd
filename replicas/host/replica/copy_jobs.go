package replica

import (
	"context"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/semaphore"
)

// copyJobs copy layers to the disks of this node, one job for a replica at a time. A job touches disks alone, and wakes
// the replica's reconciler. The copied chunks stay on the disk when the process ends: the next process starts the job
// again, which continues there.
type copyJobs struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  semaphore.Set[string] // of running jobs: key "copy"

	mu    sync.Mutex
	ended bool
	jobs  map[api.UID]*copyJob // by replica
}

// copyJob is one job.
type copyJob struct {
	from   api.UID // the source disk
	cancel context.CancelFunc
	ended  chan struct{} // closed at the end; then err is set
	err    error

	mu          sync.Mutex
	done, total int64
	moved       time.Time // the last progress
	stopped     time.Time
}

func newCopyJobs() *copyJobs {
	b := &copyJobs{jobs: map[api.UID]*copyJob{}}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	return b
}

// close ends and awaits all jobs.
func (b *copyJobs) close() {
	b.mu.Lock()
	b.ended = true
	b.mu.Unlock()
	b.cancel()
	b.wg.Wait()
}

// get is the job of a replica, running or ended; nil: the replica has no job.
func (b *copyJobs) get(replica api.UID) *copyJob {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.jobs[replica]
}

// stopJob ends, awaits and forgets the job of a replica.
func (b *copyJobs) stopJob(replica api.UID) {
	if j := b.get(replica); j != nil {
		j.cancel()
		<-j.ended
		b.forgetJob(replica)
	}
}

// forgetJob forgets an ended job.
func (b *copyJobs) forgetJob(replica api.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.jobs, replica)
}

// startJob starts a job, unless a job of the replica runs. The job waits until fewer than limit jobs copy, and calls
// report after progress and at its end. Nil: close was called.
func (b *copyJobs) startJob(replica, from api.UID, limit int, report func(),
	run func(ctx context.Context, j *copyJob) error) *copyJob {
	b.mu.Lock()
	defer b.mu.Unlock()
	if j := b.jobs[replica]; j != nil && j.isRunning() || b.ended {
		return j
	}
	ctx, cancel := context.WithCancel(b.ctx)
	j := &copyJob{from: from, cancel: cancel, ended: make(chan struct{}), moved: time.Now()}
	if was := b.jobs[replica]; was != nil { // a new try
		j.moved = was.moved
	}
	b.jobs[replica] = j
	b.wg.Go(func() {
		defer cancel()
		reported := make(chan struct{})
		go func() {
			defer close(reported)
			j.reportProgress(report)
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
		<-reported
	})
	return j
}

// reportProgress reports progress, at most once a second, and the end.
func (j *copyJob) reportProgress(report func()) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	last := int64(-1)
	for {
		select {
		case <-j.ended:
			report()
			return
		case <-tick.C:
			j.mu.Lock()
			done := j.done
			j.mu.Unlock()
			if done != last {
				last = done
				report()
			}
		}
	}
}

// isRunning reports whether the job has not ended.
func (j *copyJob) isRunning() bool {
	select {
	case <-j.ended:
		return false
	default:
		return true
	}
}

// noteProgress notes how much of the job is done.
func (j *copyJob) noteProgress(done, total int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if done > j.done {
		j.moved = time.Now()
	}
	j.done, j.total = done, total
}

// status is the job for the API, and the time of the last progress.
func (j *copyJob) status() (*api.CopyStatus, time.Time) {
	j.mu.Lock()
	defer j.mu.Unlock()
	s := &api.CopyStatus{From: j.from, Done: j.done, Total: j.total}
	if j.total > 0 {
		s.Progress = int32(j.done * 100 / j.total)
	}
	return s, j.moved
}

// copyRetry is the pause after a failed copy: no event reports that the cause has ended.
const copyRetry = 5 * time.Second

// copyRate is the bytes per second that a job may read: a change of the setting counts within a second.
func (rs *Replicas) copyRate(ctx context.Context) func() int64 {
	var mu sync.Mutex
	var until time.Time
	var rate int64
	return func() int64 {
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); now.After(until) {
			rate, until = rs.Setting(ctx, "replica-copy-rate-limit")<<20, now.Add(time.Second)
		}
		return rate
	}
}
