package planner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// promisedBytes sums the promised sizes of the replicas on a disk.
func (p *volumeReconciler) promisedBytes(ctx context.Context, disk api.UID) (int64, error) {
	var list api.ReplicaList
	on := client.MatchingFields{watch.ByDisk: string(disk)}
	if err := p.client.List(ctx, &list, on, client.UnsafeDisableDeepCopy); err != nil {
		return 0, err
	}
	var sum int64
	seen := map[string]bool{}
	for i := range list.Items {
		seen[list.Items[i].Name] = true
		sum += list.Items[i].PromisedSize()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, a := range p.assumed {
		if a.replica.Spec.Disk == disk && !seen[name] && time.Now().Before(a.until) {
			sum += a.replica.PromisedSize()
		}
	}
	return sum, nil
}

// createReplicas places the first replicas of a new volume, and records members when the replicas are ready.
func (p *volumeReconciler) createReplicas(ctx context.Context, v *api.Volume, mine []api.Replica) error {
	mine, err := p.releaseDeleted(ctx, mine)
	if err != nil {
		return err
	}
	if len(mine) == 0 {
		from, err := p.findSource(ctx, v)
		if errors.Is(err, errSoon) {
			v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeCreating, api.RobustUnknown, ""
			return nil
		}
		if err != nil {
			return err
		}
		var image *api.BackingImage
		if from == nil { // a source's replica already holds the image
			image, err = p.usableImage(ctx, v)
		}
		switch {
		case err != nil:
		case from != nil:
			mine, err = p.placeClone(ctx, v, from)
		default:
			var r *api.Replica
			if r, err = p.placeOne(ctx, v, image, nil, mine, preferLocal(v)); err == nil {
				mine = append(mine, *r)
			}
		}
		if err != nil {
			if api.Is(err, api.Full) && setCondition(v, api.ConditionScheduled, false, "NoDisk", err.Error()) {
				p.events.Eventf(v, nil, "Warning", "NoDisk", "Schedule", "%s", err)
			}
			return err
		}
		setCondition(v, api.ConditionScheduled, true, "Placed", "every replica has a disk")
		if from == nil { // rebuilds add the other replicas of a clone
			if mine, err = p.placeRest(ctx, v, image, mine); err != nil {
				return err
			}
		}
	}
	var members []string
	size := v.Spec.Size
	for i := range mine {
		r := &mine[i]
		switch r.Status.Mode {
		case api.ReplicaCurrent:
			members = append(members, r.Name)
			size = min(size, r.Status.Size)
		case api.ReplicaFailed:
			err := p.handleFailedReplica(ctx, v, r)
			if errors.Is(err, errSoon) {
				err = nil
			}
			return err
		default:
			if p.isSilent(r.Spec.Node) && len(mine) > 1 {
				continue // the other replicas need not wait
			}
			if gone, err := p.giveUpReplica(ctx, v, r); gone || err != nil {
				return err
			}
			reportCopyProgress(v, mine)
			if r.Status.Pinned {
				if err := p.deleteCloneSnapshot(ctx, v); err != nil {
					return err
				}
			}
			v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeCreating, api.RobustUnknown, r.Status.Message
			return nil
		}
	}
	if len(members) == 0 {
		v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeCreating, api.RobustUnknown,
			"the nodes of its replicas give no sign of life"
		return nil
	}
	if ok, err := p.mayJoin(ctx, members); !ok || err != nil {
		v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeCreating, api.RobustUnknown, ""
		p.requeueAfter(v.Name, time.Second)
		return err
	}
	v.Status.Members, v.Status.Epoch, v.Status.Size = members, 1, size
	v.Status.Message = ""
	if c := v.Status.CloneStatus; c != nil {
		c.State, c.Message, c.Progress = api.CloneCompleted, "", 100
	}
	return nil
}

// releaseDeleted returns the replicas that are not deleted, and lets the nodes remove the other replicas. While a
// volume has no members, a node cannot tell whether the planner is about to record a deleted replica as a member: it
// removes the replica only after the planner has set Leave, and the planner never records a replica with Leave.
func (p *volumeReconciler) releaseDeleted(ctx context.Context, mine []api.Replica) ([]api.Replica, error) {
	var left []api.Replica
	for i := range mine {
		r := &mine[i]
		if r.DeletionTimestamp == nil && !r.Spec.Leave {
			left = append(left, *r)
			continue
		}
		if err := p.setLeave(ctx, r); err != nil {
			return nil, err
		}
		if r.DeletionTimestamp == nil { // giveUpReplica ended before the deletion
			if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
				return nil, fmt.Errorf("replica %s: %w", r.Name, err)
			}
		}
	}
	return left, nil
}

