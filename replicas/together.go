package replicas

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// What is done with all members of a volume at once goes through an engine: that of the attached volume, or, for a
// detached one, an engine without a device, which takes an epoch like any other and is fenced by an attach.

// hand is the engine of a volume for the time of one deed.
type hand struct {
	*engine.Engine
	local api.UID // the member on this node; empty: none
	end   func() error
}

// keeper is the node that looks after the snapshots of a volume: where it is attached, else that of its first member
// whose node gives signs of life.
func (d *Data) keeper(ctx context.Context, v *api.Volume) (node string, attached bool, err error) {
	var a api.Attachment
	err = d.client.Get(ctx, client.ObjectKey{Name: v.Name}, &a)
	if err == nil {
		return a.Spec.Node, true, nil
	}
	if !apierrors.IsNotFound(err) {
		return "", false, err
	}
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return "", false, err
	}
	for _, name := range v.Status.Members {
		i := slices.IndexFunc(list.Items, func(r api.Replica) bool { return r.Name == name })
		if i < 0 {
			continue
		}
		if quiet, err := d.quiet(ctx, list.Items[i].Spec.Node); err != nil {
			return "", false, err
		} else if !quiet {
			return list.Items[i].Spec.Node, false, nil
		}
	}
	return "", false, nil
}

// mayKeep reports whether this node could come to look after the snapshots of a volume.
func (d *Data) mayKeep(ctx context.Context, v *api.Volume) bool {
	if len(v.Status.Members) < 2 || d.client.Get(ctx, client.ObjectKey{Name: v.Name}, &api.Attachment{}) == nil {
		return false
	}
	r, err := memberOn(ctx, d.client, v, d.Node)
	return err == nil && r != nil
}

// quiet reports whether a node gives no sign of life.
func (d *Data) quiet(ctx context.Context, node string) (bool, error) {
	if node == d.Node {
		return false, nil
	}
	var n api.Node
	if err := d.client.Get(ctx, client.ObjectKey{Name: node}, &n); apierrors.IsNotFound(err) {
		return true, nil
	} else if err != nil {
		return false, err
	}
	return time.Since(n.Status.Heartbeat.Time) > n.SilentAfter(), nil
}

// silentAfter is how old a heartbeat may be, of nodes like this one.
func (d *Data) silentAfter(ctx context.Context) time.Duration {
	var n api.Node
	_ = d.client.Get(ctx, client.ObjectKey{Name: d.Node}, &n) // else as by default
	return n.SilentAfter()
}

// hand gets the engine of a volume with several replicas. The caller has the volume's lock, and calls end.
func (d *Data) hand(ctx context.Context, v *api.Volume) (*hand, error) {
	s := d.session(v.Name)
	if s != nil && s.VolumeUID == v.Status.UID && s.mates.many.Load() {
		if why := s.fence.Load(); why != nil {
			return nil, api.Errorf(api.Unavailable, "the volume is being taken over: %w", *why)
		}
		return &hand{s.engine, s.localMember(d.Node), func() error { return nil }}, nil
	}
	if s != nil {
		return nil, api.Errorf(api.Busy, "volume %s is being taken over", v.Name)
	}
	return d.deviceless(ctx, v)
}

// several reports whether a volume is to be treated as one with several replicas. One that is attached is what it was
// when it was attached.
func (d *Data) several(ctx context.Context, v *api.Volume) (bool, error) {
	if s := d.session(v.Name); s != nil && s.VolumeUID == v.Status.UID {
		return s.mates.many.Load(), nil
	}
	return d.many(ctx, v)
}

