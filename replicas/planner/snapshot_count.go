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

// settingMany is how many snapshots a volume may have before that is told; 0: any number.
const settingMany = "snapshot-count-warning-threshold"

// census counts the Snapshots of each volume as they come and go, so that none has to be listed for it: by volume,
// their names. Under the planner's mu.
type census map[string]map[string]struct{}

// counting keeps the census, and wakes the volume of what came or went.
func (p *planner) counting() handler.EventHandler {
	note := func(o client.Object, is bool, q backlog.Queue) {
		volume := o.(*api.Snapshot).Spec.Volume
		p.mu.Lock()
		if is && p.census[volume] == nil {
			p.census[volume] = map[string]struct{}{}
		}
		if is {
			p.census[volume][o.GetName()] = struct{}{}
		} else if delete(p.census[volume], o.GetName()); len(p.census[volume]) == 0 {
			delete(p.census, volume)
		}
		p.mu.Unlock()
		q.Add(watch.Request(volume))
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q backlog.Queue) { note(e.Object, true, q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q backlog.Queue) { // another one of the name, perhaps
			if a, b := e.ObjectOld.(*api.Snapshot), e.ObjectNew.(*api.Snapshot); a.Spec.Volume != b.Spec.Volume {
				note(a, false, q)
				note(b, true, q)
			}
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q backlog.Queue) { note(e.Object, false, q) },
	}
}

// counted are the volumes that have snapshots.
func (p *planner) counted(context.Context, client.Object) []reconcile.Request {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []reconcile.Request
	for volume := range p.census {
		all = append(all, watch.Requests(volume)...)
	}
	return all
}

// describeCount tells of a volume that it has many snapshots, and no more when it has fewer again.
func (p *planner) describeCount(ctx context.Context, v *api.Volume) {
	p.mu.Lock()
	n := int64(len(p.census[v.Name]))
	p.mu.Unlock()
	most := p.setting(ctx, settingMany)
	switch {
	case most > 0 && n > most:
		condition(v, api.ConditionTooMany, true, api.ConditionTooMany, fmt.Sprintf("the volume has %d snapshots, more than "+
			"the %d of the setting %s: delete those that are not needed; others can be taken all the same", n, most,
			settingMany))
	case meta.FindStatusCondition(v.Status.Conditions, api.ConditionTooMany) != nil:
		condition(v, api.ConditionTooMany, false, "Few", "")
	}
}

// turned tells of conditions that a step has changed.
func (p *planner) turned(old, v *api.Volume) {
	for _, kind := range []string{api.ConditionTooMany, api.ConditionMerged} {
		c := meta.FindStatusCondition(v.Status.Conditions, kind)
		was := meta.FindStatusCondition(old.Status.Conditions, kind)
		if c == nil || was != nil && was.Status == c.Status {
			continue
		}
		switch {
		case (c.Status == "True") == (kind == api.ConditionTooMany):
			p.events.Eventf(v, nil, "Warning", c.Reason, "Watch", "%s", c.Message)
		case was == nil:
		case kind == api.ConditionTooMany:
			p.events.Eventf(v, nil, "Normal", "FewerSnapshots", "Watch", "the volume has no longer too many snapshots")
		default:
			p.events.Eventf(v, nil, "Normal", c.Reason, "Watch", "the layers of deleted snapshots are merged again")
		}
	}
}
