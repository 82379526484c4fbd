package planner

import (
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// stands makes a volume with three whole replicas on the nodes a, b and c.
func stands() replicaSet {
	v := apitest.Volume("v", 10*gib)
	v.Spec.NumberOfReplicas, v.Spec.StaleReplicaTimeout, v.Spec.DataLocality = 3, 60, "disabled"
	s := replicaSet{v: v, away: func(string) time.Duration { return 0 }, leaving: func(*api.Replica) bool { return false },
		wait: 10 * time.Minute}
	for _, n := range []string{"a", "b", "c"} {
		s.add(n, true)
	}
	return s
}

func (s *replicaSet) add(node string, member bool) {
	r := api.Replica{Spec: api.ReplicaSpec{Node: node, Disk: api.UID("disk-" + node)}}
	r.Name, r.Status.Mode = "v."+node, api.ReplicaCurrent
	if member {
		s.v.Status.Members = append(s.v.Status.Members, r.Name)
	} else {
		r.Status.Mode = api.ReplicaStale
	}
	s.mine = append(s.mine, r)
}

func (s *replicaSet) lose(node string) {
	s.v.Status.Members = slices.DeleteFunc(s.v.Status.Members, func(m string) bool { return m == "v."+node })
	for i := range s.mine {
		if s.mine[i].Spec.Node == node {
			s.mine[i].Status.Mode = api.ReplicaStale
		}
	}
}

func TestDecide(t *testing.T) {
	silent := func(s *replicaSet, node string, d time.Duration) {
		s.away = func(n string) time.Duration {
			if n == node {
				return d
			}
			return 0
		}
	}
	gone := metav1.Now()
	evict := func(s *replicaSet, node string) { s.leaving = func(r *api.Replica) bool { return r.Spec.Node == node } }
	dead := func(s *replicaSet, node string) { s.lost = func(r *api.Replica) bool { return r.Spec.Node == node } }
	for name, c := range map[string]struct {
		change func(*replicaSet)
		add    int
		prefer string
		drop   []string
		later  bool
	}{
		"all is well": {func(*replicaSet) {}, 0, "", nil, false},
		"one more":    {func(s *replicaSet) { s.v.Spec.NumberOfReplicas = 4 }, 1, "", nil, false},
		"fewer, the youngest goes": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 2
			s.mine[1].CreationTimestamp = metav1.Now()
		}, 0, "", []string{"v.b"}, false},
		"fewer, the crowded goes": {func(s *replicaSet) {
			s.add("a", true)
			s.mine[3].Name, s.mine[3].Spec.Disk = "v.a2", "other"
			s.mine[3].CreationTimestamp = metav1.Now()
			s.v.Status.Members[3] = "v.a2"
		}, 0, "", []string{"v.a2"}, false},
		"never the last": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 1
			s.mine, s.v.Status.Members = s.mine[:1], s.v.Status.Members[:1]
		}, 0, "", nil, false},
		"a node away for a moment":              {func(s *replicaSet) { s.lose("c"); silent(s, "c", time.Minute) }, 0, "", nil, true},
		"a node away for long":                  {func(s *replicaSet) { s.lose("c"); silent(s, "c", 11*time.Minute) }, 1, "", nil, true},
		"a node away for ever":                  {func(s *replicaSet) { s.lose("c"); silent(s, "c", 2*time.Hour) }, 1, "", []string{"v.c"}, false},
		"a member away for ever is not dropped": {func(s *replicaSet) { silent(s, "c", 2*time.Hour) }, 1, "", nil, false},
		"a replica being rebuilt counts":        {func(s *replicaSet) { s.lose("c") }, 0, "", nil, false},
		"a failed one is replaced": {func(s *replicaSet) {
			s.lose("c")
			s.mine[2].Status.Mode = api.ReplicaFailed
		}, 1, "", []string{"v.c"}, false},
		"fewer, the damaged one goes": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 2
			s.mine[0].Status.Damage = []api.LayerDamage{{Length: 4096}}
			s.mine[1].CreationTimestamp = metav1.Now()
		}, 0, "", []string{"v.a"}, false},
		"who repairs the damaged one stays": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 1
			s.mine, s.v.Status.Members = s.mine[:2], s.v.Status.Members[:2]
			s.mine[0].Status.Damage = []api.LayerDamage{{Length: 4096}}
			s.mine[1].Status.Damage = []api.LayerDamage{{Length: 4096}}
		}, 0, "", nil, false},
		"what is away may have what is damaged": {func(s *replicaSet) {
			s.mine, s.v.Status.Members = s.mine[1:], s.v.Status.Members[1:]
			s.mine[0].Status.Damage = []api.LayerDamage{{Length: 4096}}
			s.lose("c")
			silent(s, "c", 2*time.Hour)
		}, 2, "", nil, false},
		"fewer, the one that fetches layers goes": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 2
			s.mine[0].Status.Fetching = "about 90 % of image debian from node d"
			s.mine[1].CreationTimestamp = metav1.Now()
		}, 0, "", []string{"v.a"}, false},
		"one that fetches layers lets no other go": {func(s *replicaSet) {
			evict(s, "c")
			s.add("d", true)
			s.mine[3].Status.Fetching = "about 90 % of image debian from node c"
		}, 0, "", nil, false},
		"a damaged one is replaced": {func(s *replicaSet) {
			s.mine[2].Status.Damage = []api.LayerDamage{{Length: 4096}}
			evict(s, "c") // as the planner evicts a replica beyond repair
			s.add("d", true)
		}, 0, "", []string{"v.c"}, false},
		"a dead disk: none of the others goes for its replica": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 1
			s.mine, s.v.Status.Members = s.mine[:2], s.v.Status.Members[:2]
			s.mine[1].CreationTimestamp = metav1.Now()
			dead(s, "a")
		}, 0, "", []string{"v.a"}, false},
		"a dead disk: the last good one stays": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 1
			s.mine, s.v.Status.Members = s.mine[:2], s.v.Status.Members[:2]
			evict(s, "b")
			dead(s, "a")
		}, 0, "", nil, false},
		"asked to leave, and it goes on": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 2
			s.mine[0].Spec.Leave = true
			s.mine[1].CreationTimestamp = metav1.Now()
		}, 0, "", []string{"v.a"}, false},
		"asked to leave, and the drain was undone": {func(s *replicaSet) { s.mine[0].Spec.Leave = true }, 0, "", nil, false},
		"asked to leave, and needed again": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 2
			s.mine[0].Spec.Leave = true
			s.lose("b")
		}, 0, "", nil, false},
		"a failed member stays":          {func(s *replicaSet) { s.mine[2].Status.Mode = api.ReplicaFailed }, 0, "", nil, false},
		"eviction: first another":        {func(s *replicaSet) { evict(s, "c") }, 1, "", nil, false},
		"eviction: not while it is made": {func(s *replicaSet) { evict(s, "c"); s.add("d", false) }, 0, "", nil, false},
		"eviction: then it goes":         {func(s *replicaSet) { evict(s, "c"); s.add("d", true) }, 0, "", []string{"v.c"}, false},
		"eviction of the only one": {func(s *replicaSet) {
			s.v.Spec.NumberOfReplicas = 1
			s.mine, s.v.Status.Members = s.mine[:1], s.v.Status.Members[:1]
			evict(s, "a")
		}, 1, "", nil, false},
		"a member that was deleted: first another": {func(s *replicaSet) { s.mine[2].DeletionTimestamp = &gone }, 1, "", nil, false},
		"a member that was deleted: then it goes": {func(s *replicaSet) {
			s.mine[2].DeletionTimestamp = &gone
			s.add("d", true)
		}, 0, "", []string{"v.c"}, false},
		"another that was deleted counts no more": {func(s *replicaSet) {
			s.lose("c")
			s.mine[2].DeletionTimestamp = &gone
		}, 1, "", nil, false},
		"no surplus goes while one is missing": {func(s *replicaSet) {
			s.add("d", true)
			s.lose("c")
			s.lose("d")
		}, 0, "", nil, false},
		"near":         {func(s *replicaSet) { s.v.Spec.DataLocality, s.attached = "best-effort", "d" }, 1, "d", nil, false},
		"near already": {func(s *replicaSet) { s.v.Spec.DataLocality, s.attached = "best-effort", "b" }, 0, "", nil, false},
		"near, and another goes": {func(s *replicaSet) {
			s.v.Spec.DataLocality, s.attached = "best-effort", "d"
			s.add("d", true)
			s.mine[3].CreationTimestamp = metav1.Now()
		}, 0, "", []string{"v.a"}, false},
		"one that is made and not needed goes": {func(s *replicaSet) { s.add("d", false) }, 0, "", []string{"v.d"}, false},
		"one that is made near stays": {func(s *replicaSet) {
			s.v.Spec.DataLocality, s.attached = "best-effort", "d"
			s.add("d", false)
		}, 0, "", nil, false},
		"one that is made near, and was let go": {func(s *replicaSet) {
			s.v.Spec.DataLocality, s.attached = "best-effort", "d"
			s.add("d", false)
			s.mine[3].Spec.Leave = true
		}, 0, "", []string{"v.d"}, false},
		"nothing to copy from": {func(s *replicaSet) { s.v.Status.Members = nil }, 0, "", nil, false},
	} {
		s := stands()
		c.change(&s)
		d := decideReplicas(s)
		if d.add != c.add || d.prefer != c.prefer || !slices.Equal(d.drop, c.drop) || (d.later > 0) != c.later {
			t.Errorf("%s: %+v, want add %d prefer %q drop %v later %v", name, d, c.add, c.prefer, c.drop, c.later)
		}
		for i := range s.mine {
			r := &s.mine[i]
			if stays := r.Spec.Leave && !slices.Contains(d.drop, r.Name); stays != slices.Contains(d.stay, r.Name) {
				t.Errorf("%s: %s: the wish that it leaves is to be taken back: %v, %+v", name, r.Name, stays, d)
			}
		}
	}
}
