package replicas

import (
	"context"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A trim has the mounted file system discard what it does not use. The volume's node does it, once for each new value
// of spec.trim. That it may also delete snapshots, so that what they alone hold comes back too, is asked for by volume
// or by a setting: never by a discard of the guest, which the device cannot tell from a writing of zeros.

// settingTrim is for volumes that do not say themselves whether a trim deletes snapshots.
const settingTrim = "remove-snapshots-during-filesystem-trim"

// trimTime bounds one trim.
const trimTime = 6 * time.Hour

// trimRun is one trim. fact is set before done is closed.
type trimRun struct {
	id   string
	done chan struct{}
	fact api.TrimFact
}

// trim begins a trim that is asked for, and tells what became of the last one. The caller has the volume's lock.
func (l *attachmentLoop) trim(ctx context.Context, a *api.Attachment, s *session) {
	run := s.trim.Load()
	if run != nil {
		select {
		case <-run.done:
			a.Status.Trimmed = run.fact.DeepCopy()
		default:
			return
		}
	}
	var v api.Volume
	if l.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) != nil || v.Status.UID != s.VolumeUID || v.Spec.Trim == "" {
		return
	}
	for _, was := range []*api.TrimFact{a.Status.Trimmed, v.Status.Trimmed} {
		if was != nil && was.ID == v.Spec.Trim && was.State != api.CloneInitiated {
			return
		}
	}
	run = &trimRun{id: v.Spec.Trim, done: make(chan struct{})}
	if !l.workers.Go(func(ctx context.Context) {
		defer s.wake()
		defer close(run.done)
		ctx, cancel := context.WithTimeout(ctx, trimTime)
		defer cancel()
		run.fact = l.trimNow(ctx, s, &v)
		run.fact.ID = run.id
	}) {
		return
	}
	s.trim.Store(run)
	a.Status.Trimmed = &api.TrimFact{ID: run.id, State: api.CloneInitiated}
}

// trimNow has the file system trimmed, and deletes the snapshots that were below the volume before, where that is
// wanted.
func (d *Data) trimNow(ctx context.Context, s *session, v *api.Volume) api.TrimFact {
	fact := api.TrimFact{State: api.CloneFailed}
	var below []stack.Snapshot
	if d.Enabled(ctx, v.Spec.UnmapMarkSnapChainRemoved, settingTrim) {
		var err error
		if below, err = d.chain(ctx, s); err != nil {
			fact.Message = err.Error()
			return fact
		}
	}
	n, err := s.dev.Trim(ctx)
	if err != nil {
		fact.Message = err.Error()
		return fact
	}
	fact.State, fact.Bytes = api.CloneCompleted, n
	if fact.Snapshots, fact.Message, err = d.snapshots.DeleteChain(ctx, v, below); err != nil {
		fact.State, fact.Message = api.CloneFailed, err.Error()
	}
	if len(fact.Snapshots) > 0 {
		d.Events.Eventf(v, nil, "Normal", "SnapshotsRemoved", "Trim", "a trim of the volume removed snapshots that it stood "+
			"on (unmapMarkSnapChainRemoved): %s", strings.Join(fact.Snapshots, ", "))
	}
	if len(fact.Snapshots) == 0 { // else their end does that
		if s.merges() && fact.Message == "" {
			fact.Message = "layers of the volume are being merged: what was trimmed over them comes back after that"
		}
		s.owed.Store(true)
		if err := d.reclaimOwed(ctx, s); err != nil {
			d.Log.Info("the space of what was trimmed over layers comes back later", "volume", v.Name, "why", err)
		}
	}
	d.Log.Info("file system trimmed", "volume", v.Name, "bytes", n, "snapshots", fact.Snapshots)
	return fact
}

// chain are the snapshots that the volume alone stands on, the newest first.
func (d *Data) chain(ctx context.Context, s *session) ([]stack.Snapshot, error) {
	if m := s.member(); m != nil {
		return d.snapshots.Chain(m.Meta()), nil
	}
	m, err := s.engine.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	return d.snapshots.Chain(m), nil
}
