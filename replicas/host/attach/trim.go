package attach

import (
	"context"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// A trim has the mounted file system discard its free blocks. The volume's node trims once for each new value of
// spec.trim. The volume or a setting may ask a trim to delete snapshots, too, which frees the blocks of these
// snapshots. A discard of the guest never deletes snapshots: the device cannot distinguish a discard from writes of
// zeros.

// settingTrim applies to volumes without a choice of their own: whether a trim deletes snapshots.
const settingTrim = "remove-snapshots-during-filesystem-trim"

// trimTime bounds one trim.
const trimTime = 6 * time.Hour

// trimRun is one trim. fact is set before done is closed.
type trimRun struct {
	id   string
	done chan struct{}
	fact api.TrimFact
}

// startTrim starts the trim that a user asked for, and reports the last trim. The caller has the volume's lock.
func (as *reconciler) startTrim(ctx context.Context, a *api.Attachment, s *Session) {
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
	if as.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) != nil || v.Status.UID != s.VolumeUID ||
		v.Spec.Trim == "" {
		return
	}
	for _, was := range []*api.TrimFact{a.Status.Trimmed, v.Status.Trimmed} {
		if was != nil && was.ID == v.Spec.Trim && was.State != api.CloneInitiated {
			return
		}
	}
	run = &trimRun{id: v.Spec.Trim, done: make(chan struct{})}
	if !as.trims.Go(func(ctx context.Context) {
		defer s.wake()
		defer close(run.done)
		ctx, cancel := context.WithTimeout(ctx, trimTime)
		defer cancel()
		run.fact = as.trimNow(ctx, s, &v)
		run.fact.ID = run.id
	}) {
		return
	}
	s.trim.Store(run)
	a.Status.Trimmed = &api.TrimFact{ID: run.id, State: api.CloneInitiated}
}

// trimNow trims the file system, and deletes the chain of snapshots below the head if the volume asks for that.
func (as *Attachments) trimNow(ctx context.Context, s *Session, v *api.Volume) api.TrimFact {
	fact := api.TrimFact{State: api.CloneFailed}
	var below []stack.Snapshot
	if as.Enabled(ctx, v.Spec.UnmapMarkSnapChainRemoved, settingTrim) {
		var err error
		if below, err = as.headChain(ctx, s); err != nil {
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
	if fact.Snapshots, fact.Message, err = as.snapshots.DeleteChain(ctx, v, below); err != nil {
		fact.State, fact.Message = api.CloneFailed, err.Error()
	}
	if len(fact.Snapshots) > 0 {
		as.Events.Eventf(v, nil, "Normal", "SnapshotsRemoved", "Trim", "a trim of the volume removed snapshots below "+
			"the head (unmapMarkSnapChainRemoved): %s", strings.Join(fact.Snapshots, ", "))
	}
	if len(fact.Snapshots) == 0 { // else the end of the snapshots frees the space
		if s.isMerging() && fact.Message == "" {
			fact.Message = "a merge of the volume's layers is in progress: the space of trimmed blocks comes back after " +
				"the merge"
		}
		s.owed.Store(true)
		if err := as.reclaimOwed(ctx, s); err != nil {
			as.Log.Info("the space of trimmed blocks above layers comes back later", "volume", v.Name, "why", err)
		}
	}
	as.Log.Info("file system trimmed", "volume", v.Name, "bytes", n, "snapshots", fact.Snapshots)
	return fact
}

// headChain returns the snapshots that the head alone stands on, the newest first.
func (as *Attachments) headChain(ctx context.Context, s *Session) ([]stack.Snapshot, error) {
	if m := s.replicaHere(); m != nil {
		return as.snapshots.Chain(m.Meta()), nil
	}
	m, err := s.engine.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	return as.snapshots.Chain(m), nil
}
