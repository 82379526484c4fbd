package planner

import (
	"context"
	"testing"

	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestDeletedReplicaIsNoFirstMember: the planner records no deleted replica as a first member, also while its cache
// lacks the deletion. The planner tells the node to remove the replica, and places another replica.
func TestDeletedReplicaIsNoFirstMember(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	old := createVolume(s, "v1")
	first := &api.Replica{ObjectMeta: apitest.Named(old.Status.Members[0])}
	apitest.Edit(s, first, func(r *api.Replica) { r.Finalizers = []string{api.Finalizer} })
	v := old.DeepCopy()
	v.Status.Members, v.Status.Epoch = nil, 0
	before := first.DeepCopy()
	if err := s.Client.Delete(s.Ctx, first); err != nil {
		t.Fatal(err)
	}
	behind := true
	cached := interceptor.NewClient(s.Client, interceptor.Funcs{
		List: func(ctx context.Context, w client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			if replicas, is := list.(*api.ReplicaList); is && behind {
				replicas.Items = []api.Replica{*before}
				return nil
			}
			return w.List(ctx, list) // the API has no indexes
		}})
	p := &volumeReconciler{client: cached, reader: s.Client, events: events.NewFakeRecorder(10), log: s.Log,
		assumed: map[string]assumedReplica{}, waiting: map[string]bool{}, silent: map[string]bool{}}

	if err := p.planVolume(s.Ctx, v); err != nil || len(v.Status.Members) > 0 {
		t.Fatalf("with a cache that is behind: members %v, %v", v.Status.Members, err)
	}
	behind = false
	if err := p.planVolume(s.Ctx, v); err != nil || len(v.Status.Members) > 0 {
		t.Fatalf("members %v, %v", v.Status.Members, err)
	}
	var all api.ReplicaList
	if err := s.Client.List(s.Ctx, &all); err != nil {
		t.Fatal(err)
	}
	if len(all.Items) != 2 {
		t.Fatalf("%d replicas", len(all.Items))
	}
	for _, r := range all.Items {
		if deleted := r.DeletionTimestamp != nil; deleted != (r.Name == first.Name) || r.Spec.Leave != deleted {
			t.Errorf("replica %s: deleted %v, leaves %v", r.Name, deleted, r.Spec.Leave)
		}
	}
}

// TestGivenUpReplicaLeaves: the planner gives a replica up, tells the node to remove the replica, and only then
// deletes the replica.
func TestGivenUpReplicaLeaves(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	old := createVolume(s, "v1")
	r := &api.Replica{ObjectMeta: apitest.Named(old.Status.Members[0])}
	apitest.Edit(s, r, func(r *api.Replica) { r.Finalizers = []string{api.Finalizer} })
	apitest.EditStatus(s, r, func(r *api.Replica) { r.Status.Mode = "" })
	v := old.DeepCopy()
	v.Status.Members, v.Status.Epoch = nil, 0
	p := &volumeReconciler{client: interceptor.NewClient(s.Client, interceptor.Funcs{
		List: func(ctx context.Context, w client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			return w.List(ctx, list) // the API has no indexes
		},
		Delete: func(ctx context.Context, w client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			now := &api.Replica{}
			if err := w.Get(ctx, client.ObjectKeyFromObject(o), now); err != nil || !now.Spec.Leave {
				t.Errorf("deleted, and leaves is %v, %v", now.Spec.Leave, err)
			}
			return w.Delete(ctx, o, opts...)
		}}), reader: s.Client, events: events.NewFakeRecorder(10), log: s.Log,
		assumed: map[string]assumedReplica{}, waiting: map[string]bool{}, silent: map[string]bool{"n1": true}}
	if err := p.planVolume(s.Ctx, v); err != nil {
		t.Fatal(err)
	}
	if err := s.Client.Get(s.Ctx, client.ObjectKeyFromObject(r), r); err != nil || r.DeletionTimestamp == nil {
		t.Fatalf("not deleted: %v", err)
	}
}

// TestReplicaThatLeavesIsDeleted: the controller ended between the two writes that give a replica up. The next controller
// deletes the replica.
func TestReplicaThatLeavesIsDeleted(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	v := createVolume(s, "v1")
	r := &api.Replica{ObjectMeta: apitest.Named(v.Status.Members[0])}
	apitest.Edit(s, r, func(r *api.Replica) { r.Finalizers, r.Spec.Leave = []string{api.Finalizer}, true })
	p := &volumeReconciler{client: s.Client, reader: s.Client, events: events.NewFakeRecorder(10), log: s.Log}
	if left, err := p.releaseDeleted(s.Ctx, []api.Replica{*r}); err != nil || len(left) > 0 {
		t.Fatalf("%d replicas can be members, %v", len(left), err)
	}
	if err := s.Client.Get(s.Ctx, client.ObjectKeyFromObject(r), r); err != nil || r.DeletionTimestamp == nil {
		t.Errorf("not deleted: %v", err)
	}
}
