package planner

import (
	"context"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// lateClient reads from the cache of the planner, except for objects that late answers for.
func (w *world) lateClient(late func(key client.ObjectKey, o client.Object) (answered bool, err error)) client.Client {
	return interceptor.NewClient(w.Client, interceptor.Funcs{
		Get: func(ctx context.Context, _ client.WithWatch, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
			if answered, err := late(key, o); answered {
				return err
			}
			return w.cached.Get(ctx, key, o)
		},
		List: func(ctx context.Context, _ client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*api.BackupList); ok {
				if answered, err := late(client.ObjectKey{}, nil); answered {
					return err
				}
			}
			return w.cached.List(ctx, list, options...)
		}})
}

// TestErrorNeedsALookWithoutTheCache: a backup of a volume that the cache does not know yet is made.
func TestErrorNeedsALookWithoutTheCache(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	v := w.addVolume("v", "n1")
	w.addSnapshot(v, "s")
	w.addBackup("b", "v", "s")
	w.awaitState("b", api.BackupPending, "backup target t does not exist")
	late := w.lateClient(func(key client.ObjectKey, o client.Object) (bool, error) {
		_, isVolume := o.(*api.Volume)
		return isVolume, apierrors.NewNotFound(schema.GroupResource{Resource: "volumes"}, key.Name)
	})
	w.reconcile(&backupReconciler{Client: late, live: w.Client, events: events.NewFakeRecorder(1), log: w.Log,
		began: time.Now()}, "b")
	w.awaitState("b", api.BackupPending, "backup target t does not exist")
}

// TestCompletedBackupKeepsItsSource: a planner that does not know yet that a node completed the backup takes nothing
// from the node.
func TestCompletedBackupKeepsItsSource(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	v := w.addVolume("v", "n1")
	w.addSnapshot(v, "s")
	b := w.begin("b", v, "s", "n1")
	before := b.DeepCopy()
	w.complete(b)
	late := w.lateClient(func(_ client.ObjectKey, o client.Object) (bool, error) {
		is, ok := o.(*api.Backup)
		if ok {
			before.DeepCopyInto(is)
		}
		return ok, nil
	})
	w.editNode("n1", func(n *api.NodeStatus) { n.Disks[0].Ready = false })
	n := &api.Node{ObjectMeta: apitest.Named("n1")}
	apitest.Await(w.Server, n, &api.NodeList{}, "unready in the cache of the planner", func(*api.Node) bool {
		var seen api.Node
		return w.cached.Get(w.Ctx, client.ObjectKeyFromObject(n), &seen) == nil && !seen.Status.Disks[0].Ready
	})
	w.reconcile(&backupReconciler{Client: late, live: w.Client, log: w.Log, began: time.Now()}, "b")
	var now api.Backup
	if err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(b), &now); err != nil || now.Spec.Source == nil ||
		now.Status.State != api.BackupCompleted {
		t.Errorf("%v, %+v", err, now)
	}
}

// TestBackupWaitsWhileItsImagesBackupIsDeleted: the backup of the image is deleted between the planner's attempt to
// create another one and the look at the existing one. The backup of the volume waits for the other one.
func TestBackupWaitsWhileItsImagesBackupIsDeleted(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	w.addTarget("t")
	w.addImage("golden", "a", "n2")
	w.addSnapshot(w.addVolumeOf("v", "golden", "n1"), "s")
	w.addBackup("b", "v", "s")
	const message = "waits for BackupBackingImage golden-aaaaaaaa.t"
	w.awaitState("b", api.BackupPending, message)
	late := interceptor.NewClient(w.Client, interceptor.Funcs{
		List: func(ctx context.Context, _ client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if _, ok := list.(*api.BackupBackingImageList); ok { // the cache knows of the deletion
				return nil
			}
			return w.cached.List(ctx, list, options...)
		},
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object,
			_ ...client.GetOption) error {
			if _, ok := o.(*api.BackupBackingImage); ok {
				return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
			}
			return c.Get(ctx, key, o)
		}})
	w.reconcile(&backupReconciler{Client: late, live: late, log: w.Log, began: time.Now().Add(-time.Hour)}, "b")
	if b := w.awaitState("b", api.BackupPending, message); b.Spec.Source != nil {
		t.Errorf("the backup begins without one of its image: %+v", b.Spec)
	}
}

// TestSnapshotOfAnUnknownBackupIsKept: a planner that does not know the backup of a snapshot yet keeps the snapshot.
func TestSnapshotOfAnUnknownBackupIsKept(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1")
	w.addTarget("t")
	w.addVolume("v", "n1")
	s := w.awaitSnapshot(w.addBackup("b", "v", ""))
	apitest.Await(w.Server, s, &api.SnapshotList{}, "in the cache of the planner", func(s *api.Snapshot) bool {
		return w.cached.Get(w.Ctx, client.ObjectKeyFromObject(s), &api.Snapshot{}) == nil
	})
	late := w.lateClient(func(_ client.ObjectKey, o client.Object) (bool, error) { return o == nil, nil })
	w.reconcile(&snapshotReconciler{Client: late, live: w.Client, log: w.Log}, "v")
	w.isKept(s, "of an unfinished backup")
}

// reconcile runs a reconciler once.
func (w *world) reconcile(r reconcile.Reconciler, name string) {
	w.T.Helper()
	request := reconcile.Request{NamespacedName: client.ObjectKey{Name: name}}
	if _, err := r.Reconcile(w.Ctx, request); err != nil {
		w.T.Fatal(err)
	}
}
