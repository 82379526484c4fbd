package replicas

import (
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
)

// A clone is a head of its own over the layers of a snapshot, on the disk of the snapshot's replica: nothing is copied,
// and from then on neither needs the other. A clone of a volume as it is now takes a snapshot for itself, and lets go
// of it when the clone is there.

// origin is what a clone begins with.
type origin struct {
	snapshot *api.Snapshot
	replica  *api.Replica
	image    string // at the bottom of it
}

// origin finds the data source of a volume; nil: it has none. An error of kind unavailable is one to wait for; any
// other kind is the end of it, until something changes.
func (p *planner) origin(ctx context.Context, v *api.Volume) (_ *origin, err error) {
	if v.Spec.DataSource == "" {
		return nil, nil
	}
	if v.Status.CloneStatus == nil {
		v.Status.CloneStatus = &api.CloneStatus{}
	}
	st := v.Status.CloneStatus
	defer func() {
		kind := api.KindOf(err)
		if err != nil && kind == api.Other {
			return
		}
		was := st.State
		st.State, st.Message = api.CloneInitiated, ""
		if err != nil {
			st.Message = err.Error()
			if kind != api.Unavailable {
				if st.State = api.CloneFailed; was != st.State {
					p.events.Eventf(v, nil, "Warning", "CloneFailed", "Clone", "%s", err)
				}
			}
		}
	}()
	from, err := api.ParseDataSource(v.Spec.DataSource)
	if err != nil {
		return nil, err
	}
	st.Source, st.Snapshot = from.Volume, from.Snapshot
	if v.Spec.CloneMode != "" && v.Spec.CloneMode != api.CloneLinked {
		return nil, api.Errorf(api.Unsupported, "cloneMode %s is not supported yet: set it to %s", v.Spec.CloneMode,
			api.CloneLinked)
	}
	var src api.Volume
	if err := p.client.Get(ctx, types.NamespacedName{Name: from.Volume}, &src); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.NotFound, "volume %s, which is to be cloned, does not exist", from.Volume)
	} else if err != nil {
		return nil, err
	}
	snap, err := p.cloned(ctx, v, &src, from)
	if err != nil {
		return nil, err
	}
	st.Snapshot = snap.Name
	if snap.Status.RestoreSize > v.Spec.Size {
		return nil, api.Errorf(api.OutOfRange, "the volume's %s are less than the %s of snapshot %s of volume %s: expand "+
			"the volume", bytesText(v.Spec.Size), bytesText(snap.Status.RestoreSize), snap.Name, src.Name)
	}
	r, err := memberOn(ctx, p.client, &src, "")
	if err != nil {
		return nil, err
	}
	if r == nil || r.Status.Mode != api.ReplicaCurrent {
		return nil, api.Errorf(api.Unavailable, "volume %s, which is to be cloned, has no usable replica", src.Name)
	}
	o := &origin{snap, r, src.Spec.BackingImage}
	if o.image == "" {
		o.image = r.Labels[api.LabelImage] // of a clone whose spec does not name it
	}
	if of := v.Spec.BackingImage; of != "" && label(of) != label(o.image) {
		return nil, api.Errorf(api.Invalid, "the volume names backing image %s, but its data source, volume %s, stands on "+
			"%q: leave backingImage out", of, src.Name, o.image)
	}
	return o, nil
}

