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

// A lost node cannot end its devices, so the planner releases an attachment that a user deleted, by force or after a
// wait. The release is safe, because an attach elsewhere takes a new epoch, which every member adopts before it
// serves: an engine that still runs on the lost node can neither write nor drop members, and the node removes the
// device as soon as it reaches the API. Reads there may return old data until then.

// releaseAfter is how long a silent node, whose data process may live, has to answer a detach without force.
const releaseAfter = time.Minute

// releaseAttachment ends the deleted attachment of a silent node. later is how long the planner still waits.
func (p *volumeReconciler) releaseAttachment(ctx context.Context, v *api.Volume, a *api.Attachment) (gone bool,
	later time.Duration,
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
	p.events.Eventf(v, nil, "Warning", "NodeLost", "Detach", "node %s gives no sign of life: the volume is detached "+
		"without the node's answer, and other nodes can attach it; replicas refuse an engine that still runs on the "+
		"node", a.Spec.Node)
	p.log.Warn("volume detached from a lost node", "volume", v.Name, "node", a.Spec.Node)
	return true, 0, nil
}

// requeueAfter reconciles a volume again after a delay.
func (p *volumeReconciler) requeueAfter(volume string, later time.Duration) {
	p.mu.Lock()
	q := p.queue
	p.mu.Unlock()
	if q != nil && later > 0 {
		q.AddAfter(watch.Request(volume), later)
	}
}

// attachedTo lists the volumes with an attachment to a node.
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
