package replicas

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/engine"
)

// A volume with one replica, used where that is, has an engine that notes no intents and lets nobody join. When it is
// to have another one (its number was raised, or the one that it has is to leave its disk) the engine goes on as that
// of a volume with several: the device, and whoever uses it, notice nothing.

// alone prepares a session of one replica that once had others: no intents tell what is written from now on, and should
// one of the others come back, by way of an older state of the API, it is compared as a whole.
func (d *Data) alone(ctx context.Context, s *session) error {
	t, err := s.member().Intents(ctx)
	if err != nil || t.Base == 0 && len(t.Regions) == 0 || t.Base >= s.Epoch {
		return err
	}
	return s.member().Unnoted(ctx, s.Epoch)
}

// widen makes the session one of several replicas if the volume has, or is to have, others. The caller has the volume's
// lock.
func (l *attachmentLoop) widen(ctx context.Context, s *session) error {
	if s.mates.many.Load() || l.peers == nil || s.fence.Load() != nil {
		return nil
	}
	var v api.Volume
	if err := l.client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != s.VolumeUID || len(v.Status.Members) != 1 {
		return nil
	}
	if many, err := l.many(ctx, &v); err != nil || !many {
		return err
	}
	r, err := memberOn(ctx, l.client, &v, l.Node)
	if err != nil || r == nil || r.Spec.UID != s.Replica {
		return err
	}
	// What was written until now no intents tell: whoever was a member before is compared as a whole.
	if err := s.member().Unnoted(ctx, s.Epoch); err != nil {
		return err
	}
	// A process that takes the device over from here on does so as that of a volume with several: it needs no more.
	spec := memberSpec{Name: r.Name, UID: r.Spec.UID, Node: l.Node, Disk: s.Disk, Path: s.Path}
	s.mates.mu.Lock()
	s.Now, s.Members = s.Epoch, []memberSpec{spec}
	s.mates.mu.Unlock()
	s.mates.tried.Store(s.Epoch)
	if err := l.keepBlob(s); err != nil {
		return err
	}
	near := engine.NewNear(l.backendOf(s.member(), s.loop), engine.NearOptions{Watch: l.watch, Loop: s.loop,
		Replica: string(s.Replica), OnDown: func(why error) { s.engine.Suspect(string(s.Replica), why) }})
	if err := s.engine.Widen(ctx, engine.Named{Name: string(s.Replica), Local: true, Member: near}); err != nil {
		near.Forgo()
		return err
	}
	s.mates.many.Store(true)
	l.mendOften(s)
	s.log.Info("the volume takes other replicas from now on")
	return nil
}
