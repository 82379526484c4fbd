package replicas

import (
	"context"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// The engine of a volume whose only replica is on the engine's node notes no intents, and no timer wakes its session.
// When the volume is to have another replica (a user raised the replica count, or the replica is to leave its disk),
// the engine begins to note intents; the device does not change.

// awaitOthers returns when the volume of a session has, or is to have, other replicas, and the engine notes intents.
// False: ctx ended before.
func (d *Data) awaitOthers(ctx context.Context, s *session) bool {
	for s.alone() {
		d.tellNews(ctx, s)
		again := time.Duration(0)
		if !d.APIReached() { // nobody may tell a second time of a replica that is there by then
			again = rebuildLast
		}
		if err := d.leaveAlone(ctx, s); err != nil {
			s.log.Warn("the volume takes no other replicas yet", "err", err)
			again = rebuildLast
		}
		if s.alone() && !awaitLook(ctx, s, again) {
			return false
		}
	}
	return ctx.Err() == nil
}

// awaitLook waits for a wake-up, or for a time; 0: for the wake-up alone. False: ctx ended.
func awaitLook(ctx context.Context, s *session, longest time.Duration) bool {
	var late <-chan time.Time
	if longest > 0 {
		t := time.NewTimer(longest)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-s.mates.look:
	case <-late:
	case <-ctx.Done():
		return false
	}
	return true
}

// alone reports whether the session's engine notes no intents.
func (s *session) alone() bool {
	s.mates.mu.Lock()
	defer s.mates.mu.Unlock()
	return s.Alone
}

// leaveAlone makes the engine note intents if the volume has, or is to have, other replicas.
func (d *Data) leaveAlone(ctx context.Context, s *session) error {
	if !d.APIReached() || s.fence.Load() != nil {
		return nil
	}
	var v api.Volume
	if err := d.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != s.VolumeUID || len(v.Status.Members) != 1 {
		return nil
	}
	if others, err := d.hasOthers(ctx, &v); err != nil || !others {
		return err
	}
	r, err := d.MemberOn(ctx, &v, d.Name)
	if err != nil || r == nil || r.Spec.UID != s.Replica {
		return err
	}
	if err := s.engine.NoteIntents(ctx); err != nil {
		return err
	}
	s.mates.mu.Lock()
	s.Alone, s.Members[0].Name = false, r.Name
	s.mates.mu.Unlock()
	if err := d.keepBlob(s); err != nil { // before another replica joins: a successor must go on noting
		s.mates.mu.Lock()
		s.Alone = true
		s.mates.mu.Unlock()
		return err
	}
	s.log.Info("the volume takes other replicas from now on")
	return nil
}
