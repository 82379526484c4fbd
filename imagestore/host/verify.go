package host

import (
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/block/semaphore"
	"drover.io/drover/imagestore/importer"
)

// verificationKind is the kind of a transfer that reads a copy on its disk.
const verificationKind = "verification"

// verification is the result of reading a copy.
type verification struct {
	mark string // the change of the files that the result covers; empty: none
	err  error  // nil: the content matches its digests
}

// checkContent reports whether the content of a copy matches its digests: err is nil without a doubt, or after a
// verification without damage; known is false while a verification runs. Doubts are: the files were changed, a copy
// made from this copy was damaged, the user asks for a verification, or the last verification is long ago.
func (n *copyReconciler) checkContent(ctx context.Context, c *api.ImageCopy, on block.Layers, got importer.Result,
	st *api.ImageCopyStatus,
) (known bool, err error) {
	mark, err := importer.Touched(on, got.Image)
	if err != nil {
		return true, err
	}
	n.mu.Lock()
	v, ok := n.verifications[c.Name]
	suspect := n.suspects[c.Name]
	n.mu.Unlock()
	limit := "verify " + on.UID()
	var release func() // of the disk's semaphore, once it is held
	switch asked := c.Spec.Verify != "" && c.Spec.Verify != st.Verified; {
	case ok && v.err != nil && v.mark == mark:
		return true, v.err // until the copy is replaced
	case asked, suspect:
	case mark != "" && (!ok || v.mark != mark):
		n.log.Warn("the files of an image copy have changed: the node verifies the copy", "image", c.Spec.Image,
			"disk", c.Spec.Disk)
	case n.verificationDue(ctx, st):
		if release, _ = n.transfers.limits.TryAcquire(limit, 1); release == nil {
			return true, nil // a busy disk waits for the next reconcile
		}
	default:
		return true, nil
	}
	err = n.transfers.startTransfer(ctx, c, verificationKind,
		func(ctx context.Context, _ *transfer, _ slotFunc) (importer.Result, error) {
			if release == nil {
				var err error
				if release, err = n.transfers.limits.Acquire(ctx, limit, semaphore.Limit(1)); err != nil {
					return importer.Result{}, err
				}
			}
			defer release()
			err := importer.Verify(ctx, on, got.Image)
			if ctx.Err() == nil {
				n.mu.Lock()
				n.verifications[c.Name] = verification{mark, err}
				delete(n.suspects, c.Name)
				n.mu.Unlock()
			}
			return got, err
		})
	if err != nil && release != nil {
		release()
	}
	return false, err
}

// verificationDue reports whether the interval since the last verification is over.
func (n *copyReconciler) verificationDue(ctx context.Context, st *api.ImageCopyStatus) bool {
	hours := watch.SettingNumber(ctx, n.Client, settingVerify, n.log)
	return hours > 0 && time.Since(st.LastVerified.Time) > time.Duration(hours)*time.Hour
}

// suspectCopy asks for the verification of an image's copy on a disk of this node.
func (n *copyReconciler) suspectCopy(ctx context.Context, image, on api.UID) {
	copies, err := n.copiesOfDisk(ctx, on)
	if err != nil {
		n.log.Error("copies of a disk not listed", "disk", on, "error", err)
		return
	}
	for i := range copies {
		if copies[i].Spec.UUID != image {
			continue
		}
		name := copies[i].Name
		n.mu.Lock()
		n.suspects[name] = true
		n.mu.Unlock()
		n.transfers.wakeReconciler(ctx, event.GenericEvent{Object: &api.ImageCopy{ObjectMeta: metav1.ObjectMeta{Name: name}}})
	}
}

// copiesOfDisk lists the copies on a disk of this node.
func (n *copyReconciler) copiesOfDisk(ctx context.Context, disk api.UID) ([]api.ImageCopy, error) {
	var list api.ImageCopyList
	err := n.List(ctx, &list, client.MatchingFields{watch.ByDisk: string(disk)}, client.UnsafeDisableDeepCopy)
	return slices.DeleteFunc(slices.Clone(list.Items), func(c api.ImageCopy) bool { return c.Spec.Node != n.node }), err
}

// wakeCopiesOfDisks wakes the copies on disks of this node that appeared or disappeared.
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
		copies, err := n.copiesOfDisk(ctx, d.UID)
		if err != nil {
			n.log.Error("copies of a disk not listed", "disk", d.UID, "error", err)
			return
		}
		for i := range copies {
			q.Add(watch.Request(copies[i].Name))
		}
	}
}
