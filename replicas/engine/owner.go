package engine

import (
	"context"

	"drover.io/drover/api"
)

// A member may answer that it serves another session, and may be wrong: only the API knows which engine has the volume.
// So a member's word takes no device down while other members are left. The engine treats this member like an
// unreachable one, and lets reads wait, until the swap that drops the member has shown whether the API still names this
// engine. If all members answer so, the engine asks the API itself.

// confirmDenial asks the API about a member's word: another engine has the volume. Nil: the API names this engine.
// Denied: the API names another engine, or cannot be asked. Any other error: the API did not answer.
func (c *Config) confirmDenial(ctx context.Context, epoch int64, word error) error {
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
	return api.Errorf(api.Unavailable, "the API does not answer whether another engine has the volume: %w; "+
		"%v", err, word)
}

// doubtOwnership takes member m's word that another engine has the volume, and reports whether the engine asks the API
// first. The word of the volume's only member counts at once: nothing could continue without this member. Loop thread.
func (e *Engine) doubtOwnership(m int, why error) bool {
	if e.cfg.Owns == nil || e.members == bit(m) {
		return false
	}
	if !e.members.has(m) || e.closing || e.fenced != nil {
		return true // nothing depends on a joining replica
	}
	e.doubted = true
	if e.members&^e.suspect == bit(m) {
		e.lost |= bit(m)
		e.nextDrop()
	} else {
		e.proposeDrop(m, why)
	}
	return true
}