// mayJoin reports whether the planner may record replicas as the first members. The cache may lack a deletion: mayJoin
// asks the API.
func (p *volumeReconciler) mayJoin(ctx context.Context, names []string) (bool, error) {
	for _, name := range names {
		var r api.Replica
		err := p.reader.Get(ctx, types.NamespacedName{Name: name}, &r)
		if err != nil || r.DeletionTimestamp != nil || r.Spec.Leave {
			return false, client.IgnoreNotFound(err)
		}
	}
	return true, nil
}

// giveUpReplica deletes a first replica whose node fell silent before the replica was ready, so that another node
// gets a replica. A clone's replica stays while only silent nodes have the source.
func (p *volumeReconciler) giveUpReplica(ctx context.Context, v *api.Volume, r *api.Replica) (bool, error) {
	if !p.isSilent(r.Spec.Node) {
		return false, nil
	}
	if r.Spec.From != nil {
		var src api.Volume
		if err := p.client.Get(ctx, types.NamespacedName{Name: r.Spec.From.Volume}, &src); err != nil {
			return false, client.IgnoreNotFound(err)
		}
		list, err := p.usableReplicas(ctx, &src)
		if err != nil || !slices.ContainsFunc(list, func(o api.Replica) bool { return !p.isSilent(o.Spec.Node) }) {
			return false, err
		}
	}
	if err := p.setLeave(ctx, r); err != nil {
		return false, err
	}
	if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("replica %s: %w", r.Name, err)
	}
	v.Status.State, v.Status.Robustness, v.Status.Message = api.VolumeCreating, api.RobustUnknown, ""
	p.events.Eventf(v, r, "Normal", "ReplicaGivenUp", "Schedule", "node %s fell silent before it had made replica %s: "+
		"another one is made elsewhere", r.Spec.Node, r.Name)
	return true, nil
}

// usableImage returns the backing image of a volume, nil without an image, or an error that says why the volume
// waits.
func (p *volumeReconciler) usableImage(ctx context.Context, v *api.Volume) (*api.BackingImage, error) {
	name := v.Spec.BackingImage
	var img api.BackingImage
	if v.UsesHiddenImage() {
		if alone, err := p.restoreImage(ctx, v, &img); alone || err != nil {
			return nil, err
		}
		name = fmt.Sprintf("%s of %s", img.Name, contentOf(v))
	} else if name == "" {
		return nil, nil
	} else if err := p.client.Get(ctx, types.NamespacedName{Name: name}, &img); apierrors.IsNotFound(err) {
		err := api.Errorf(api.NotFound, "backing image %s does not exist: import it, the volume waits", name)
		setCondition(v, api.ConditionImage, false, "NotFound", err.Error())
		return nil, err
	} else if err != nil {
		return nil, err
	}
	switch {
	case !v.UsesHiddenImage() && !api.HoldsImage(v, &img): // else the deletion waits for this volume
		err := api.Errorf(api.OutOfRange, "backing image %s was being deleted when the volume was made: delete the volume, "+
			"or import the image again once it is gone", name)
		setCondition(v, api.ConditionImage, false, "Deleting", err.Error())
		return nil, err
	case img.Status.UUID == "" || len(img.Status.Layers) == 0:
		err := api.Errorf(api.Unavailable, "backing image %s is being prepared", name)
		setCondition(v, api.ConditionImage, false, "Pending", err.Error())
		return nil, err
	case img.Status.VirtualSize > v.Spec.Size && v.Spec.ImportFrom == nil:
		err := api.Errorf(api.OutOfRange, "the volume's %s are less than the %s of backing image %s: expand the volume",
			api.SizeText(v.Spec.Size), api.SizeText(img.Status.VirtualSize), name)
		if setCondition(v, api.ConditionImage, false, "Incompatible", err.Error()) {
			p.events.Eventf(v, &img, "Warning", "BackingImageIncompatible", "Create", "%s", err)
		}
		return nil, err
	case img.Status.State == api.ImageFailed:
		err := api.Errorf(api.Unavailable, "backing image %s failed: %s", name, img.Status.Message)
		setCondition(v, api.ConditionImage, false, "Failed", err.Error())
		return nil, err
	case !img.CanRead():
		// The virtual size is final only in a ready or readable image.
		err := api.Errorf(api.Unavailable, "backing image %s is not ready yet (%s)", name, img.Status.State)
		setCondition(v, api.ConditionImage, false, "NotReady", err.Error())
		return nil, err
	}
	setCondition(v, api.ConditionImage, true, "Ready", "")
	if err := growImported(ctx, p.client, v, &img); err != nil {
		return nil, err
	}
	return &img, nil
}

