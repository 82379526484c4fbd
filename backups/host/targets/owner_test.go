package targets

import (
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"drover.io/drover/api"
)

// TestOwnerIsOneLivingNode: the owner is a node with a recent heartbeat, the same for every order of the nodes; silent
// and deleted nodes own nothing.
func TestOwnerIsOneLivingNode(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	node := func(name string, age time.Duration) api.Node {
		return api.Node{ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: api.NodeStatus{Heartbeat: metav1.NewTime(now.Add(-age))}}
	}
	slow := node("slow", 100*time.Second)
	slow.Status.HeartbeatSeconds = 30
	deleted := node("deleted", 0)
	deleted.DeletionTimestamp = &metav1.Time{Time: now}
	for name, c := range map[string]struct {
		nodes []api.Node
		want  string
	}{
		"none":          {nil, ""},
		"alone":         {[]api.Node{node("a", time.Second)}, "a"},
		"silent":        {[]api.Node{node("a", 40*time.Second)}, ""},
		"never seen":    {[]api.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}}, ""},
		"slow clock":    {[]api.Node{node("a", -time.Hour)}, "a"},
		"slow pulse":    {[]api.Node{slow}, "slow"},
		"deleted":       {[]api.Node{deleted}, ""},
		"one is silent": {[]api.Node{node("a", time.Hour), node("b", 0)}, "b"},
	} {
		if got := ownerOf("uid", c.nodes, now); got != c.want {
			t.Errorf("%s: owner %q, want %q", name, got, c.want)
		}
	}
	nodes := []api.Node{node("a", 0), node("b", 0), node("c", 0), node("d", 0)}
	counts, moved := map[string]int{}, 0
	for i := range 400 {
		uid := types.UID(fmt.Sprint(i))
		owner := ownerOf(uid, nodes, now)
		counts[owner]++
		slices.Reverse(nodes)
		if again := ownerOf(uid, nodes, now); again != owner {
			t.Fatalf("target %s: owner %s or %s by the order of the nodes", uid, owner, again)
		}
		without := slices.DeleteFunc(slices.Clone(nodes), func(n api.Node) bool { return n.Name == "d" })
		if ownerOf(uid, without, now) != owner {
			moved++
		}
	}
	if moved != counts["d"] {
		t.Errorf("%d targets moved with node d, which owned %d", moved, counts["d"])
	}
	for name, n := range counts {
		if n < 60 || n > 140 {
			t.Errorf("node %s owns %d of 400 targets", name, n)
		}
	}
}
