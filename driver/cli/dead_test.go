package cli_test

import (
	"context"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// TestDisksOfADeadNode: a dead node's last status may call the disks ready. disk remove removes such a disk if the
// heartbeat is too old, or if the user declares the node dead and no heartbeat denies the death. Even then, disk remove
// refuses a disk needed by a volume.
func TestDisksOfADeadNode(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	add := func(o client.Object) {
		t.Helper()
		must(store.Create(t.Context(), o))
		t.Cleanup(func() {
			ctx := context.Background()
			if store.Get(ctx, client.ObjectKeyFromObject(o), o) == nil {
				o.SetFinalizers(nil)
				_, _ = store.Update(ctx, o), store.Delete(ctx, o)
			}
		})
	}
	tell := func(node string, every int32, beat time.Time) {
		t.Helper()
		_, err := await.EditStatus(t.Context(), store, node, func(n *api.Node) (bool, error) {
			n.Status.Heartbeat, n.Status.HeartbeatSeconds = metav1.NewTime(beat), every
			return true, nil
		})
		must(err)
	}
	disks := map[string]api.UID{"/dead": api.NewUID(), "/late": api.NewUID(), "/lives": api.NewUID()}
	node := func(name string, paths ...string) {
		t.Helper()
		n := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		for _, p := range paths {
			n.Spec.Disks = append(n.Spec.Disks, api.DiskSpec{Path: p})
		}
		add(n)
		for _, p := range paths {
			n.Status.Disks = append(n.Status.Disks, api.DiskStatus{Path: p, UID: disks[p], Ready: true})
		}
		must(store.Status().Update(t.Context(), n))
		tell(name, 10, time.Now().Add(time.Hour))
	}
	node("dying", "/dead", "/late")
	node("living", "/lives")
	vol := &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "pair"}, Spec: api.VolumeSpec{Size: 1 << 30}}
	add(vol)
	members := func(names ...string) {
		t.Helper()
		_, err := await.EditStatus(t.Context(), store, "pair", func(v *api.Volume) (bool, error) {
			v.Status.Members = names
			return true, nil
		})
		must(err)
	}
	var was []client.Object
	for name, on := range map[string][2]string{"pair.1": {"dying", "/dead"}, "pair.2": {"living", "/lives"}} {
		r := &api.Replica{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{api.Finalizer},
			Labels: map[string]string{api.LabelDisk: string(disks[on[1]])}},
			Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "pair", Node: on[0], Disk: disks[on[1]]}}
		add(r)
		if on[0] == "dying" {
			was = append(was, r)
		}
	}
	for _, path := range []string{"/dead", "/late"} {
		c := &api.ImageCopy{ObjectMeta: metav1.ObjectMeta{Name: "golden." + path[1:], Finalizers: []string{api.Finalizer},
			Labels: map[string]string{api.LabelDisk: string(disks[path])}},
			Spec: api.ImageCopySpec{Image: "golden", UUID: api.NewUID(), Layers: []api.UID{}, Node: "dying", Disk: disks[path]}}
		add(c)
		was = append(was, c)
	}

	add(&api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: "unique"}, Spec: api.BackingImageSpec{
		SourceType: api.SourceUpload, SourceParameters: map[string]string{"size": "1048576"}}})
	only := &api.ImageCopy{ObjectMeta: metav1.ObjectMeta{Name: "unique.dead", Finalizers: []string{api.Finalizer},
		Labels: map[string]string{api.LabelDisk: string(disks["/dead"])}},
		Spec: api.ImageCopySpec{Image: "unique", UUID: api.NewUID(), Layers: []api.UID{}, Node: "dying",
			Disk: disks["/dead"]}}
	add(only)
	only.Status.State, only.Status.Digest = api.ImageReady, "d"
	must(store.Status().Update(t.Context(), only))
	was = append(was, only)

	remove := kubeconfig("disk", "remove", "/dead")
	members("pair.2")
	drover(t, remove...).mustSay(t, 5, "not empty", "volume pair", "--dead-node")
	// The node is alive: the user is wrong.
	stop := make(chan bool)
	var beats sync.WaitGroup
	beats.Go(func() {
		for at := time.Now(); ; {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
				at = at.Add(time.Second)
				tell("dying", 10, at)
			}
		}
	})
	drover(t, append(remove, "--dead-node")...).mustSay(t, 5, `node "dying" is alive`)
	close(stop)
	beats.Wait()
	// The node is dead, but a volume needs the disk.
	tell("dying", 1, time.Now().Add(time.Hour))
	members("pair.1", "pair.2")
	drover(t, append(remove, "--dead-node")...).mustSay(t, 5, `node "dying" is dead`, "volume pair")
	members("pair.2")
	// Replicas on other disks of the dead node do not count: the disk has the last replica to salvage. The node still
	// counts as alive for half a minute.
	second := &api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "pair.3", Finalizers: []string{api.Finalizer},
		Labels: map[string]string{api.LabelDisk: string(disks["/late"])}},
		Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: "pair", Node: "dying", Disk: disks["/late"]}}
	add(second)
	members("pair.3")
	drover(t, append(remove, "--dead-node")...).mustSay(t, 5, `node "dying" is dead`, "volume pair")
	second.Finalizers = nil
	must(store.Update(t.Context(), second))
	must(store.Delete(t.Context(), second))
	members("pair.2")
	twin := &api.ImageCopy{ObjectMeta: metav1.ObjectMeta{Name: "unique.late", Finalizers: []string{api.Finalizer},
		Labels: map[string]string{api.LabelDisk: string(disks["/late"])}}, Spec: only.Spec}
	twin.Spec.Disk = disks["/late"]
	add(twin)
	twin.Status.State, twin.Status.Digest = api.ImageReady, "d"
	must(store.Status().Update(t.Context(), twin))
	drover(t, append(remove, "--dead-node")...).mustSay(t, 5, "last copy of image unique", "--force")
	twin.Finalizers = nil
	must(store.Update(t.Context(), twin))
	must(store.Delete(t.Context(), twin))
	// Without --force, disk remove does not forget the last copy of an image either.
	drover(t, append(remove, "--dead-node")...).mustSay(t, 5, "last copy of image unique", "--force")
	drover(t, append(remove, "--dead-node", "--force")...).mustSay(t, 0, "removed from node \"dying\"", "golden", "unique")
	// The old heartbeat is proof enough.
	tell("dying", 1, time.Now().Add(-time.Hour))
	drover(t, kubeconfig("disk", "remove", "/late")...).mustSay(t, 0, "removed", "forgets its content: image golden")
	for _, o := range was {
		if err := store.Get(t.Context(), client.ObjectKeyFromObject(o), o); !apierrors.IsNotFound(err) {
			t.Errorf("%s is still there: %v", o.GetName(), err)
		}
	}
	// A disk which is on another node now, with all content, is forgotten on the former node: no volume needs the disk
	// there.
	tell("dying", 10, time.Now().Add(time.Hour))
	_, err := await.Edit(t.Context(), store, "dying", func(n *api.Node) (bool, error) {
		n.Spec.Disks = []api.DiskSpec{{Path: "/former"}}
		return true, nil
	})
	must(err)
	_, err = await.EditStatus(t.Context(), store, "dying", func(n *api.Node) (bool, error) {
		n.Status.Disks = []api.DiskStatus{{Path: "/former", UID: disks["/lives"], Gone: true}}
		return true, nil
	})
	must(err)
	drover(t, kubeconfig("disk", "remove", "/former")...).mustSay(t, 0, "removed")
	forgotten := func() {
		t.Helper()
		var n api.Node
		must(store.Get(t.Context(), client.ObjectKey{Name: "dying"}, &n))
		if len(n.Spec.Disks) > 0 {
			t.Errorf("disks: %+v", n.Spec.Disks)
		}
	}
	forgotten()
	// So is a disk taken over from a dead node which last reported the disk.
	_, err = await.Edit(t.Context(), store, "dying", func(n *api.Node) (bool, error) {
		n.Spec.Disks = []api.DiskSpec{{Path: "/taken"}}
		return true, nil
	})
	must(err)
	_, err = await.EditStatus(t.Context(), store, "dying", func(n *api.Node) (bool, error) {
		n.Status.Disks = []api.DiskStatus{{Path: "/taken", UID: disks["/lives"], Ready: true}}
		return true, nil
	})
	must(err)
	tell("dying", 1, time.Now().Add(-time.Hour))
	tell("living", 10, time.Now().Add(time.Hour))
	drover(t, kubeconfig("disk", "remove", "/taken")...).mustSay(t, 0, "removed")
	forgotten()
	var r api.Replica
	must(store.Get(t.Context(), client.ObjectKey{Name: "pair.2"}, &r))
}
