package attach

import (
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// recordProposal records a swap beforehand: if this process dies, the next process asks the API for the outcome.
func (as *Attachments) recordProposal(s *Session, epoch int64, joining *memberSpec) error {
	s.membership.recording.Lock()
	defer s.membership.recording.Unlock()
	if s.membership.leaving {
		return api.Errorf(api.Unavailable, "volume %s: this process ends, the next one changes the members", s.Volume)
	}
	s.membership.mu.Lock()
	s.Next, s.Joining = epoch, joining
	s.membership.mu.Unlock()
	s.membership.tried.Store(epoch)
	return as.writeBlobLocked(s)
}

// endSwaps ends the swaps before this process gives its devices up. The record of a later swap would be lost, and the
// next process would take the swap for another engine's.
func (m *membership) endSwaps() {
	m.recording.Lock()
	defer m.recording.Unlock()
	m.leaving = true
}

// recordSwap records the outcome of a swap.
func (as *Attachments) recordSwap(s *Session, epoch int64, change func(*blob)) {
	s.membership.mu.Lock()
	change(&s.blob)
	s.Now, s.Next, s.Joining = epoch, 0, nil
	s.membership.mu.Unlock()
	if err := as.writeBlob(s); err != nil {
		s.log.Error("the device record is stale", "err", err)
	}
}

// dropperOf returns the engine's function to take a member out of the volume.
func (as *Attachments) dropperOf(s *Session) func(ctx context.Context, epoch int64, member string) error {
	drop := as.dropMember(s.blob)
	return func(ctx context.Context, epoch int64, member string) error {
		if !as.APIReached() { // before the proposal: a successor would have to ask the API for the outcome
			return api.Errorf(api.Unavailable, "volume %s: replica %s cannot be dropped before the API is reached",
				s.Volume, member)
		}
		if err := as.recordProposal(s, epoch+1, nil); err != nil {
			return err
		}
		s.membership.mu.Lock()
		i := slices.IndexFunc(s.Members, func(m memberSpec) bool { return string(m.UID) == member })
		name := ""
		if i >= 0 {
			name = s.Members[i].Name
		}
		s.membership.mu.Unlock()
		if err := drop(ctx, epoch, name); err != nil {
			return err
		}
		as.recordSwap(s, epoch+1, func(b *blob) {
			b.Members = slices.DeleteFunc(slices.Clone(b.Members), func(m memberSpec) bool { return string(m.UID) == member })
		})
		return nil
	}
}

// dropMember takes a member, by the name of its object, out of the volume's record.
func (as *Attachments) dropMember(b blob) func(ctx context.Context, epoch int64, name string) error {
	return func(ctx context.Context, epoch int64, name string) error {
		var v api.Volume
		if err := as.Reader.Get(ctx, client.ObjectKey{Name: b.Volume}, &v); apierrors.IsNotFound(err) {
			return api.Errorf(api.Denied, "volume %s does not exist any more", b.Volume)
		} else if err != nil {
			return api.Errorf(api.Unavailable, "volume %s: %w", b.Volume, err)
		}
		there := slices.Index(v.Status.Members, name)
		switch {
		case v.Status.UID != b.VolumeUID || v.Status.EngineNode != as.Name:
			return api.Errorf(api.Denied, "volume %s has its engine on node %s", b.Volume, v.Status.EngineNode)
		case v.Status.Epoch == epoch+1 && there < 0:
			return nil // an earlier call made the swap
		case v.Status.Epoch != epoch:
			return api.Errorf(api.Denied, "volume %s is at epoch %d, this engine at %d", b.Volume, v.Status.Epoch, epoch)
		case there < 0:
			return api.Errorf(api.Unavailable, "replica %s is no member of volume %s", name, b.Volume)
		}
		v.Status.Members = slices.Delete(v.Status.Members, there, there+1)
		v.Status.Epoch++
		if err := as.Client.Status().Update(ctx, &v); err != nil {
			return api.Errorf(api.Unavailable, "drop replica %s: %w", name, err)
		}
		return nil
	}
}

// ownerOf returns the engine's function to ask the API whether the volume still names this engine. The API may have
// made a swap of this engine.
func (as *Attachments) ownerOf(b blob) func(ctx context.Context, epoch int64) error {
	return func(ctx context.Context, epoch int64) error {
		if !as.APIReached() {
			return api.Errorf(api.Unavailable, "node %s cannot ask the API yet", as.Name)
		}
		var v api.Volume
		if err := as.Reader.Get(ctx, client.ObjectKey{Name: b.Volume}, &v); apierrors.IsNotFound(err) {
			return api.Errorf(api.Denied, "volume %s does not exist any more", b.Volume)
		} else if err != nil {
			return api.Errorf(api.Unavailable, "volume %s: %w", b.Volume, err)
		}
		switch {
		case v.Status.UID != b.VolumeUID || v.Status.EngineNode != as.Name:
			return api.Errorf(api.Denied, "volume %s has its engine on node %q", b.Volume, v.Status.EngineNode)
		case v.Status.Epoch != epoch && v.Status.Epoch != epoch+1:
			return api.Errorf(api.Denied, "volume %s is at epoch %d, this engine at %d", b.Volume, v.Status.Epoch, epoch)
		}
		return nil
	}
}

// adderOf returns the engine's function to make a replica a member of the volume.
func (as *Attachments) adderOf(s *Session) func(ctx context.Context, epoch int64, member string) error {
	asked := int64(0) // the epoch in which the API was asked, with any outcome; one call at a time
	return func(ctx context.Context, epoch int64, member string) error {
		x, ok := s.membership.joiners.Load(member)
		if !ok {
			return api.Errorf(api.NotFound, "replica %s is not about to join", member)
		}
		spec := x.(func() memberSpec)()
		if err := as.recordProposal(s, epoch+1, &spec); err != nil {
			return err
		}
		if err := as.addMember(ctx, s, epoch, spec, &asked); err != nil {
			if api.Is(err, api.NotFound) {
				as.recordSwap(s, epoch, func(*blob) {})
			}
			return err
		}
		as.recordSwap(s, epoch+1, func(b *blob) { b.Members = append(slices.Clone(b.Members), spec) })
		return nil
	}
}

// addMember makes the swap. After a request with an unknown outcome, addMember insists in the same epoch: "not found"
// would promise that the swap is never made.
func (as *Attachments) addMember(ctx context.Context, s *Session, epoch int64, spec memberSpec, asked *int64) error {
	var v api.Volume
	if err := as.Reader.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return api.Errorf(api.Unavailable, "volume %s: %w", s.Volume, err)
	}
	there := slices.Contains(v.Status.Members, spec.Name)
	switch {
	case v.Status.UID != s.VolumeUID || v.Status.EngineNode != as.Name:
		return api.Errorf(api.Denied, "volume %s has its engine on node %s", s.Volume, v.Status.EngineNode)
	case v.Status.Epoch == epoch+1 && there:
		return nil // an earlier call made the swap
	case v.Status.Epoch != epoch:
		return api.Errorf(api.Denied, "volume %s is at epoch %d, this engine at %d", s.Volume, v.Status.Epoch, epoch)
	}
	var r api.Replica
	switch err := as.Reader.Get(ctx, client.ObjectKey{Name: spec.Name}, &r); {
	case client.IgnoreNotFound(err) != nil:
		return api.Errorf(api.Unavailable, "replica %s: %w", spec.Name, err)
	case *asked != epoch && (err != nil || r.DeletionTimestamp != nil || r.Spec.Leave || r.Spec.UID != spec.UID):
		return api.Errorf(api.NotFound, "replica %s is being removed", spec.Name)
	}
	v.Status.Members = append(slices.Clone(v.Status.Members), spec.Name)
	v.Status.Epoch++
	*asked = epoch
	if err := as.Client.Status().Update(ctx, &v); err != nil {
		return api.Errorf(api.Unavailable, "add replica %s: %w", spec.Name, err)
	}
	return nil
}
