package planner

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
)

// comesTooLate reports whether the attachment is younger than the deletion of the volume: the node refuses it.
func comesTooLate(v *api.Volume, a *api.Attachment) bool {
	return !a.Status.Ready && a.CreationTimestamp.After(v.DeletionTimestamp.Time)
}

// removeVolume deletes the replicas of a deleted volume, then removes the volume's finalizer.
func (p *volumeReconciler) removeVolume(ctx context.Context, v *api.Volume, mine []api.Replica, attached bool) error {
	p.setWaiting(v.Name, false)
	p.improvableSince(v.Name, false)
	p.endMigration(v.Name)
	v.Status.State = api.VolumeDeleting
	if attached {
		v.Status.Message = "the volume is attached: it is deleted when it is detached"
		return nil
	}
	if err := p.deleteCloneSnapshot(ctx, v); err != nil {
		return err
	}
	snaps, err := p.keptSnapshots(ctx, v)
	if err != nil {
		return err
	}
	if len(mine) > 0 && len(snaps) > 0 {
		v.Status.Message = fmt.Sprintf("the volume is deleted; its data stays for %d snapshots of it (%s), until the "+
			"last of them is deleted", len(snaps), strings.Join(snaps[:min(len(snaps), 5)], ", "))
		setCondition(v, api.ConditionKept, true, "Snapshots", v.Status.Message)
		return nil
	}
	meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionKept)
	v.Status.Message = ""
	if err := p.deleteRestoreImage(ctx, v); err != nil {
		return err
	}
	if err := (&standbyPlanner{p}).deleteStandbyImages(ctx, v,
		func(*api.BackingImage) bool { return false }); err != nil {
		return err
	}
	for i := range mine {
		r := &mine[i]
		if r.DeletionTimestamp != nil {
			if r.Status.Message != "" {
				v.Status.Message = fmt.Sprintf("replica %s: %s", r.Name, r.Status.Message)
			}
			continue
		}
		if err := p.client.Delete(ctx, r); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("replica %s: %w", r.Name, err)
		}
	}
	if len(mine) > 0 {
		return nil
	}
	if controllerutil.RemoveFinalizer(v, api.Finalizer) {
		return client.IgnoreNotFound(p.client.Update(ctx, v))
	}
	return nil
}
