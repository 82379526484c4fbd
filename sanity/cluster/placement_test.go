package cluster

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// replicasOf lists the undeleted replicas of a volume, by node.
func replicasOf(t *testing.T, c *Cluster, volume string) map[string]api.Replica {
	t.Helper()
	var list api.ReplicaList
	must(t, c.Objects.List(t.Context(), &list))
	out := map[string]api.Replica{}
	for _, r := range list.Items {
		if r.Spec.Volume == volume && r.DeletionTimestamp == nil {
			out[r.Spec.Node] = r
		}
	}
	return out
}

func awaitVolume(t *testing.T, c *Cluster, name, what string, ok func(*api.Volume) bool) *api.Volume {
	t.Helper()
	v, err := await.Until(soon(t), c.Objects, name, func(v *api.Volume) (bool, error) { return ok(v), nil })
	if err != nil {
		var now api.Volume
		_ = c.Objects.Get(context.Background(), client.ObjectKey{Name: name}, &now)
		t.Fatalf("volume %s is not %s: %v: %+v", name, what, err, now.Status)
	}
	return v
}

// edit changes an object as kubectl edit would: again after a conflict.
func edit[X any, T interface {
	*X
	client.Object
}](t *testing.T, c *Cluster, obj T, change func(T)) {
	t.Helper()
	now, err := await.Edit(t.Context(), c.Objects, obj.GetName(), func(now T) (bool, error) { change(now); return true, nil })
	must(t, err)
	*obj = *now
}

// settled waits until a volume has its replicas on the nodes, and all replicas are members. The object of a replica
// may be deleted after the volume's own last change.
func settled(t *testing.T, c *Cluster, name string, nodes ...string) *api.Volume {
	t.Helper()
	eventually(t, "the replicas of "+name+" are where they belong", func() bool {
		return slices.Equal(nodesOf(t, c, name), nodes)
	})
	return awaitVolume(t, c, name, "settled", func(v *api.Volume) bool {
		return len(v.Status.Members) == len(nodes) && v.Status.Robustness == api.RobustHealthy
	})
}

// eventually polls a state without an event.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(200 * time.Millisecond) // each poll costs the API server of the cluster some requests
	defer tick.Stop()
	for ctx := soon(t); !ok(); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not in time: %s", what)
		}
	}
}

// TestReplicasAreApart: the replicas of a volume are on different nodes and zones, as many as wanted; a smaller count
// deletes replicas of a healthy volume, and another replica takes the place of a lost replica.
func TestReplicasAreApart(t *testing.T) {
	c := start(t, Options{Nodes: 4})
	for i, zone := range []string{"east", "east", "west", "north"} {
		c.command(t, "node", "set", c.Nodes[i].Name, "--zone", zone)
	}
	v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 3}}
	v.Name = "v"
	must(t, c.Objects.Create(t.Context(), v))
	v = awaitVolume(t, c, "v", "whole", func(v *api.Volume) bool {
		return len(v.Status.Members) == 3 && v.Status.Robustness == api.RobustHealthy
	})
	on := replicasOf(t, c, "v")
	if len(on) != 3 || on["node-3"].Name == "" || on["node-4"].Name == "" {
		t.Errorf("the replicas are not in three zones: %v", on)
	}

	// More replicas than zones are a wish by default; more replicas than nodes are impossible.
	five := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 5}}
	five.Name = "five"
	must(t, c.Objects.Create(t.Context(), five))
	awaitVolume(t, c, "five", "made in part, and said to be", func(v *api.Volume) bool {
		return len(v.Status.Members) == 4 && meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionScheduled) &&
			v.Status.Robustness == api.RobustDegraded && strings.Contains(v.Status.Message, "4 of 5 replicas")
	})
	hard := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, NumberOfReplicas: 4, ReplicaZoneSoftAntiAffinity: "disabled"}}
	hard.Name = "hard"
	must(t, c.Objects.Create(t.Context(), hard))
	awaitVolume(t, c, "hard", "made in part, and said why", func(v *api.Volume) bool {
		cond := meta.FindStatusCondition(v.Status.Conditions, api.ConditionScheduled)
		return len(v.Status.Members) == 3 && cond != nil &&
			strings.Contains(cond.Message, "zone east has a replica of the volume already")
	})

	// Fewer, while detached.
	edit(t, c, v, func(v *api.Volume) { v.Spec.NumberOfReplicas = 2 })
	v = awaitVolume(t, c, "v", "smaller", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	if v.Status.Epoch != 2 {
		t.Errorf("the members changed in epoch %d", v.Status.Epoch)
	}
	eventually(t, "the third replica goes", func() bool { return len(replicasOf(t, c, "v")) == 2 })

	// A node is lost: another replica takes the place, on a node without a replica.
	must(t, c.Set(t.Context(), "replica-replenishment-wait-interval", "1"))
	on = replicasOf(t, c, "v")
	for _, m := range c.Nodes {
		if on[m.Name].Name != "" {
			must(t, m.PowerOff())
			break
		}
	}
	var next []string
	eventually(t, "a replica takes the place of the lost one", func() bool {
		next = nil
		for node := range replicasOf(t, c, "v") {
			if on[node].Name == "" {
				next = append(next, node)
			}
		}
		return len(next) == 1
	})
	v = awaitVolume(t, c, "v", "degraded", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustDegraded })
	if slices.Contains(v.Status.Members, replicasOf(t, c, "v")[next[0]].Name) {
		t.Error("a replica that was never made equal is a member")
	}
}
