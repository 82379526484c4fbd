package importer

import (
	"context"
	"errors"
	"hash"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/block"
)

// chunkSize is the unit of the pipeline: one chunk of a layer, so that a sink receives whole chunks.
const chunkSize = block.ChunkSize

// pipelineChunks is the number of chunks in memory per pipeline.
const pipelineChunks = 8

// chunk is a range of the origin inside the pipeline.
type chunk struct {
	off  int64
	buf  []byte
	hole int64        // length of a hole instead of bytes
	uses atomic.Int32 // stages that still need buf; the last stage returns buf
}

func (c *chunk) size() int64 { return int64(len(c.buf)) + c.hole }

// filledChunk is one result of a feed.
type filledChunk struct {
	buf  []byte
	hole int64
	err  error
}

// pipelineStages configures a pipeline. hash and put are optional, but not both absent.
type pipelineStages struct {
	feed feed
	hash hash.Hash
	// put writes the data of a chunk; holes are not put. writers goroutines call put concurrently.
	put     func(p []byte, off int64) error
	writers int
	// progress counts the bytes that left the last stage: hash if there is one, else put. Any goroutine may call it.
	progress func(n int64)
	// cancel is called on the first failure and must end a blocked read of the feed.
	cancel func(error)
}

// pipeline moves an origin from its first byte to its last: reading, hashing and writing overlap, and each chunk is in
// memory once.
type pipeline struct {
	pipelineStages
	ctx context.Context

	free          chan []byte // nil: memory that is not allocated yet
	filled        chan filledChunk
	toHash, toPut chan *chunk
	stages        sync.WaitGroup // the goroutines
	inFlight      sync.WaitGroup // chunks between dispatch and their last stage

	once   sync.Once
	failed chan struct{} // closed by the first failure
	err    error         // set before failed is closed
}

// runPipeline returns the number of bytes that the feed supplied. All goroutines have ended when runPipeline returns.
func runPipeline(ctx context.Context, stages pipelineStages) (int64, error) {
	p := &pipeline{pipelineStages: stages, ctx: ctx, free: make(chan []byte, pipelineChunks),
		filled: make(chan filledChunk), failed: make(chan struct{}),
		toHash: make(chan *chunk, pipelineChunks), toPut: make(chan *chunk, pipelineChunks)}
	for range pipelineChunks {
		p.free <- nil
	}
	if p.hash != nil {
		p.stages.Go(p.hashChunks)
	}
	if p.put != nil {
		for range p.writers {
			p.stages.Go(p.putChunks)
		}
	}
	p.stages.Go(p.readChunks)
	n := p.dispatchAll()
	close(p.toHash)
	close(p.toPut)
	p.stages.Wait()
	if !isClosed(p.failed) && ctx.Err() != nil {
		return n, ctx.Err()
	}
	return n, p.err
}

// fail records the first failure and stops every stage.
func (p *pipeline) fail(err error) {
	p.once.Do(func() {
		p.err = err
		close(p.failed)
		p.cancel(err)
	})
}

// hashChunks hashes chunks in order.
func (p *pipeline) hashChunks() {
	for c := range p.toHash {
		p.hashHole(c.hole)
		p.hash.Write(c.buf)
		p.reportProgress(c)
		p.finishStage(c)
	}
}

// hashHole hashes n zeros, unless the context ends first.
func (p *pipeline) hashHole(n int64) {
	for n > 0 && p.ctx.Err() == nil {
		part := min(n, int64(len(zeros)))
		p.hash.Write(zeros[:part])
		n -= part
	}
}

// putChunks writes chunks until the first failure, and afterwards only finishes them.
func (p *pipeline) putChunks() {
	for c := range p.toPut {
		if len(c.buf) > 0 && !isClosed(p.failed) {
			if err := p.put(c.buf, c.off); err != nil {
				p.fail(err)
			}
		}
		if p.hash == nil {
			p.reportProgress(c)
		}
		p.finishStage(c)
	}
}

func (p *pipeline) reportProgress(c *chunk) {
	if p.progress != nil {
		p.progress(c.size())
	}
}

// finishStage ends the use of a chunk by one stage.
func (p *pipeline) finishStage(c *chunk) {
	if c.uses.Add(-1) == 0 {
		p.free <- c.buf[:chunkSize]
		p.inFlight.Done()
	}
}

