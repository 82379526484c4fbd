package planner

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// A node that is lost cannot take its devices away. Whoever detaches a volume from it, by force or with patience, gets
// it free from the controller. That is safe, because an attach elsewhere takes a new epoch, which every member adopts
// before it serves: the engine of the lost node, should it live, can neither write any more nor drop anybody, and its
// node takes the device down when it hears of it. Its reads may be old until then.

// releaseAfter is how long a silent node has to answer a detach that is not forced: its data process may live.
const releaseAfter = time.Minute

// releaseAttachment lets the attachment of a silent node go when that is wished. later is how long it has still to wait.
func (p *volumeReconciler) releaseAttachment(ctx context.Context, v *api.Volume, a *api.Attachment) (gone bool, later time.Duration,
	err error) {
	if a.DeletionTimestamp == nil || !p.isSilent(a.Spec.Node) || !controllerutil.ContainsFinalizer(a, api.Finalizer) {
		return false, 0, nil
	}
	if left := releaseAfter - time.Since(a.DeletionTimestamp.Time); left > 0 && a.Annotations[api.AnnotationForce] == "" {
		return false, left, nil
	}
	controllerutil.RemoveFinalizer(a, api.Finalizer)
	if err := p.client.Update(ctx, a); err != nil && !apierrors.IsNotFound(err) {
		return false, 0, err
	}
	p.events.Eventf(v, nil, "Warning", "NodeLost", "Detach", "node %s gives no sign of life: the volume is detached from "+
		"it without its say, and can be attached elsewhere; what still runs there is shut out", a.Spec.Node)
	p.log.Warn("volume detached from a lost node", "volume", v.Name, "node", a.Spec.Node)
	return true, 0, nil
}

// requeueAfter has a volume looked at after a while.
func (p *volumeReconciler) requeueAfter(volume string, later time.Duration) {
	p.mu.Lock()
	q := p.queue
	p.mu.Unlock()
	if q != nil && later > 0 {
		q.AddAfter(watch.Request(volume), later)
	}
}

// attachedTo are the volumes whose attachments name a node.
func (p *volumeReconciler) attachedTo(ctx context.Context, node string) (volumes []string) {
	var list api.AttachmentList
	if err := p.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("attachments cannot be listed", "node", node, "err", err)
		return nil
	}
	for i := range list.Items {
		if list.Items[i].Spec.Node == node {
			volumes = append(volumes, list.Items[i].Spec.Volume)
		}
	}
	return volumes
}
