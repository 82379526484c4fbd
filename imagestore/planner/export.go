package planner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
)

// An export names the layers of a snapshot on the disk of a replica, without a copy of data; volume and snapshot can be
// deleted afterwards. The first copy is on the same disk; other copies are made from the first copy. For a volume
// without a given snapshot, the export takes a snapshot of its own, and deletes the snapshot once the image is ready.

// exportSnapshot names the snapshot that an export takes for itself.
func exportSnapshot(img *api.BackingImage) string { return "export-" + string(img.Status.UUID) }

// imageOfSnapshot requests the image that took a snapshot for itself.
func imageOfSnapshot(_ context.Context, o client.Object) []reconcile.Request {
	s := o.(*api.Snapshot)
	if name, ok := s.Spec.Labels[api.LabelExport]; ok {
		return imageRequests(name)
	}
	return nil
}

// beginExport finds the snapshot of an export, and then its layers.
func (r *imageReconciler) beginExport(ctx context.Context, img *api.BackingImage) (ctrl.Result, error) {
	s := &img.Status
	before := s.DeepCopy()
	err := r.resolveExport(ctx, img)
	switch kind := api.KindOf(err); {
	case err == nil && len(s.Layers) > 0:
		s.State, s.Message = api.ImagePending, ""
	case err == nil:
		s.State, s.Message = api.ImageStarting, ""
	case kind == api.Other:
		return ctrl.Result{}, err
	case kind == api.Unavailable || kind == api.Busy:
		s.State, s.Message = api.ImagePending, err.Error()
	default:
		s.State, s.Message = api.ImageFailed, err.Error()
	}
	wait := ctrl.Result{RequeueAfter: sourceRetry} // not every awaited change sends an event
	if before.State == s.State && before.Message == s.Message && len(s.Layers) == 0 &&
		(before.Export == nil) == (s.Export == nil) {
		return wait, nil
	}
	return wait, ignoreRace(r.Status().Update(ctx, img)) // the event of the update continues
}

func (r *imageReconciler) resolveExport(ctx context.Context, img *api.BackingImage) error {
	if err := validateImage(img); err != nil {
		return err
	}
	s := &img.Status
	if s.Export == nil {
		fact, err := r.resolveSnapshot(ctx, img)
		if err == nil {
			s.Export = fact
		}
		return err
	}
	c := &api.ImageCopy{}
	err := r.Get(ctx, client.ObjectKey{Name: copyName(s.UUID, s.Export.Disk)}, c)
	if apierrors.IsNotFound(err) {
		c = newCopy(img, placement{node: s.Export.Node, disk: s.Export.Disk})
		if err := r.Create(ctx, c); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	}
	if err != nil {
		return err
	}
	if len(c.Status.Layers) == 0 {
		if c.Status.State == api.ImageFailed {
			return api.Errorf(api.Corrupt, "%s", explainCopy(c))
		}
		return nil
	}
	s.Layers, s.VirtualSize = slices.Clone(c.Status.Layers), c.Status.VirtualSize
	return nil
}

// resolveSnapshot finds the snapshot, or creates a snapshot.
func (r *imageReconciler) resolveSnapshot(ctx context.Context, img *api.BackingImage) (*api.ExportFact, error) {
	of, name := img.Spec.SourceParameters[api.ExportVolume], img.Spec.SourceParameters[api.ExportSnapshot]
	var v api.Volume
	if err := r.Get(ctx, client.ObjectKey{Name: of}, &v); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.NotFound, "volume %s, of which the image is to be made, does not exist", of)
	} else if err != nil {
		return nil, err
	}
	if len(v.Status.Members) == 0 {
		return nil, api.Errorf(api.Unavailable, "volume %s, of which the image is to be made, is not ready yet: it is %s", of,
			v.Status.State)
	}
	own := name == ""
	if own {
		name = exportSnapshot(img)
	}
	var snap api.Snapshot
	err := r.Get(ctx, client.ObjectKey{Name: name}, &snap)
	switch {
	case apierrors.IsNotFound(err) && own && v.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "volume %s, of which the image is to be made, is being deleted", of)
	case apierrors.IsNotFound(err) && own:
		made := api.NewSnapshot(&v, name)
		made.Spec.Labels = map[string]string{api.LabelClone: img.Name, api.LabelExport: img.Name}
		if err := r.Create(ctx, made); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("snapshot %s: %w", name, err)
		}
		return nil, api.Errorf(api.Unavailable, "waits for the snapshot")
	case apierrors.IsNotFound(err) || err == nil && snap.Spec.Volume != of:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s does not exist", name, of)
	case err != nil:
		return nil, err
	case snap.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s is being deleted", name, of)
	case !snap.Status.ReadyToUse || snap.Status.VolumeUID != v.Status.UID:
		return nil, api.Errorf(api.Unavailable, "snapshot %s of volume %s is not ready: %s", name, of, snap.Status.Error)
	}
	var reps api.ReplicaList
	var nodes api.NodeList
	if err := errors.Join(r.List(ctx, &reps), r.List(ctx, &nodes)); err != nil {
		return nil, err
	}
	disks, _ := disksOfNodes(nodes.Items, time.Now())
	rep := selectReplica(&v, reps.Items, &clusterView{disks: disks})
	if rep == nil {
		return nil, api.Errorf(api.Unavailable, "volume %s has no usable replica", of)
	}
	return &api.ExportFact{Volume: of, VolumeUID: v.Status.UID, Snapshot: name, SnapshotUID: snap.Status.UID,
		Replica: rep.Spec.UID, Node: rep.Spec.Node, Disk: rep.Spec.Disk, CreationTime: snap.Status.CreationTime}, nil
}

// selectReplica selects the member of the volume whose layers become the image, on a disk that answers if possible.
func selectReplica(v *api.Volume, reps []api.Replica, look *clusterView) *api.Replica {
	var best *api.Replica
	for i := range reps {
		rep := &reps[i]
		if rep.Spec.VolumeUID != v.Status.UID || rep.Status.Mode != api.ReplicaCurrent ||
			!slices.Contains(v.Status.Members, rep.Name) {
			continue
		}
		if best == nil || look.isAlive(rep.Spec.Disk) && !look.isAlive(best.Spec.Disk) {
			best = rep
		}
	}
	return best
}

// releaseSnapshot deletes the snapshot that an export took for itself.
func (r *imageReconciler) releaseSnapshot(ctx context.Context, img *api.BackingImage) error {
	if img.Spec.SourceType != api.SourceExport || img.Status.UUID == "" {
		return nil
	}
	var snap api.Snapshot
	err := r.Get(ctx, client.ObjectKey{Name: exportSnapshot(img)}, &snap)
	if err != nil || snap.DeletionTimestamp != nil {
		return client.IgnoreNotFound(err)
	}
	return client.IgnoreNotFound(r.Delete(ctx, &snap))
}

// passOnLayers adds the layers to copies that were created before the layers were known.
func (r *imageReconciler) passOnLayers(ctx context.Context, img *api.BackingImage, v *clusterView) error {
	if img.Spec.SourceType != api.SourceExport || len(img.Status.Layers) == 0 {
		return nil
	}
	for i := range v.copies {
		c := &v.copies[i]
		if c.Spec.UUID != img.Status.UUID || len(c.Spec.Layers) > 0 {
			continue
		}
		base := c.DeepCopy()
		c.Spec.Layers = slices.Clone(img.Status.Layers)
		if err := r.Patch(ctx, c, client.MergeFrom(base)); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	return nil
}