// readChunks fills free memory from the feed, up to the first error of the feed.
func (p *pipeline) readChunks() {
	defer close(p.filled)
	for {
		var next filledChunk
		select {
		case next.buf = <-p.free:
		case <-p.failed:
			return
		case <-p.ctx.Done():
			return
		}
		if next.buf == nil {
			next.buf = make([]byte, chunkSize)
		}
		next.buf, next.hole, next.err = p.feed.fillChunk(next.buf)
		select {
		case p.filled <- next:
		case <-p.failed:
			return
		case <-p.ctx.Done():
			return
		}
		if next.err != nil {
			return
		}
	}
}

// dispatchAll hands chunks to the stages until the feed ends or a stage fails, and pauses when the feed asks for a
// pause. dispatchAll returns the number of bytes.
func (p *pipeline) dispatchAll() (off int64) {
	pauses := newPauseClock(p.feed)
	defer pauses.stop()
	for !isClosed(p.failed) {
		if !p.pauseIfDue(pauses, off) {
			return off
		}
		next, ok := p.awaitChunk(pauses)
		if !ok {
			continue // a pause may be due
		}
		switch {
		case isClosed(p.failed), errors.Is(next.err, io.EOF):
			return off
		case next.err != nil:
			p.fail(next.err)
			return off
		case next.buf == nil:
			return off // the reader saw the end of the context first
		}
		c := &chunk{off: off, hole: next.hole, buf: next.buf}
		off += c.size()
		p.dispatchChunk(c)
	}
	return off
}

// awaitChunk returns the next chunk of the reader; ok is false after a wake-up of the feed or its clock.
func (p *pipeline) awaitChunk(pauses pauseClock) (next filledChunk, ok bool) {
	select {
	case next = <-p.filled:
	case <-pauses.wake:
		return next, false
	case <-pauses.clock:
		return next, false
	case <-p.failed:
	case <-p.ctx.Done():
		p.fail(p.ctx.Err())
	}
	return next, true
}

// dispatchChunk gives a chunk to every stage. The channels have room for all chunks of the pipeline.
func (p *pipeline) dispatchChunk(c *chunk) {
	if p.hash != nil {
		c.uses.Add(1)
	}
	if p.put != nil {
		c.uses.Add(1)
	}
	p.inFlight.Add(1)
	if p.hash != nil {
		p.toHash <- c
	}
	if p.put != nil {
		p.toPut <- c
	}
}

// pauseIfDue lets the feed pause with every byte before off hashed and put. pauseIfDue reports whether the pipeline
// continues.
func (p *pipeline) pauseIfDue(pauses pauseClock, off int64) bool {
	if pauses.feed == nil {
		return true
	}
	if pauses.feed.pauseDue(off) {
		p.inFlight.Wait()
		if isClosed(p.failed) || p.ctx.Err() != nil {
			return false
		}
		if err := pauses.feed.pauseAt(off); err != nil {
			p.fail(err)
			return false
		}
	}
	pauses.timer.Reset(time.Until(pauses.feed.nextPause()))
	return true
}

// pausingFeed is a feed that pauses the pipeline now and then. The pipeline asks pauseDue after each chunk, at
// nextPause, and on a wake-up; pauseAt runs with every byte before off hashed and put. The goroutine that dispatches
// calls all methods but fillChunk, so that a silent origin does not delay a pause.
type pausingFeed interface {
	wakeUps() <-chan struct{}
	nextPause() time.Time
	pauseDue(off int64) bool
	pauseAt(off int64) error
}

// pauseClock tells when a pausingFeed may pause. For any other feed its channels are nil.
type pauseClock struct {
	feed  pausingFeed
	wake  <-chan struct{}
	timer *time.Timer
	clock <-chan time.Time
}

func newPauseClock(f feed) pauseClock {
	pausing, ok := f.(pausingFeed)
	if !ok {
		return pauseClock{}
	}
	t := time.NewTimer(time.Until(pausing.nextPause()))
	return pauseClock{feed: pausing, wake: pausing.wakeUps(), timer: t, clock: t.C}
}

func (c pauseClock) stop() {
	if c.timer != nil {
		c.timer.Stop()
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