// deviceless makes an engine for a volume that nobody has attached.
func (d *Data) deviceless(ctx context.Context, v *api.Volume) (*hand, error) {
	key := client.ObjectKey{Name: v.Name}
	var now api.Volume
	if err := d.reader.Get(ctx, key, &now); err != nil {
		return nil, err
	}
	// Looked at after the volume: who attaches it from now on changes it, and the claim below fails.
	if err := d.reader.Get(ctx, key, &api.Attachment{}); err == nil {
		return nil, api.Errorf(api.Unavailable, "volume %s is being attached or detached: the snapshot follows", v.Name)
	} else if !apierrors.IsNotFound(err) {
		return nil, err
	}
	for _, held := range d.Host.Held() {
		if held.Key == string(v.Status.UID) {
			return nil, api.Errorf(api.Unavailable, "the device of volume %s is being taken over: the snapshot follows", v.Name)
		}
	}
	if now.UID != v.UID || now.Status.UID != v.Status.UID || len(now.Status.Members) == 0 {
		return nil, api.Errorf(api.Busy, "volume %s has changed", v.Name)
	}
	if err := d.memberReverting(ctx, &now); err != nil {
		return nil, err
	}
	l := &attachmentLoop{d}
	list, err := l.look(ctx, &now)
	if err != nil {
		return nil, err
	}
	for _, f := range list { // nobody is in a hurry: one that is about to come back is not left behind
		if f.err == nil {
			continue
		}
		if quiet, err := d.quiet(ctx, f.spec.Node); err != nil {
			return nil, err
		} else if !quiet {
			return nil, api.Errorf(api.Unavailable, "replica %s cannot be reached: %w", f.spec.Name, f.err)
		}
	}
	take, err := choose(&now, list)
	if err != nil {
		return nil, err
	}
	b := blob{Volume: now.Name, VolumeUID: now.Status.UID}
	var names []string
	size := take[0].info.Size
	for _, f := range take {
		names = append(names, f.spec.Name)
		b.Members = append(b.Members, f.spec)
		size = min(size, f.info.Size)
	}
	now.Status.Epoch++
	now.Status.EngineNode, now.Status.Members = d.Node, names
	if err := d.client.Status().Update(ctx, &now); err != nil {
		return nil, fmt.Errorf("claim volume %s: %w", v.Name, err)
	}
	b.Epoch, b.Now = now.Status.Epoch, now.Status.Epoch
	s, err := d.openMany(ctx, b, size, true)
	if err != nil {
		return nil, errors.Join(err, d.giveBack(ctx, v.Name, b.Epoch))
	}
	return &hand{s.engine, s.Replica, func() error {
		return errors.Join(d.close(s), d.giveBack(context.WithoutCancel(ctx), s.Volume, s.at()))
	}}, nil
}

// memberReverting reports whether a volume or a member of it is to be reverted, and nothing else may be done with the
// volume before.
func (d *Data) memberReverting(ctx context.Context, v *api.Volume) error {
	if err := v.RevertInProgress(); err != nil {
		return err
	}
	for _, name := range v.Status.Members {
		var r api.Replica
		if err := d.reader.Get(ctx, client.ObjectKey{Name: name}, &r); client.IgnoreNotFound(err) != nil {
			return err
		} else if err == nil {
			if err := r.RevertPending(); err != nil {
				return err
			}
		}
	}
	return nil
}

// family are the snapshots that all members have, with their neighbours.
func (h *hand) family(ctx context.Context) (*lineage, error) {
	m, err := h.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	return &lineage{m.Head, family(m)}, nil
}

// sizes are those of the layers of snapshots, on one of the members.
func (h *hand) sizes(ctx context.Context) (map[string]peer.LayerSize, error) {
	m, err := h.Source(ctx)
	if err != nil {
		return nil, err
	}
	if s, ok := m.(interface {
		Sizes(ctx context.Context) (map[string]peer.LayerSize, error)
	}); ok {
		return s.Sizes(ctx)
	}
	return nil, api.Errorf(api.Unsupported, "the member does not know")
}

// bringMany makes a Snapshot of a volume with several replicas true, as bring does for one with one.
func (l *snapshotLoop) bringMany(ctx context.Context, s *api.Snapshot, v *api.Volume) (err error) {
	if s.DeletionTimestamp != nil {
		return l.removeMany(ctx, s, v)
	}
	if s.Adorn(v) { // before anything of it exists
		st := s.Status.DeepCopy()
		if err := l.client.Update(ctx, s); err != nil {
			return err
		}
		s.Status = *st
	}
	if open := l.session(v.Name); open == nil && s.Status.CreationTime != "" {
		// What was reported once is on all members, and one can tell.
		if r, err := memberOn(ctx, l.client, v, l.Node); err != nil || r == nil {
			return err
		} else if err := l.describeHere(ctx, s, v, r); !api.Is(err, api.Busy) {
			return err
		}
	}
	h, err := l.hand(ctx, v)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.end()) }()
	lin, err := h.family(ctx)
	if err != nil {
		return err
	}
	k, err := l.find(s, lin)
	if err != nil {
		return err
	}
	if s.Spec.Group != "" && s.Spec.CreateSnapshot && s.Status.CreationTime == "" {
		if waits, err := l.ofGroup(ctx, s, k); waits || err != nil {
			return err
		}
	}
	if k == nil {
		if k, err = l.cutMany(ctx, s, v, h, lin); err != nil {
			return err
		}
	}
	sizes, err := h.sizes(ctx)
	if err != nil {
		return err
	}
	l.tell(s, v, k, sizes[k.UID])
	s.Status.ReadyToUse = true
	if h.local == "" { // it is where a replica is
		if r, err := memberOn(ctx, l.client, v, ""); err == nil && r != nil {
			s.Status.OwnerID = r.Spec.Node
		}
	}
	return nil
}

