package engine

import (
	"context"

	"drover.io/drover/api"
)

// Widen has an engine of one member, which notes no intents, let others join: from when it returns, the member notes
// where it is written to, and Join can be called. n is that member, by the name that it has, as it is asked from then
// on; requests that are under way end as they began. It is not called beside Close.
func (e *Engine) Widen(ctx context.Context, n Named) error {
	m, ok := n.Member.(Mirror)
	if !ok || e.cfg.Add == nil {
		return api.Errorf(api.Unsupported, "replica %s cannot have others beside it", n.Name)
	}
	if l, ok := n.Member.(Laster); ok { // it is the only one so far
		l.Last(true)
	}
	if err := m.Track(ctx, true); err != nil {
		return err
	}
	var refused error
	err := e.on(ctx, func() {
		switch {
		case e.closing || e.fenced != nil:
			refused = api.Errorf(api.Unavailable, "the engine is ending")
			return
		case e.cleaner != nil || len(e.cfg.Members) != 1 || e.cfg.Members[0].Name != n.Name:
			refused = api.Errorf(api.Invalid, "replica %s is not the only one of an engine for one", n.Name)
			return
		}
		e.cfg.Members = []Named{n} // others go through the old one
		e.cleaner = make(chan struct{})
		go e.clean()
		e.tellLast()
	})
	if err != nil {
		return err
	}
	return refused
}
