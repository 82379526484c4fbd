package engine

import (
	"context"
	"errors"
	"fmt"

	"drover.io/drover/api"
)

// An engine notes no intents if the volume has a single member and no other replica is to join: Config.Track. The
// member records this durably, so that the engine later compares a returning former member as a whole.

// unnoter is a member that can record: intents do not name the writes before an epoch, or in the epoch until now.
type unnoter interface {
	Unnoted(ctx context.Context, epoch int64) error
}

// recordUnnoted makes a single member without Track record so, in each epoch: also a member that never noted an intent,
// since a replica that left before the first write has the same past.
func (c *Config) recordUnnoted(ctx context.Context) error {
	m, ok := c.Members[0].Member.(Mirror)
	if !ok {
		return nil
	}
	t, err := m.Intents(ctx)
	if err != nil || t.Base >= c.Epoch {
		return err
	}
	return unnotedOf(ctx, m, c.Members[0].Name, c.Epoch)
}

func unnotedOf(ctx context.Context, m Mirror, name string, epoch int64) error {
	u, ok := m.(unnoter)
	if !ok {
		return api.Errorf(api.Unsupported, "replica %s: it cannot record that writes were not noted", name)
	}
	if err := u.Unnoted(ctx, epoch); err != nil {
		return fmt.Errorf("replica %s: %w", name, err)
	}
	return nil
}

// NoteIntents makes the only member of an engine that was opened without Track note intents, so that other replicas may
// join. A repeated call does nothing.
func (e *Engine) NoteIntents(ctx context.Context) error {
	var notes bool
	var epoch int64
	var members []Named
	var refused error
	if err := e.runOnLoop(ctx, func() {
		notes, members, epoch = e.cleaner.notesIntents(), e.cfg.Members, e.epoch
		if e.closing || e.fenced != nil {
			refused = api.Errorf(api.Unavailable, "the engine is ending")
		}
	}); err != nil || refused != nil || notes {
		return errors.Join(err, refused)
	}
	for _, n := range members {
		m, ok := n.Member.(Mirror)
		if !ok {
			return api.Errorf(api.Unsupported, "replica %s cannot note intents", n.Name)
		}
		if err := unnotedOf(ctx, m, n.Name, epoch); err != nil {
			return err
		}
		if err := m.Track(ctx, true); err != nil {
			return fmt.Errorf("replica %s cannot note intents: %w", n.Name, err)
		}
	}
	if err := e.runOnLoop(ctx, func() {
		switch {
		case e.closing || e.fenced != nil:
			refused = api.Errorf(api.Unavailable, "the engine is ending")
		case !e.cleaner.notesIntents():
			e.cleaner.startCleaner()
		}
	}); err != nil {
		return err
	}
	return refused
}
