package replicas

import (
	"path/filepath"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestFirstMembersOnce: other writes to a clone's object hit the record of the first members. The replica on the
// other node, still empty, is not recorded as a first member.
func TestFirstMembersOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.three()
	src := volume("src", 32<<20)
	src.Spec.Nodes = []string{"a"}
	w.create(src)
	w.volumeState("src", api.VolumeDetached)
	w.attachTo("a", "src")
	w.fill("src", "golden", 8<<20)
	w.snapshot("src", "then")
	w.detachFrom("src")

	w.stopRoles()
	var refused atomic.Int32
	w.refuse = func(o client.Object) error {
		if v, is := o.(*api.Volume); !is || v.Name != "clone" || len(v.Status.Members) == 0 || refused.Add(1) > 3 {
			return nil
		}
		return apierrors.NewConflict(schema.GroupResource{Resource: "volumes"}, o.GetName(), nil)
	}
	w.roles([]string{filepath.Join(w.dir, "disk")})

	clone := volume("clone", 32<<20)
	clone.Spec.DataSource, clone.Spec.Nodes = "snap://src/then", []string{"b"}
	w.create(clone)
	v := w.volumeIs("clone", "made", func(v *api.Volume) bool { return len(v.Status.Members) > 0 })
	if refused.Load() < 3 {
		t.Fatalf("%d writes were refused", refused.Load())
	}
	if len(v.Status.Members) != 1 {
		t.Errorf("its first members are %v", v.Status.Members)
	}
	w.attachTo("b", "clone")
	w.reads("clone", 8<<20, "golden")
	w.volumeIs("clone", "on the other node alone", func(v *api.Volume) bool {
		var r api.Replica
		return len(v.Status.Members) == 1 && v.Status.Robustness == api.RobustHealthy &&
			w.c.Get(w.ctx, clientKey(v.Status.Members[0]), &r) == nil && r.Spec.Node == "b"
	})
	w.sh("blockdev --flushbufs " + w.device("clone"))
	w.reads("clone", 8<<20, "golden")
	w.detachFrom("clone")
}
