package restoring

import (
	"context"
	"io"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Bounds of the reads of a layer.
const (
	aheadChunks = 8  // that are fetched behind a read in order
	recentReads = 16 // among which the predecessor of a read is looked for: readers ask for several chunks at once
	readTime    = time.Minute
)

// read is the fetch of one chunk.
type read struct {
	wanted chan struct{} // closed when a reader waits for the chunk
	done   chan struct{} // closed when bytes or err is set
	bytes  []byte
	err    error
}

// chunk returns the bytes of a chunk, which the caller does not change.
func (l *Layer) chunk(p *plan, number int64) ([]byte, error) {
	if !p.isData(number) {
		return make([]byte, p.length(number)), nil
	}
	defer l.set.beginWait()()
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return nil, errEnded
	}
	inOrder := slices.Contains(l.recent, number-1)
	if l.recent = append(l.recent, number); len(l.recent) > recentReads {
		l.recent = l.recent[1:]
	}
	l.mu.Unlock()
	r := l.fetch(p, number, true)
	if inOrder {
		for c := number + 1; c <= number+aheadChunks && c*block.ChunkSize < p.size; c++ {
			if p.isData(c) {
				l.fetch(p, c, false)
			}
		}
	}
	<-r.done // fetches are bounded by readTime, and end with the Set
	return r.bytes, r.err
}

// fetch returns the fetch of a chunk, and starts the fetch if there is none. wanted: a reader waits for the chunk.
func (l *Layer) fetch(p *plan, number int64, wanted bool) *read {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.reads[number]
	if r == nil {
		r = &read{wanted: make(chan struct{}), done: make(chan struct{})}
		if r.bytes = l.set.cached(l, number); r.bytes != nil {
			close(r.done)
			return r
		}
		if !l.set.run(func() { l.finish(p, number, r) }) {
			r.err = errEnded
			close(r.done)
			return r
		}
		l.reads[number] = r
	}
	if wanted {
		select {
		case <-r.wanted:
		default:
			close(r.wanted)
		}
	}
	return r
}

// finish does a fetch.
func (l *Layer) finish(p *plan, number int64, r *read) {
	ctx, cancel := context.WithTimeout(l.ctx, readTime)
	defer cancel()
	release, err := l.acquire(ctx, r)
	fetched := false
	if err == nil {
		defer release()
		r.bytes, fetched, err = l.load(ctx, p, number)
	}
	r.err = err
	l.mu.Lock()
	delete(l.reads, number)
	if err == nil {
		if !l.ended {
			l.set.keep(l, number, r.bytes)
		}
		l.noteWhole(number)
	} else if api.Is(err, api.Corrupt) {
		l.noteDamaged(number, err)
	}
	l.mu.Unlock()
	close(r.done)
	if fetched {
		l.give(p, number, r.bytes)
	}
}

// give writes a fetched chunk to the layer in the making, so that the restore does not fetch the chunk, too.
func (l *Layer) give(p *plan, number int64, b []byte) {
	l.filling.RLock()
	defer l.filling.RUnlock()
	if l.sink != nil && !l.isFilled(number) {
		_ = l.sink.write(b, number*block.ChunkSize, p.digest(number)) // after an error the restore writes the chunk
	}
}

// acquire waits for a slot: chunks that no reader waits for have fewer.
func (l *Layer) acquire(ctx context.Context, r *read) (release func(), err error) {
	slots := l.set.reading
	select {
	case <-r.wanted:
	default:
		select {
		case <-r.wanted:
		case l.set.ahead <- struct{}{}:
			return func() { <-l.set.ahead }, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// load reads a chunk from the layer in the making, or else fetches the chunk from the backup.
func (l *Layer) load(ctx context.Context, p *plan, number int64) (b []byte, fetched bool, err error) {
	b = block.AlignedBuffer(int(p.length(number)))
	if l.loadFilled(p, number, b) {
		return b, false, nil
	}
	l.mu.Lock()
	damaged := l.damaged[number] != nil
	l.mu.Unlock()
	o, err := l.use(ctx, damaged)
	if err != nil {
		return nil, false, err
	}
	backup, ok := o.Backup.(block.ChunkedBackup)
	if !ok {
		err = api.Errorf(api.Unsupported, "layer %s: the store does not read single chunks any more", l.uid)
	} else {
		err = backup.ReadChunk(ctx, number, b[:min(block.ChunkSize, p.content-number*block.ChunkSize)])
	}
	if err == nil && !p.matches(number, b) {
		err = api.Errorf(api.Corrupt, "layer %s: chunk %d at offset %d does not match its digest", l.uid, number,
			number*block.ChunkSize)
	}
	if ctx.Err() != nil {
		l.release(o, nil) // slow, or not wanted any more
	} else {
		l.release(o, err)
	}
	return b, err == nil, err
}

// loadFilled reads a chunk from the layer in the making.
func (l *Layer) loadFilled(p *plan, number int64, b []byte) bool {
	l.filling.RLock()
	defer l.filling.RUnlock()
	l.mu.Lock()
	has := l.part != nil && l.filled.has(number)
	l.mu.Unlock()
	if !has {
		return false
	}
	n, err := l.part.ReadAt(b, number*block.ChunkSize)
	return n == len(b) && (err == nil || err == io.EOF) && p.matches(number, b)
}
