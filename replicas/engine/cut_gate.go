package engine

import "drover.io/drover/block"

// cutGate holds new writes back during a cut's instant. Loop thread.
type cutGate struct {
	e      *Engine
	closed bool
	parked []*block.Request
}

// parkWrite holds a write back, and reports whether the gate did. Reads and flushes pass.
func (g *cutGate) parkWrite(r *block.Request) bool {
	if !g.closed || r.Op == block.OpRead || r.Op == block.OpFlush {
		return false
	}
	g.parked = append(g.parked, r)
	return true
}

// openGate starts the held writes, or fails them for a reason.
func (g *cutGate) openGate(why error) {
	g.closed = false
	list := g.parked
	g.parked = nil
	for _, r := range list {
		if why != nil {
			r.Err = why
			r.Done(r)
			continue
		}
		g.e.Submit(r)
	}
}