// describeHere tells of a snapshot by the member on this node. Busy: it is not there, or not known to be.
func (l *snapshotLoop) describeHere(ctx context.Context, s *api.Snapshot, v *api.Volume, r *api.Replica) error {
	disk, err := l.disk(ctx, r.Spec.Disk)
	if err != nil {
		return err
	}
	for was := ""; ; {
		m, err := disk.Stack(string(r.Spec.UID))
		if err != nil {
			return err
		}
		k, err := l.find(s, &lineage{m.Head, family(m)})
		if err != nil {
			return err
		}
		if k == nil || instant(k.Created) != s.Status.CreationTime || k.Layer == was {
			return api.Errorf(api.Busy, "the members have to be asked")
		}
		size, used, err := disk.LayerSize(k.Layer)
		if api.Is(err, api.NotFound) { // merged a moment ago: the record tells into which
			was = k.Layer
			continue
		}
		if err != nil {
			return err
		}
		l.tell(s, v, k, peer.LayerSize{Size: size, Used: used, Root: disk.LayerRoot(k.Layer)})
		s.Status.ReadyToUse = true
		return nil
	}
}

// cutMany takes the snapshot of all members at one instant.
func (l *snapshotLoop) cutMany(ctx context.Context, s *api.Snapshot, v *api.Volume, h *hand,
	lin *lineage) (*kin, error) {
	switch {
	case s.Status.CreationTime != "" || !s.Spec.CreateSnapshot:
		// The engine's members have every snapshot of the volume, and the one that was asked has not this one.
		return nil, l.lost(ctx, s, v)
	case v.DeletionTimestamp != nil:
		return nil, api.Errorf(api.InUse, "volume %s is being deleted", v.Name)
	}
	if err := h.Settled(ctx); err != nil { // before anything is frozen, too
		return nil, err
	}
	_, thaw := l.freeze(ctx, []*api.Volume{v}, []*api.Snapshot{s})
	err := h.Cut(ctx, stack.Snapshot{UID: string(uidOf(s)), Name: s.Name, Created: momentNow()})
	thaw()
	l.wasCut(ctx, v, h.local, lin)
	if err != nil {
		return nil, err
	}
	if lin, err = h.family(ctx); err != nil {
		return nil, err
	}
	k := lin.all[string(uidOf(s))]
	if k == nil {
		return nil, api.Errorf(api.Corrupt, "it was cut and is not in the stack")
	}
	if s.Spec.Labels[api.LabelClone] == "" {
		l.events.Eventf(v, s, "Normal", "SnapshotCreated", "Snapshot", "snapshot %s", s.Name)
	}
	if open := l.session(v.Name); open != nil {
		open.mates.compareSoon(k, lin)
	}
	return k, nil
}

// momentNow is the instant of a cut, as exact as the clock: it tells one try from the next.
func momentNow() time.Time { return time.Now().UTC() }

// wasCut has those looked at that a cut may have changed; lin is of before.
func (d *Data) wasCut(ctx context.Context, v *api.Volume, local api.UID, lin *lineage) {
	var names []string
	for _, k := range lin.all {
		if k.children[api.VolumeHead] {
			names = append(names, k.Name)
		}
	}
	d.changed(local, names...) // after an error too: it may be there
	d.tidyLocal(ctx, v, local)
}

// tidyLocal has the layers of the member on this node finished and merged.
func (d *Data) tidyLocal(ctx context.Context, v *api.Volume, local api.UID) {
	if local == "" {
		return
	}
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return // the next look at the disk finds it
	}
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.UID == local {
			if disk, err := d.disks.Get(r.Spec.Disk); err == nil {
				d.mergeSoon(disk, string(local), v.Name)
				d.tidy(disk)
			}
		}
	}
}

// removeMany takes the snapshot out of all members, then the finalizer from the object.
func (l *snapshotLoop) removeMany(ctx context.Context, s *api.Snapshot, v *api.Volume) (err error) {
	if len(s.Finalizers) == 0 {
		return nil
	}
	s.Status.MarkRemoved, s.Status.ReadyToUse = true, false
	if err := l.beingCloned(ctx, s); err != nil {
		return err
	}
	h, err := l.hand(ctx, v)
	if err != nil {
		return err
	}
	defer func() {
		if herr := h.end(); err == nil && herr != nil {
			l.Log.Warn("the end of an engine without a device", "volume", v.Name, "err", herr)
		}
	}()
	lin, err := h.family(ctx)
	if err != nil {
		return err
	}
	if err := h.DropSnapshot(ctx, string(uidOf(s))); err != nil {
		return err
	}
	if k := lin.all[string(uidOf(s))]; k != nil {
		l.Log.Info("snapshot removed", "snapshot", s.Name, "volume", s.Spec.Volume)
		if k.children[api.VolumeHead] && v.DeletionTimestamp == nil {
			// Its layer is the newest, and merges with a layer alone: what is above it is cut off the head.
			if err := h.SealAll(ctx); err != nil {
				l.Log.Info("the space of the newest snapshot comes back with the next one", "volume", v.Name, "why", err)
			}
		}
		l.changed(h.local, k.neighbours()...)
		l.tidyLocal(ctx, v, h.local)
	}
	return l.letObjectGo(ctx, s)
}
