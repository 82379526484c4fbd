package replicas

import (
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestFirstMemberDeletedBesideItsRecord: a user deletes the replica of a new volume while the controller records the
// replica as the first member. The node keeps the replica until another replica is a member: the volume can be
// attached.
func TestFirstMemberDeletedBesideItsRecord(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stopRoles()
	var once sync.Once
	var deleted string
	removed := make(chan bool, 1)
	w.refuse = func(o client.Object) error {
		v, is := o.(*api.Volume)
		if !is || len(v.Status.Members) == 0 {
			return nil
		}
		once.Do(func() { // the write of the first member is ready to be sent
			deleted = v.Status.Members[0]
			r := &api.Replica{ObjectMeta: named(deleted)}
			if err := w.c.Delete(w.ctx, r); err != nil {
				t.Errorf("replica %s: %v", deleted, err)
			}
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for range tick.C { // the node has decided about the removal
				if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(r), r); apierrors.IsNotFound(err) ||
					w.ctx.Err() != nil || strings.Contains(r.Status.Message, "the removal waits") {
					removed <- apierrors.IsNotFound(err)
					return
				}
			}
		})
		return nil
	}
	w.roles([]string{w.dir + "/disk"})
	w.create(volume("v1", 16*mib), attachment("v1"))
	select {
	case is := <-removed:
		if is {
			t.Fatalf("the node has removed replica %s, which the controller records as the first member", deleted)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("no replica was deleted")
	}
	a := w.attached("v1")
	writeDevice(t, a.Status.Device, 0, pattern(mib))
	v := w.volumeIs("v1", "without the deleted replica", func(v *api.Volume) bool {
		return len(v.Status.Members) == 1 && v.Status.Members[0] != deleted
	})
	gone(w, &api.Replica{ObjectMeta: named(deleted)}, &api.ReplicaList{})
	checkDevice(t, a.Status.Device, 0, pattern(mib))
	t.Logf("replica %s took the place of %s", v.Status.Members[0], deleted)
}
