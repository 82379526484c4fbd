package replicas

import (
	"context"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
)

// TestCloneOfWhatTheCacheLacks: a cache that is behind does not make a clone fail, and what is not there does.
func TestCloneOfWhatTheCacheLacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("stale", 16<<20)
	w.make("other", 16<<20)
	w.snapshot("stale", "s1")
	var lacks func(client.Object) bool
	behind := interceptor.NewClient(w.c, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch,
		key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		if lacks(o) {
			return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
		}
		return c.Get(ctx, key, o, opts...)
	}})
	p := &planner{client: behind, reader: w.c, events: w.mgr.GetEventRecorder("test"), log: w.log,
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
				want = api.CloneInitiated // it is not known before
			}
			v := volume("clone", 16<<20)
			v.Spec.DataSource = source
			_, err := p.origin(w.ctx, v)
			if err == nil || v.Status.CloneStatus.State != want {
				t.Errorf("without the %s, %s: %s, %v", what, source, v.Status.CloneStatus.State, err)
			}
		}
	}
}

// TestRecordThatTheCacheLacks: what a disk keeps of a new volume is there, also where the cache does not have it yet.
func TestRecordThatTheCacheLacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := volume("stale", 16<<20)
	v.Spec.FSType = "xfs"
	w.create(v)
	behind := interceptor.NewClient(w.c, interceptor.Funcs{Get: func(_ context.Context, _ client.WithWatch,
		key client.ObjectKey, _ client.Object, _ ...client.GetOption) error {
		return apierrors.NewNotFound(schema.GroupResource{}, key.Name)
	}})
	d := &Data{client: behind, reader: w.c}
	if object, err := d.record(w.ctx, "stale"); err != nil || !strings.Contains(string(object), `"fsType":"xfs"`) {
		t.Errorf("%s, %v", object, err)
	}
	if object, err := d.record(w.ctx, "none"); err != nil || object != nil {
		t.Errorf("of no volume: %s, %v", object, err)
	}
}

// TestDetachThatTheCacheLacks: a volume that was detached is not refused a revert or a salvage because a cache is behind;
// one that is attached is.
func TestDetachThatTheCacheLacks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := attachment("stale")
	seen := func(c client.WithWatch) client.WithWatch {
		return interceptor.NewClient(c, interceptor.Funcs{Get: func(ctx context.Context,
			c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if a, is := o.(*api.Attachment); is {
				at.DeepCopyInto(a)
				return nil
			}
			return c.Get(ctx, key, o, opts...)
		}, List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			return c.List(ctx, list) // all are of this volume
		}})
	}
	v := w.make("stale", 16<<20)
	p := &planner{client: seen(w.c), events: w.mgr.GetEventRecorder("test"), log: w.log}
	for what, wish := range map[string]func(*api.VolumeSpec){
		"revert":  func(s *api.VolumeSpec) { s.RevertTo = &api.RevertWish{Snapshot: "s1", ID: "1"} },
		"salvage": func(s *api.VolumeSpec) { s.Salvage = &api.SalvageWish{Replica: v.Status.Members[0], ID: "1"} },
	} {
		for _, refused := range []bool{false, true} {
			v := v.DeepCopy()
			wish(&v.Spec)
			if p.reader = w.c; refused {
				p.reader = seen(w.c)
			}
			if err := p.plan(w.ctx, v); err != nil {
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
