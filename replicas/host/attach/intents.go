package attach

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
func (as *Attachments) awaitOthers(ctx context.Context, s *Session) bool {
	for s.notesNoIntents() {
		as.emitEvents(ctx, s)
		again := time.Duration(0)
		if !as.APIReached() { // no event may repeat the news of a replica that exists by then
			again = rebuildLast
		}
		if err := as.noteIntents(ctx, s); err != nil {
			s.log.Warn("the volume takes no other replicas yet", "err", err)
			again = rebuildLast
		}
		if s.notesNoIntents() && !awaitWake(ctx, s, again) {
			return false
		}
	}
	return ctx.Err() == nil
}

// awaitWake waits for a wake-up, or for a time; 0: for the wake-up alone. False: ctx ended.
func awaitWake(ctx context.Context, s *Session, longest time.Duration) bool {
	var late <-chan time.Time
	if longest > 0 {
		t := time.NewTimer(longest)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-s.membership.look:
	case <-late:
	case <-ctx.Done():
		return false
	}
	return true
}

// notesNoIntents reports whether the session's engine notes no intents.
func (s *Session) notesNoIntents() bool {
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	return s.Alone
}

// noteIntents makes the engine note intents if the volume has, or is to have, other replicas.
func (as *Attachments) noteIntents(ctx context.Context, s *Session) error {
	if !as.APIReached() || s.fence.Load() != nil {
		return nil
	}
	var v api.Volume
	if err := as.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != s.VolumeUID || len(v.Status.Members) != 1 {
		return nil
	}
	if others, err := as.hasOthers(ctx, &v); err != nil || !others {
		return err
	}
	r, err := as.MemberOn(ctx, &v, as.Name)
	if err != nil || r == nil || s.localReplica(r.Spec.UID) == nil {
		return err
	}
	if err := s.engine.NoteIntents(ctx); err != nil {
		return err
	}
	s.membership.mu.Lock()
	s.Alone, s.Members[0].Name = false, r.Name
	s.membership.mu.Unlock()
	if err := as.writeBlob(s); err != nil { // before another replica joins: a successor must continue to note
		s.membership.mu.Lock()
		s.Alone = true
		s.membership.mu.Unlock()
		return err
	}
	s.log.Info("the volume takes other replicas from now on")
	return nil
}
