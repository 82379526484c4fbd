package planner

import (
	"context"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestCloneOfWhatTheCacheLacks: a cache that is behind fails no clone. A missing source fails the clone.
func TestCloneOfWhatTheCacheLacks(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	stale := createVolume(s, "stale")
	createVolume(s, "other")
	snap := &api.Snapshot{ObjectMeta: apitest.Named("s1"), Spec: api.SnapshotSpec{Volume: "stale", CreateSnapshot: true}}
	s.Create(snap)
	apitest.EditStatus(s, snap, func(snap *api.Snapshot) {
		snap.Status.ReadyToUse, snap.Status.VolumeUID = true, stale.Status.UID
	})
	var lacks func(client.Object) bool
	behind := interceptor.NewClient(s.Client, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch,
		key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		if lacks(o) {
			return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
		}
		return c.Get(ctx, key, o, opts...)
	}})
	p := &volumeReconciler{client: behind, reader: s.Client, events: events.NewFakeRecorder(10), log: s.Log,
		clones: map[string]map[string]bool{}}
	for what, is := range map[string]func(client.Object) bool{
		"snapshot": func(o client.Object) bool { _, is := o.(*api.Snapshot); return is },
		"volume":   func(o client.Object) bool { _, is := o.(*api.Volume); return is },
	} {
		lacks = is
		for source, want := range map[string]api.CloneState{
			"snap://stale/s1": api.CloneInitiated, "snap://stale/none": api.CloneFailed, "snap://none/s1": api.CloneFailed,
			"snap://other/s1": api.CloneFailed,
		} {
			if what == "volume" && source != "snap://none/s1" {
				want = api.CloneInitiated // without the volume the planner cannot tell yet
			}
			v := apitest.Volume("clone", 16<<20)
			v.Spec.DataSource = source
			_, err := p.findSource(s.Ctx, v)
			if err == nil || v.Status.CloneStatus.State != want {
				t.Errorf("without the %s, %s: %s, %v", what, source, v.Status.CloneStatus.State, err)
			}
		}
	}
}

// TestDetachThatTheCacheLacks: the planner refuses no revert or salvage of a detached volume because a cache is
// behind, and refuses both for an attached volume.
func TestDetachThatTheCacheLacks(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	at := &api.Attachment{ObjectMeta: apitest.Named("stale"), Spec: api.AttachmentSpec{Volume: "stale", Node: "n1"}}
	seen := func(c client.WithWatch) client.WithWatch {
		return interceptor.NewClient(c, interceptor.Funcs{Get: func(ctx context.Context,
			c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if a, is := o.(*api.Attachment); is {
				at.DeepCopyInto(a)
				return nil
			}
			return c.Get(ctx, key, o, opts...)
		}, List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			return c.List(ctx, list) // the API has no indexes, and objects of this volume alone
		}})
	}
	v := createVolume(s, "stale")
	p := &volumeReconciler{client: seen(s.Client), events: events.NewFakeRecorder(10), log: s.Log}
	for what, wish := range map[string]func(*api.VolumeSpec){
		"revert":  func(s *api.VolumeSpec) { s.RevertTo = &api.RevertWish{Snapshot: "s1", ID: "1"} },
		"salvage": func(s *api.VolumeSpec) { s.Salvage = &api.SalvageWish{Replica: v.Status.Members[0], ID: "1"} },
	} {
		for _, refused := range []bool{false, true} {
			v := v.DeepCopy()
			wish(&v.Spec)
			if p.reader = s.Client; refused {
				p.reader = seen(s.Client)
			}
			if err := p.planVolume(s.Ctx, v); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			why := ""
			if r := v.Status.Reverted; r != nil {
				why = r.Message
			}
			if s := v.Status.Salvaged; s != nil {
				why = s.Message
			}
			if refused != strings.Contains(why, "detach it first") || !refused && why != "" {
				t.Errorf("%s, attached %v: %q", what, refused, why)
			}
		}
	}
}
