package host

import (
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// verificationKind is the kind of a job that reads a copy which is there.
const verificationKind = "verification"

// verification is what a verification found of a copy.
type verification struct {
	mark string // which touch of its files it is about; empty: none
	err  error  // nil: the content is what it was
}

// checkContent tells whether a copy's content is what it was: err nil where there is no reason to doubt it, or where a
// verification found no harm; known is false while that is being found out. Reasons are: somebody touched its files,
// what was copied from it was damaged, the user asks, or the last verification is long ago.
func (n *copyReconciler) checkContent(ctx context.Context, c *api.ImageCopy, on block.Layers, got importer.Result, st *api.ImageCopyStatus) (
	known bool, err error) {
	mark, err := importer.Touched(on, got.Image)
	if err != nil {
		return true, err
	}
	n.mu.Lock()
	v, ok := n.verifications[c.Name]
	doubt := n.suspects[c.Name]
	n.mu.Unlock()
	lane := "verify " + on.UID()
	held := false
	switch asked := c.Spec.Verify != "" && c.Spec.Verify != st.Verified; {
	case ok && v.err != nil && v.mark == mark:
		return true, v.err // until it is replaced
	case asked, doubt:
	case mark != "" && (!ok || v.mark != mark):
		n.log.Warn("files of a copy were touched: it is verified", "image", c.Spec.Image, "disk", c.Spec.Disk)
	case n.verificationDue(ctx, st) && n.transfers.limits.tryAcquire(lane, 1): // else at the next look, when the disk is not busy with others
		held = true
	default:
		return true, nil
	}
	_, err = n.transfers.start(ctx, c, verificationKind,
		func(ctx context.Context, _ *transfer, _ func(context.Context) error) (importer.Result, error) {
			if !held {
				if err := n.transfers.limits.acquire(ctx, lane, 1); err != nil {
					return importer.Result{}, err
				}
			}
			defer n.transfers.limits.release(lane)
			err := importer.Verify(ctx, on, got.Image)
			if ctx.Err() == nil {
				n.mu.Lock()
				n.verifications[c.Name] = verification{mark, err}
				delete(n.suspects, c.Name)
				n.mu.Unlock()
			}
			return got, err
		})
	if err != nil && held {
		n.transfers.limits.release(lane)
	}
	return false, err
}

// verificationDue reports whether it is time to verify a copy again.
func (n *copyReconciler) verificationDue(ctx context.Context, st *api.ImageCopyStatus) bool {
	hours := watch.SettingNumber(ctx, n.Client, settingVerify, n.log)
	return hours > 0 && time.Since(st.LastVerified.Time) > time.Duration(hours)*time.Hour
}

// suspectCopy asks for the verification of an image's copy on a disk of this node.
func (n *copyReconciler) suspectCopy(ctx context.Context, image, on api.UID) {
	var list api.ImageCopyList
	if err := n.List(ctx, &list, client.MatchingFields{watch.ByDisk: string(on)}, client.UnsafeDisableDeepCopy); err != nil {
		n.log.Error("copies of a disk not listed", "disk", on, "error", err)
		return
	}
	for i := range list.Items {
		c := &list.Items[i]
		if c.Spec.UUID != image {
			continue
		}
		n.mu.Lock()
		n.suspects[c.Name] = true
		n.mu.Unlock()
		n.transfers.wakeReconciler(ctx, event.GenericEvent{Object: &api.ImageCopy{ObjectMeta: metav1.ObjectMeta{Name: c.Name}}})
	}
}

// wakeCopiesOfDisks wakes the copies on disks of this node that came or went.
func (n *copyReconciler) wakeCopiesOfDisks(ctx context.Context, e event.UpdateEvent,
	q workqueue.TypedRateLimitingInterface[reconcile.Request]) {
	was, is := e.ObjectOld.(*api.Node), e.ObjectNew.(*api.Node)
	if is.Name != n.node {
		return
	}
	for _, d := range is.Status.Disks {
		same := slices.ContainsFunc(was.Status.Disks, func(o api.DiskStatus) bool {
			return o.UID == d.UID && o.Ready == d.Ready
		})
		if same || d.UID == "" {
			continue
		}
		var list api.ImageCopyList
		if err := n.List(ctx, &list, client.MatchingFields{watch.ByDisk: string(d.UID)},
			client.UnsafeDisableDeepCopy); err != nil {
			n.log.Error("copies of a disk not listed", "disk", d.UID, "error", err)
			return
		}
		for i := range list.Items {
			if list.Items[i].Spec.Node == n.node {
				q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: list.Items[i].Name}})
			}
		}
	}
}