// placeOne creates a Replica on the best disk.
func (p *volumeReconciler) placeOne(
	ctx context.Context, v *api.Volume, img *api.BackingImage, from *cloneSource, mine []api.Replica,
	shape ...func(*clusterView),
) (*api.Replica, error) {
	t, failed, err := p.viewCluster(ctx, v, baseImage(v, from, mine), mine)
	if err != nil {
		return nil, err
	}
	for _, f := range shape {
		f(&t)
	}
	full := v.Spec.CloneMode == api.CloneFull && !t.transient
	if from != nil {
		if t.near = from.replica.Spec.Node; !full && !from.whole {
			t.only = from.replica.Spec.Disk
		}
	}
	s, err := choosePlacement(v, t)
	if t.only != "" && !t.strict && api.Is(err, api.Full) { // the layers go to another disk
		t.only = ""
		s, err = choosePlacement(v, t)
	}
	if *failed != nil {
		return nil, *failed
	}
	if err != nil {
		return nil, err
	}
	uid := api.NewUID()
	r := &api.Replica{
		ObjectMeta: metav1.ObjectMeta{
			Name: v.Name + "." + string(uid[:8]),
			Labels: map[string]string{
				api.LabelVolume: api.LabelValue(v.Name), api.LabelNode: api.LabelValue(s.node), api.LabelDisk: string(s.disk)},
			Finalizers: []string{api.Finalizer},
		},
		Spec: api.ReplicaSpec{
			UID: uid, Volume: v.Name, VolumeUID: v.Status.UID, Node: s.node, Disk: s.disk, Size: v.Spec.Size,
			Instead: t.instead, Transient: t.transient},
	}
	if backup := v.Labels[api.LabelBackupMount]; backup != "" {
		r.Labels[api.LabelBackupMount] = backup
	}
	if img != nil {
		r.Spec.Layers = img.Status.Layers
		r.Labels[api.LabelImage] = api.LabelValue(img.Name)
	}
	if from != nil {
		r.Spec.From = &api.ReplicaSource{Replica: from.replica.Spec.UID, Volume: from.replica.Spec.Volume, Whole: from.whole}
		if !from.whole {
			r.Spec.From.Snapshot, r.Spec.From.Name = from.snapshot.Status.UID, from.snapshot.Name
		}
		if !from.alone {
			r.Spec.Layers = from.replica.Spec.Layers
		}
		if s.disk != from.replica.Spec.Disk {
			r.Spec.From.Disk = from.replica.Spec.Disk
		}
		if full && !from.whole {
			r.Spec.From.Layer = api.NewUID()
		}
		if from.image != "" {
			r.Labels[api.LabelImage] = api.LabelValue(from.image)
		}
	}
	if err := p.createReplica(ctx, r); err != nil {
		return nil, err
	}
	p.log.Info("replica placed", "volume", v.Name, "replica", r.Name, "node", s.node, "disk", s.path)
	return r, nil
}
