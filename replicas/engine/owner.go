package engine

import (
	"context"

	"drover.io/drover/api"
)

// A member that serves another session says so, and may be wrong: only the API knows which engine has the volume. So a
// member's word takes no device down while other members are there. The engine treats that member like one that does
// not answer, and lets reads wait, until the swap that drops the member has told whether the API still names this
// engine. If all members say so, the engine asks the API itself.

// confirm asks the API about a member's word that another engine has the volume. Nil: the API names this engine.
// Denied: it does not, or nobody can be asked. Any other error: the API did not answer.
func (c *Config) confirm(ctx context.Context, epoch int64, word error) error {
	if c.Owns == nil {
		return word
	}
	err := c.Owns(ctx, epoch)
	switch {
	case err == nil:
		return nil
	case api.Is(err, api.Denied):
		return api.Errorf(api.Denied, "%w; %v", err, word)
	}
	return api.Errorf(api.Unavailable, "whether another engine has the volume is not known: %w; %v", err, word)
}

// doubt takes member m's word that it serves another engine, and reports whether the engine asks the API first. It does
// not where m is the volume's only member: nothing could go on without it. Loop thread.
func (e *Engine) doubt(m int, why error) bool {
	if e.cfg.Owns == nil || e.members == bit(m) {
		return false
	}
	if !e.members.has(m) || e.closing || e.fenced != nil {
		return true // nothing depends on a replica that is no member
	}
	e.doubted = true
	if e.members&^e.suspect == bit(m) {
		e.lost |= bit(m)
		e.nextDrop()
	} else {
		e.propose(m, why)
	}
	return true
}
