package replicas

import (
	"context"
	"fmt"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
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
	var below []*snapshotNode
	if d.trimRemoves(ctx, v) {
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
	for _, k := range below {
		var snap api.Snapshot
		err := d.Client.Get(ctx, client.ObjectKey{Name: k.Name}, &snap)
		if err == nil && (snap.Spec.Volume != v.Name || uidOf(&snap) != api.UID(k.UID)) {
			continue
		}
		if err == nil && (snap.Spec.Group != "" || snap.Spec.Labels[api.LabelClone] != "") {
			fact.Message = fmt.Sprintf("snapshot %s and those below it stay: it is part of a group, or being cloned", k.Name)
			break
		}
		if err == nil {
			err = d.Client.Delete(ctx, &snap, client.Preconditions{UID: &snap.UID})
		}
		if client.IgnoreNotFound(err) != nil {
			fact.State, fact.Message = api.CloneFailed, fmt.Sprintf("snapshot %s: %v", k.Name, err)
			break
		}
		fact.Snapshots = append(fact.Snapshots, k.Name)
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

func (d *Data) trimRemoves(ctx context.Context, v *api.Volume) bool {
	switch v.Spec.UnmapMarkSnapChainRemoved {
	case "enabled":
		return true
	case "disabled":
		return false
	}
	var s api.Setting
	if err := d.Client.Get(ctx, client.ObjectKey{Name: settingTrim}, &s); err == nil {
		return s.Value == "true"
	}
	return api.Settings[settingTrim] == "true"
}

// chain are the snapshots that the volume alone stands on, the newest first: down to the first that something else
// stands on, too.
func (d *Data) chain(ctx context.Context, s *session) ([]*snapshotNode, error) {
	var lin map[string]*snapshotNode
	if m := s.member(); m != nil {
		lin = buildSnapshotTree(m.Meta())
	} else {
		m, err := s.engine.Snapshots(ctx)
		if err != nil {
			return nil, err
		}
		lin = buildSnapshotTree(m)
	}
	names := map[string]*snapshotNode{}
	var at *snapshotNode
	for _, k := range lin {
		names[k.Name] = k
		if k.children[api.VolumeHead] {
			at = k
		}
	}
	var list []*snapshotNode
	for ; at != nil && len(at.children) == 1; at = names[at.parent] {
		list = append(list, at)
	}
	return list, nil
}
