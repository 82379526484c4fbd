package engine

import "syscall"

// hold lets a write wait for room on the disk, with its range locked.
func (e *Engine) hold(o *op) {
	if !o.slow {
		o.slow = true
		e.slow++
	}
	if o.bounce != nil {
		o.giveBounce() // others may need it; the piece is merged anew
		o.stage = stageHead
	}
	if o.again {
		o.again = false
		e.retrying--
	}
	o.probe = false
	e.held = append(e.held, o)
	if !e.full {
		e.full = true
		if e.cfg.OnSpace != nil {
			e.cfg.OnSpace(true)
		}
	}
}

// Retry tries one of the writes that wait for room; if there is room now, the others follow. Any goroutine; the owner
// calls it when the disk may have got room, and every now and then while writes wait.
func (e *Engine) Retry() {
	e.cfg.Loop.Post(func() {
		if len(e.held) == 0 || e.retrying > 0 {
			return
		}
		o := e.held[0]
		e.held = e.held[1:]
		o.probe = true
		e.retry(o)
	})
}

func (e *Engine) retryAll() {
	held := e.held
	e.held = nil
	for _, o := range held {
		e.retry(o)
	}
}

func (e *Engine) retry(o *op) {
	o.again = true
	e.retrying++
	if e.fenced != nil || e.closing {
		e.finish(o, syscall.EIO)
		return
	}
	o.begin()
}

// space tells when no write waits for room any more.
func (e *Engine) space() {
	if e.full && len(e.held) == 0 && e.retrying == 0 {
		e.full = false
		if e.cfg.OnSpace != nil {
			e.cfg.OnSpace(false)
		}
	}
}
