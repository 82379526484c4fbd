package planner

import (
	"context"
	"errors"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestUnknownReplicaHoldsUpNothing: while the API fails to say whether it created a Replica, the reconciler counts
// the Replica and continues. The reconciler creates no Replica of a volume that is being deleted.
func TestUnknownReplicaHoldsUpNothing(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	createVolume(s, "old") // and a node with a disk
	creations := 0
	failing := interceptor.NewClient(s.Client, interceptor.Funcs{
		Create: func(context.Context, client.WithWatch, client.Object, ...client.CreateOption) error {
			creations++
			return apierrors.NewInternalError(errors.New("failed calling webhook"))
		},
		List: func(ctx context.Context, w client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			if _, is := list.(*api.ReplicaList); is {
				return nil
			}
			return w.List(ctx, list)
		}})
	v := apitest.Volume("v", 16<<20)
	v.Spec.NumberOfReplicas = 1
	v.Status.UID = api.NewUID()
	p := &volumeReconciler{client: failing, reader: s.Client, events: events.NewFakeRecorder(10), log: s.Log,
		assumed: map[string]assumedReplica{}}
	if _, err := p.placeOne(s.Ctx, v, nil, nil, nil); err == nil {
		t.Fatal("placed in spite of the error")
	}
	if mine, err := p.replicasOf(s.Ctx, v); err != nil || len(mine) != 1 || creations != 2 {
		t.Errorf("%d replicas after %d requests, %v", len(mine), creations, err)
	}
	now := metav1.Now()
	v.DeletionTimestamp = &now
	if mine, err := p.replicasOf(s.Ctx, v); err != nil || len(mine) != 0 || creations != 2 || len(p.assumed) != 0 {
		t.Errorf("of a deleted volume: %d replicas after %d requests, %d assumed, %v", len(mine), creations, len(p.assumed), err)
	}
}

// TestLostAnswerPlacesNoSecondReplica: the API's answer to the creation of a Replica is lost, after or before the API
// created it, while the cache lacks the Replica: the next reconcile has that Replica and no other. The reconciler
// assumes no Replica after a refusal of the API.
func TestLostAnswerPlacesNoSecondReplica(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	createVolume(s, "old") // and a node with a disk
	for _, c := range []struct {
		name    string
		created bool // at the first request
		err     error
		want    int
	}{
		{"created", true, context.DeadlineExceeded, 1},
		{"lost", false, apierrors.NewTimeoutError("later", 1), 1},
		{"refused", false, apierrors.NewForbidden(schema.GroupResource{}, "r", nil), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := apitest.Volume(c.name, 16<<20)
			v.Spec.NumberOfReplicas = 1
			s.Create(v)
			v.Status.UID = api.NewUID()
			tries := 0
			behind := interceptor.NewClient(s.Client, interceptor.Funcs{
				Create: func(ctx context.Context, w client.WithWatch, o client.Object, opts ...client.CreateOption) error {
					if tries++; tries > 1 {
						return w.Create(ctx, o, opts...)
					}
					if c.created {
						if err := w.Create(ctx, o, opts...); err != nil {
							return err
						}
					}
					return c.err
				},
				List: func(ctx context.Context, w client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
					if _, is := list.(*api.ReplicaList); is {
						return nil // not in the cache yet
					}
					return w.List(ctx, list)
				}})
			p := &volumeReconciler{client: behind, reader: s.Client, events: events.NewFakeRecorder(10), log: s.Log,
				assumed: map[string]assumedReplica{}}
			if _, err := p.placeOne(s.Ctx, v, nil, nil, nil); err == nil {
				t.Fatal("placed in spite of the error")
			}
			for range 2 {
				mine, err := p.replicasOf(s.Ctx, v)
				if err != nil || len(mine) != c.want {
					t.Fatalf("%d replicas, %v", len(mine), err)
				}
			}
			var all api.ReplicaList
			if err := s.Client.List(s.Ctx, &all); err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, r := range all.Items {
				if r.Spec.VolumeUID == v.Status.UID {
					n++
				}
			}
			if n != c.want {
				t.Errorf("the API has %d replicas of the volume", n)
			}
		})
	}
}
