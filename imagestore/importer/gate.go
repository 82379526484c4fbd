package importer

import (
	"sync"

	"drover.io/drover/block"
)

// gate stands between an image and block.Copy: it lets a conversion be halted at a place before which all is written
// and behind which no data was read, and be continued. The image's chunks are asked for by one goroutine, which waits
// until all bytes that a chunk needs have come: so what was let through is soon through, however slow the source is.
type gate struct {
	src  *wholeSource
	from int64         // what is before it was made by an earlier process
	news chan struct{} // something is put here when it may have halted

	wait  func(end int64) (int64, error) // for the bytes of the source before end; or nil
	reach func(off, n int64) (int64, error)

	mu     sync.Mutex
	change *sync.Cond
	shut   bool
	stands int64 // no data from here on was let through
	busy   int   // chunks on their way
	broken bool  // it halts no more: whoever failed, or ended it, says why
}

func newGate(from int64) *gate {
	g := &gate{from: from, stands: from, news: make(chan struct{}, 1)}
	g.change = sync.NewCond(&g.mu)
	return g
}

// of sets the image. Where wait is set, it is asked before each chunk.
func (g *gate) of(img block.Source) {
	g.src = &wholeSource{Source: img}
	if r, ok := img.(interface {
		Reach(off, n int64) (int64, error)
	}); ok && g.wait != nil {
		g.reach = r.Reach
	}
}

// close lets no further chunk through.
func (g *gate) close() {
	g.mu.Lock()
	g.shut = true
	g.mu.Unlock()
}

// open lets chunks through again.
func (g *gate) open() {
	g.mu.Lock()
	g.shut = false
	g.mu.Unlock()
	g.change.Broadcast()
}

// fail lets everything through for good: an error, or the end, must not wait here.
func (g *gate) fail() {
	g.mu.Lock()
	g.broken = true
	g.mu.Unlock()
	g.change.Broadcast()
}

// halted tells where a closed gate's conversion stands, once nothing is on its way any more.
func (g *gate) halted() (at int64, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.stands, g.shut && g.busy == 0 && !g.broken
}

// pass waits at an open gate and lets the extent through.
func (g *gate) pass(e block.Extent) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.shut && !g.broken {
		g.change.Wait()
	}
	g.stands = e.End()
	if e.Kind == block.Data {
		g.busy++ // a wholeSource gives one chunk at a time
	}
}

// through says that a chunk is.
func (g *gate) through() {
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
func (g *gate) Size() int64 { return g.src.Size() }

// Close implements block.Source.
func (g *gate) Close() error { return nil }

// Next implements block.Source.
func (g *gate) Next(off int64) (block.Extent, error) {
	if off < g.from {
		return block.Extent{Off: off, Len: min(g.from, g.Size()) - off, Kind: block.Hole}, nil
	}
	e, err := g.src.Next(off)
	if err != nil {
		return e, err
	}
	if e.Kind == block.Data && g.reach != nil {
		if end, err := g.reach(e.Off, e.Len); err == nil { // whoever reads it meets the error too, and says more
			_, _ = g.wait(end)
		}
	}
	g.pass(e)
	return e, nil
}

// ReadAt implements block.Source.
func (g *gate) ReadAt(p []byte, off int64) (int, error) {
	n, err := g.src.ReadAt(p, off)
	if n < len(p) {
		g.fail()
	}
	return n, err
}

// sink is where a chunk's way ends.
func (g *gate) sink(to block.Sink) block.Sink { return gatedSink{to, g} }

type gatedSink struct {
	block.Sink
	g *gate
}

func (s gatedSink) WriteAt(p []byte, off int64) (int, error) {
	n, err := s.Sink.WriteAt(p, off)
	if err != nil {
		s.g.fail()
	}
	s.g.through()
	return n, err
}

var _ block.Source = (*gate)(nil)
