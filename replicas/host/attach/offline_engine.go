package attach

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/engine"
)

// An operation on all members of a volume at once goes through an engine: the engine of the attached volume, or an
// offline engine, which claims an epoch like any other engine and is fenced by an attach.

// Engine is the engine of a volume, and its member on this node, if any. The caller has the volume's lock, and calls
// end.
func (as *Attachments) Engine(ctx context.Context, v *api.Volume) (e *engine.Engine, local api.UID, end func() error,
	err error) {
	s := as.Session(v.Name)
	if s == nil {
		return as.openOffline(ctx, v)
	}
	if s.VolumeUID != v.Status.UID {
		return nil, "", nil, api.Errorf(api.Busy, "volume %s is being taken over", v.Name)
	}
	if why := s.fence.Load(); why != nil {
		return nil, "", nil, api.Errorf(api.Unavailable, "the volume is being taken over: %w", *why)
	}
	return s.engine, s.localMember(as.Name), func() error { return nil }, nil
}

// openOffline opens an offline engine for a detached volume.
func (as *Attachments) openOffline(ctx context.Context, v *api.Volume) (e *engine.Engine, local api.UID,
	end func() error,
	err error) {
	key := client.ObjectKey{Name: v.Name}
	var now api.Volume
	if err := as.Reader.Get(ctx, key, &now); err != nil {
		return nil, "", nil, err
	}
	// The Attachment is read after the volume: a later attach changes the volume, and the claim below fails. A deleted
	// volume that no node has attached stays detached.
	var a api.Attachment
	switch err := as.Reader.Get(ctx, key, &a); {
	case err == nil && (now.DeletionTimestamp == nil || now.Status.EngineNode != "" || a.Status.Ready):
		return nil, "", nil, api.Errorf(api.Unavailable, "volume %s is being attached or detached: the snapshot follows",
			v.Name)
	case client.IgnoreNotFound(err) != nil:
		return nil, "", nil, err
	}
	for _, held := range as.host.Held() {
		if held.Key == string(v.Status.UID) {
			return nil, "", nil, api.Errorf(api.Unavailable, "the device of volume %s is being taken over: the snapshot "+
				"follows", v.Name)
		}
	}
	if now.UID != v.UID || now.Status.UID != v.Status.UID || len(now.Status.Members) == 0 {
		return nil, "", nil, api.Errorf(api.Busy, "volume %s has changed", v.Name)
	}
	if err := as.memberReverting(ctx, &now); err != nil {
		return nil, "", nil, err
	}
	list, err := as.probeMembers(ctx, &now)
	if err != nil {
		return nil, "", nil, err
	}
	for _, f := range list { // no guest waits: the engine awaits a member that is about to return
		if f.err == nil {
			continue
		}
		if quiet, err := as.Silent(ctx, f.spec.Node); err != nil {
			return nil, "", nil, err
		} else if !quiet {
			return nil, "", nil, api.Errorf(api.Unavailable, "replica %s cannot be reached: %w", f.spec.Name, f.err)
		}
	}
	take, err := selectMembers(&now, list)
	if err != nil {
		return nil, "", nil, err
	}
	b, size, err := as.claimVolume(ctx, &now, take)
	if err != nil {
		return nil, "", nil, err
	}
	s, err := as.openSession(ctx, b, size, true)
	if err != nil {
		return nil, "", nil, errors.Join(err, as.releaseClaim(ctx, v.Name, b.Epoch))
	}
	here, _ := s.memberHere()
	return s.engine, here.UID, func() error {
		return errors.Join(as.closeSession(s), as.releaseClaim(context.WithoutCancel(ctx), s.Volume, s.askedEpoch()))
	}, nil
}

// memberReverting returns an error if a volume, or a member of the volume, is to be reverted first.
func (as *Attachments) memberReverting(ctx context.Context, v *api.Volume) error {
	if err := v.RevertInProgress(); err != nil {
		return err
	}
	for _, name := range v.Status.Members {
		var r api.Replica
		if err := as.Reader.Get(ctx, client.ObjectKey{Name: name}, &r); client.IgnoreNotFound(err) != nil {
			return err
		} else if err == nil {
			if err := r.RevertPending(); err != nil {
				return err
			}
		}
	}
	return nil
}
