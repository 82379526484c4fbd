package planner

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// settingSnapshotWarning names the setting for the number of snapshots above which a volume gets a warning; 0: none.
const settingSnapshotWarning = "snapshot-count-warning-threshold"

// snapshotCount holds the names of the Snapshots of each volume, so that a reconcile need not list Snapshots. The
// reconciler's mu guards the map.
type snapshotCount map[string]map[string]struct{}

// countSnapshots updates the counts and wakes the volume of a new or deleted Snapshot.
func (p *volumeReconciler) countSnapshots() handler.EventHandler {
	note := func(o client.Object, is bool, q backlog.Queue) {
		volume := o.(*api.Snapshot).Spec.Volume
		p.mu.Lock()
		if is && p.snapshots[volume] == nil {
			p.snapshots[volume] = map[string]struct{}{}
		}
		if is {
			p.snapshots[volume][o.GetName()] = struct{}{}
		} else if delete(p.snapshots[volume], o.GetName()); len(p.snapshots[volume]) == 0 {
			delete(p.snapshots, volume)
		}
		p.mu.Unlock()
		q.Add(watch.Request(volume))
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q backlog.Queue) { note(e.Object, true, q) },
		// After an update the name may belong to another Snapshot.
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q backlog.Queue) {
			if a, b := e.ObjectOld.(*api.Snapshot), e.ObjectNew.(*api.Snapshot); a.Spec.Volume != b.Spec.Volume {
				note(a, false, q)
				note(b, true, q)
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q backlog.Queue) { note(e.Object, false, q) },
	}
}

// volumesWithSnapshots requeues the volumes with Snapshots.
func (p *volumeReconciler) volumesWithSnapshots(context.Context, client.Object) []reconcile.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []reconcile.Request
	for volume := range p.snapshots {
		all = append(all, watch.Requests(volume)...)
	}
	return all
}

// describeSnapshotCount sets the condition for too many snapshots.
func (p *volumeReconciler) describeSnapshotCount(ctx context.Context, v *api.Volume) {
	p.mu.Lock()
	n := int64(len(p.snapshots[v.Name]))
	p.mu.Unlock()
	most := p.settingNumber(ctx, settingSnapshotWarning)
	switch {
	case most > 0 && n > most:
		setCondition(v, api.ConditionTooMany, true, api.ConditionTooMany, fmt.Sprintf("the volume has %d snapshots, "+
			"more than the %d of the setting %s: delete unneeded snapshots; new snapshots are possible all the "+
			"same", n, most,
			settingSnapshotWarning))
	case meta.FindStatusCondition(v.Status.Conditions, api.ConditionTooMany) != nil:
		setCondition(v, api.ConditionTooMany, false, "Few", "")
	}
}

// reportChanges emits events for changed conditions.
func (p *volumeReconciler) reportChanges(old, v *api.Volume) {
	for _, kind := range []string{api.ConditionTooMany, api.ConditionMerged, api.ConditionStalled} {
		c := meta.FindStatusCondition(v.Status.Conditions, kind)
		was := meta.FindStatusCondition(old.Status.Conditions, kind)
		if c == nil || was != nil && was.Status == c.Status {
			continue
		}
		switch {
		case (c.Status == "True") == (kind != api.ConditionMerged):
			p.events.Eventf(v, nil, "Warning", c.Reason, "Watch", "%s", c.Message)
		case was == nil:
		case kind == api.ConditionStalled:
			p.events.Eventf(v, nil, "Normal", c.Reason, "Watch", "the restore of the volume continues")
		case kind == api.ConditionTooMany:
			p.events.Eventf(v, nil, "Normal", "FewerSnapshots", "Watch", "the volume has no longer too many snapshots")
		default:
			p.events.Eventf(v, nil, "Normal", c.Reason, "Watch", "the layers of deleted snapshots are merged again")
		}
	}
}