// cloned is the snapshot that a clone begins with.
func (p *planner) cloned(ctx context.Context, v, src *api.Volume, from api.DataSource) (*api.Snapshot, error) {
	name := from.Snapshot
	if name == "" {
		name = cloneSnapshot(v)
	}
	var snap api.Snapshot
	err := p.client.Get(ctx, types.NamespacedName{Name: name}, &snap)
	switch {
	case apierrors.IsNotFound(err) && from.Snapshot == "":
		if src.DeletionTimestamp != nil {
			return nil, api.Errorf(api.NotFound, "volume %s, which is to be cloned, is being deleted", src.Name)
		}
		if src.Spec.Size > v.Spec.Size {
			return nil, api.Errorf(api.OutOfRange, "the volume's %s are less than the %s of volume %s, which is to be cloned: "+
				"expand the volume", bytesText(v.Spec.Size), bytesText(src.Spec.Size), src.Name)
		}
		made := api.NewSnapshot(src, name)
		made.Spec.Labels = map[string]string{api.LabelClone: v.Name}
		if err := p.client.Create(ctx, made); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("snapshot %s: %w", name, err)
		}
		return nil, errSoon
	case apierrors.IsNotFound(err) || err == nil && snap.Spec.Volume != src.Name:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s does not exist", name, src.Name)
	case err != nil:
		return nil, err
	case snap.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s is being deleted", name, src.Name)
	case snap.Status.ReadyToUse && snap.Status.VolumeUID == src.Status.UID:
		return &snap, nil
	case snap.Status.CreationTime != "" && strings.HasPrefix(snap.Status.Error, "lost"):
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s: %s", name, src.Name, snap.Status.Error)
	case snap.Status.Error != "":
		return nil, api.Errorf(api.Unavailable, "snapshot %s of volume %s is not ready: %s", name, src.Name,
			snap.Status.Error)
	}
	return nil, errSoon
}

// errSoon is the snapshot that is being taken: nothing that a user need know.
var errSoon = api.Errorf(api.Unavailable, "waits for the snapshot")

// cloneSnapshot is the name of the snapshot that a clone takes for itself: new with every clone.
func cloneSnapshot(v *api.Volume) string { return "clone-" + string(v.Status.UID) }

// letGo deletes the snapshot that a clone took for itself.
func (p *planner) letGo(ctx context.Context, v *api.Volume) error {
	if !strings.HasPrefix(v.Spec.DataSource, "vol://") || v.Status.UID == "" {
		return nil
	}
	var snap api.Snapshot
	err := p.client.Get(ctx, types.NamespacedName{Name: cloneSnapshot(v)}, &snap)
	if err != nil || snap.DeletionTimestamp != nil {
		return client.IgnoreNotFound(err)
	}
	if err := p.client.Delete(ctx, &snap); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("snapshot %s: %w", snap.Name, err)
	}
	return nil
}

// ofSnapshot wakes who waits for a snapshot, or for its end.
func (p *planner) ofSnapshot(ctx context.Context, o client.Object) []reconcile.Request {
	s := o.(*api.Snapshot)
	all := one(s.Spec.Volume)
	if clone := s.Spec.Labels[api.LabelClone]; clone != "" {
		return append(all, one(clone)...)
	}
	return append(all, p.clonesOf(ctx, api.DataSource{Volume: s.Spec.Volume, Snapshot: s.Name})...)
}

// clonesOf are the volumes that are to begin with a source and do not exist yet.
func (p *planner) clonesOf(ctx context.Context, from api.DataSource) []reconcile.Request {
	var vols api.VolumeList
	if err := p.client.List(ctx, &vols, client.MatchingFields{bySource: from.String()},
		client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("clones cannot be listed", "source", from.String(), "err", err)
		return nil
	}
	var all []reconcile.Request
	for i := range vols.Items {
		if len(vols.Items[i].Status.Members) == 0 {
			all = append(all, one(vols.Items[i].Name)...)
		}
	}
	return all
}

// kept are the names of the snapshots for which a volume's replicas stay.
func (p *planner) kept(ctx context.Context, v *api.Volume) ([]string, error) {
	var list api.SnapshotList
	if err := p.client.List(ctx, &list, client.MatchingFields{byVolume: v.Name}); err != nil {
		return nil, err
	}
	var names []string
	for i := range list.Items {
		st := &list.Items[i].Status
		if st.VolumeUID == v.Status.UID || st.VolumeUID == "" && st.Error == "" {
			names = append(names, list.Items[i].Name)
		}
	}
	return names, nil
}
