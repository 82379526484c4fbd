package importer

import (
	"sync"

	"drover.io/drover/block"
)

// checkpointGate sits between an image and block.Copy. A closed gate halts a conversion at a position: every chunk
// before the position is written, no data behind the position was read. One goroutine asks for the chunks and waits
// until all bytes for a chunk arrived, so that a chunk in progress finishes soon even with a slow origin.
type checkpointGate struct {
	src  *chunkSource
	from int64         // an earlier process made the content before
	news chan struct{} // receives a value when the conversion may have halted

	wait  func(end int64) (int64, error) // for the bytes of the origin before end; or nil
	reach func(off, n int64) (int64, error)

	mu       sync.Mutex
	change   *sync.Cond
	shut     bool
	position int64 // no data from here on passed
	busy     int   // chunks in progress
	broken   bool  // the gate no longer halts: an error or the end must not wait
}

func newCheckpointGate(from int64) *checkpointGate {
	g := &checkpointGate{from: from, position: from, news: make(chan struct{}, 1)}
	g.change = sync.NewCond(&g.mu)
	return g
}

// setImage sets the image. wait, if set, is called before each chunk.
func (g *checkpointGate) setImage(img block.Source) {
	g.src = &chunkSource{Source: img}
	if r, ok := img.(interface {
		Reach(off, n int64) (int64, error)
	}); ok && g.wait != nil {
		g.reach = r.Reach
	}
}

// shutGate lets no further chunk pass.
func (g *checkpointGate) shutGate() {
	g.mu.Lock()
	g.shut = true
	g.mu.Unlock()
}

// openGate lets chunks pass again.
func (g *checkpointGate) openGate() {
	g.mu.Lock()
	g.shut = false
	g.mu.Unlock()
	g.change.Broadcast()
}

// disableGate opens the gate for good: an error, or the end, must not wait here.
func (g *checkpointGate) disableGate() {
	g.mu.Lock()
	g.broken = true
	g.mu.Unlock()
	g.change.Broadcast()
}

// haltedAt returns the position of a halted conversion.
func (g *checkpointGate) haltedAt() (at int64, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.position, g.shut && g.busy == 0 && !g.broken
}

// passExtent waits at an open gate and lets the extent pass.
func (g *checkpointGate) passExtent(e block.Extent) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.shut && !g.broken {
		g.change.Wait()
	}
	g.position = e.End()
	if e.Kind == block.Data {
		g.busy++ // a chunkSource returns one chunk at a time
	}
}

// finishChunk ends a chunk.
func (g *checkpointGate) finishChunk() {
	g.mu.Lock()
	g.busy--
	still := g.busy == 0
	g.mu.Unlock()
	if still {
		select {
		case g.news <- struct{}{}:
		default:
		}
	}
}

// Size implements block.Source.
func (g *checkpointGate) Size() int64 { return g.src.Size() }

// Close implements block.Source.
func (g *checkpointGate) Close() error { return nil }

// Next implements block.Source.
func (g *checkpointGate) Next(off int64) (block.Extent, error) {
	if off < g.from {
		return block.Extent{Off: off, Len: min(g.from, g.Size()) - off, Kind: block.Hole}, nil
	}
	e, err := g.src.Next(off)
	if err != nil {
		return e, err
	}
	if e.Kind == block.Data && g.reach != nil {
		if end, err := g.reach(e.Off, e.Len); err == nil { // ReadAt meets the same error with more context
			_, _ = g.wait(end)
		}
	}
	g.passExtent(e)
	return e, nil
}

// ReadAt implements block.Source.
func (g *checkpointGate) ReadAt(p []byte, off int64) (int, error) {
	n, err := g.src.ReadAt(p, off)
	if n < len(p) {
		g.disableGate()
	}
	return n, err
}

// gateSink returns a sink whose writes end chunks of the gate.
func (g *checkpointGate) gateSink(to block.Sink) block.Sink { return gatedSink{to, g} }

type gatedSink struct {
	block.Sink
	g *checkpointGate
}

func (s gatedSink) WriteAt(p []byte, off int64) (int, error) {
	n, err := s.Sink.WriteAt(p, off)
	if err != nil {
		s.g.disableGate()
	}
	s.g.finishChunk()
	return n, err
}

var _ block.Source = (*checkpointGate)(nil)
