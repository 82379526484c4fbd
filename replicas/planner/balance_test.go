package planner

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi/apitest"
)

// sits makes a volume with whole replicas on the disks of a field.
func sits(t clusterView, mode string, disks ...api.UID) (*api.Volume, clusterView, balanceRules) {
	v := apitest.Volume("v", gib)
	v.Spec.NumberOfReplicas = int32(len(disks))
	for i, d := range disks {
		r := api.Replica{Spec: api.ReplicaSpec{Node: string(d[0]), Disk: d}}
		r.Name, r.Status.Mode, r.Status.Used = fmt.Sprint("v.", i), api.ReplicaCurrent, gib
		t.mine = append(t.mine, r)
		v.Status.Members = append(v.Status.Members, r.Name)
	}
	return v, t, balanceRules{mode: mode, limit: 90, use: func(api.UID, int64) int64 { return 50 }}
}

func TestBetter(t *testing.T) {
	soft := topologyRules{softNode: true, softZone: true, softDisk: true}
	for name, c := range map[string]struct {
		mode   string
		disks  []api.UID
		change func(*api.Volume, *clusterView, *balanceRules)
		move   string // name of the replica and the disk, or nothing
	}{
		"two nodes, two replicas":    {balanceBest, []api.UID{"a0", "b0"}, nil, ""},
		"both on one node":           {balanceLeast, []api.UID{"a0", "a1"}, nil, "v.0 b0"},
		"off":                        {balanceDisabled, []api.UID{"a0", "a1"}, nil, ""},
		"least: each node has one":   {balanceLeast, []api.UID{"a0", "a1", "a0", "b0"}, nil, ""},
		"best: two and two":          {balanceBest, []api.UID{"a0", "a1", "a0", "b0"}, nil, "v.0 b1"},
		"best: as even as it can be": {balanceBest, []api.UID{"a0", "a1", "b0"}, nil, ""},
		"the one where it is used":   {balanceBest, []api.UID{"a0", "b0"}, func(_ *api.Volume, f *clusterView, s *balanceRules) { zones(f); s.stay = "a" }, "v.1 c0"},
		"other zone":                 {balanceLeast, []api.UID{"a0", "b0"}, func(_ *api.Volume, f *clusterView, _ *balanceRules) { zones(f) }, "v.0 c0"},
		"other zone, which has no room": {balanceLeast, []api.UID{"a0", "b0"}, func(_ *api.Volume, f *clusterView, _ *balanceRules) {
			zones(f)
			f.nodes[2].Spec.EvictionRequested = true
		}, ""},
		"other zone, which is silent": {balanceLeast, []api.UID{"a0", "b0"}, func(_ *api.Volume, f *clusterView, _ *balanceRules) {
			zones(f)
			f.silent = func(n string) bool { return n == "c" }
		}, ""},
		"where it may be": {balanceBest, []api.UID{"a0", "a1"}, func(v *api.Volume, _ *clusterView, _ *balanceRules) {
			v.Spec.Nodes = []string{"a"}
		}, ""},
		"a disk each": {balanceBest, []api.UID{"a0", "a0"}, func(v *api.Volume, _ *clusterView, _ *balanceRules) {
			v.Spec.Nodes = []string{"a"}
		}, "v.0 a1"},
		"a disk that is nearly full": {balanceBest, []api.UID{"a0", "b0"}, func(_ *api.Volume, _ *clusterView, s *balanceRules) {
			s.use = func(d api.UID, _ int64) int64 {
				return map[api.UID]int64{"a0": 50, "a1": 50, "b0": 95, "b1": 70}[d]
			}
		}, "v.1 b1"},
		"not least": {balanceLeast, []api.UID{"a0", "b0"}, func(_ *api.Volume, _ *clusterView, s *balanceRules) {
			s.use = func(d api.UID, _ int64) int64 { return map[api.UID]int64{"b0": 95}[d] }
		}, ""},
		"the others are, too": {balanceBest, []api.UID{"a0", "b0"}, func(_ *api.Volume, _ *clusterView, s *balanceRules) {
			s.use = func(d api.UID, _ int64) int64 { return map[api.UID]int64{"b0": 95, "b1": 81}[d] }
		}, ""},
	} {
		f := field()
		f.topologyRules = soft
		v, f, s := sits(f, c.mode, c.disks...)
		if c.change != nil {
			c.change(v, &f, &s)
		}
		got := ""
		if m := findMigration(v, f, s); m != nil {
			got = m.from.Name + " " + string(m.to.disk)
		}
		if got != c.move {
			t.Errorf("%s: moves %q, want %q", name, got, c.move)
		}
	}
}

// game is a volume on nodes that fail and return, for random steps of the planner's rules.
type game struct {
	*testing.T
	r     *rand.Rand
	v     *api.Volume
	t     clusterView
	away  map[string]time.Duration
	base  map[api.UID]int64
	att   string
	mode  string
	n     int
	moves int
	log   []string
}

func (g *game) standing() replicaSet {
	return replicaSet{v: g.v, mine: g.t.mine, attached: g.att, zone: g.t.zoneOfNode, wait: 10 * time.Minute,
		away:    func(n string) time.Duration { return g.away[n] },
		leaving: func(r *api.Replica) bool { return isLeaving(g.node(r.Spec.Node), r.Spec.Disk) }}
}

func (g *game) node(name string) *api.Node {
	for i := range g.t.nodes {
		if g.t.nodes[i].Name == name {
			return &g.t.nodes[i]
		}
	}
	return nil
}

func (g *game) addNode() {
	n := api.Node{}
	n.Name = fmt.Sprint("n", len(g.t.nodes))
	if z := g.r.IntN(4); z > 0 {
		n.Labels = map[string]string{api.LabelZone: fmt.Sprint("z", z)}
	}
	for i := range 1 + g.r.IntN(2) {
		uid := api.UID(fmt.Sprint(n.Name, "d", i))
		n.Spec.Disks = append(n.Spec.Disks, api.DiskSpec{Path: "/" + string(uid)})
		n.Status.Disks = append(n.Status.Disks, api.DiskStatus{Path: "/" + string(uid), UID: uid, Ready: true,
			Capacity: 100 * gib})
		g.base[uid] = int64(g.r.IntN(100)) * gib
	}
	g.t.nodes = append(g.t.nodes, n)
}

// fill computes how full the disks are.
func (g *game) fill() {
	for i := range g.t.nodes {
		for k := range g.t.nodes[i].Status.Disks {
			d := &g.t.nodes[i].Status.Disks[k]
			used := g.base[d.UID]
			for _, r := range g.t.mine {
				if r.Spec.Disk == d.UID {
					used += r.Status.Used
				}
			}
			d.Available = max(d.Capacity-used, 0)
		}
	}
}

func (g *game) place(s candidate, instead string) {
	r := api.Replica{Spec: api.ReplicaSpec{Node: s.node, Disk: s.disk, Instead: instead}}
	g.n++
	r.Name, r.Status.Mode, r.Status.Used = fmt.Sprint("v.", g.n), api.ReplicaStale, 5*gib
	g.t.mine = append(g.t.mine, r)
	g.log = append(g.log, fmt.Sprintf("%s on %s instead of %q", r.Name, s.disk, instead))
}

// whole counts the readable members that are to stay.
func (g *game) whole() (n int) {
	s := g.standing()
	for i := range g.t.mine {
		if r := &g.t.mine[i]; slices.Contains(g.v.Status.Members, r.Name) && g.away[r.Spec.Node] == 0 && !s.leaving(r) && !r.Spec.Leave {
			n++
		}
	}
	return n
}

// step plays one reconcile of the planner, and reports whether the planner did something.
func (g *game) step() bool {
	g.fill()
	g.r.Shuffle(len(g.t.mine), func(i, k int) { g.t.mine[i], g.t.mine[k] = g.t.mine[k], g.t.mine[i] })
	s, asked := g.standing(), false
	want, had := int(g.v.Spec.NumberOfReplicas), g.whole()
	d := decideReplicas(s)
	for _, name := range d.stay {
		g.log = append(g.log, "stay "+name)
		i := slices.IndexFunc(g.t.mine, func(r api.Replica) bool { return r.Name == name })
		g.t.mine[i].Spec.Leave = false
		asked = true
	}
	for _, name := range d.drop {
		g.log = append(g.log, "drop "+name)
		if g.att != "" && slices.Contains(g.v.Status.Members, name) { // the engine drops the member later
			i := slices.IndexFunc(g.t.mine, func(r api.Replica) bool { return r.Name == name })
			asked = asked || !g.t.mine[i].Spec.Leave
			g.t.mine[i].Spec.Leave = true
			continue
		}
		asked = true
		g.v.Status.Members = slices.DeleteFunc(g.v.Status.Members, func(m string) bool { return m == name })
		g.t.mine = slices.DeleteFunc(g.t.mine, func(r api.Replica) bool { return r.Name == name })
	}
	if now := g.whole(); now < min(want, had) || len(g.v.Status.Members) == 0 {
		g.Fatalf("%d of %d whole replicas are left: %v", now, had, g.log)
	}
	did := asked
	for range d.add {
		t := g.t
		if t.leaving, t.prefer = d.leaving, d.prefer; d.extra {
			t.on = d.prefer
		}
		if to, err := choosePlacement(g.v, t); err == nil {
			g.place(to, "")
			did = true
		}
	}
	s = g.standing()
	if from, _ := s.migrating(); from != nil {
		if len(g.t.mine) > want+1 && g.whole() >= want {
			n := 0
			for i := range g.t.mine {
				if s.takesPlace(&g.t.mine[i]) {
					n++
				}
			}
			if n > 1 {
				g.Fatalf("%d moves at a time: %v", n, g.log)
			}
		}
		return did
	}
	if did || !s.isHealthy(&d) {
		return did
	}
	use := func(disk api.UID, more int64) int64 {
		for _, n := range g.t.nodes {
			for _, d := range n.Status.Disks {
				if d.UID == disk {
					return percentUsed(d, more)
				}
			}
		}
		return 100
	}
	m := findMigration(g.v, g.t, balanceRules{mode: g.mode, stay: g.att, use: use, limit: 90})
	if m == nil {
		return false
	}
	g.moves++
	g.place(m.to, m.from.Name)
	return true
}

// grow makes members of some of the stale replicas, and lets the engine drop some of the leaving members.
func (g *game) grow(all bool) (did bool) {
	for i := range g.t.mine {
		r := &g.t.mine[i]
		is := slices.Contains(g.v.Status.Members, r.Name)
		if r.Spec.Leave && is && len(g.v.Status.Members) > 1 && (all || g.r.IntN(3) == 0) {
			r.Status.Mode = api.ReplicaFailed
			g.v.Status.Members = slices.DeleteFunc(g.v.Status.Members, func(m string) bool { return m == r.Name })
			did = true
		}
		if !r.Spec.Leave && r.Status.Mode == api.ReplicaStale && g.away[r.Spec.Node] == 0 && (all || g.r.IntN(3) == 0) {
			r.Status.Mode = api.ReplicaCurrent
			g.v.Status.Members = append(g.v.Status.Members, r.Name)
			did = true
		}
	}
	return did
}

// happens changes something outside of the planner's control.
func (g *game) happens() {
	n := &g.t.nodes[g.r.IntN(len(g.t.nodes))]
	switch g.r.IntN(9) {
	case 0:
		g.away[n.Name] = []time.Duration{0, time.Minute, time.Hour}[g.r.IntN(3)]
	case 1:
		if len(g.t.nodes) < 7 {
			g.addNode()
		}
	case 2:
		n.Labels = map[string]string{api.LabelZone: fmt.Sprint("z", 1+g.r.IntN(3))}
	case 3:
		n.Spec.EvictionRequested = !n.Spec.EvictionRequested
	case 4:
		g.base[n.Status.Disks[0].UID] = int64(g.r.IntN(100)) * gib
	case 5:
		g.att = []string{"", n.Name}[g.r.IntN(2)]
	case 6:
		g.v.Spec.NumberOfReplicas = int32(2 + g.r.IntN(3))
	case 7: // a member is lost, and returns later
		for i := range g.t.mine {
			r := &g.t.mine[i]
			if g.away[r.Spec.Node] > 0 && len(g.v.Status.Members) > 1 {
				r.Status.Mode = api.ReplicaStale
				g.v.Status.Members = slices.DeleteFunc(g.v.Status.Members, func(m string) bool { return m == r.Name })
			}
		}
	case 8:
		g.mode = []string{balanceLeast, balanceBest, balanceDisabled}[g.r.IntN(3)]
	}
}

// TestBalanceGames plays random worlds: the planner never removes a whole replica while fewer than the wanted number
// would be left, moves one replica at a time, and in a world without further changes soon ends its moves with nothing
// left to improve.
func TestBalanceGames(t *testing.T) {
	games := suite.Count(t, "DROVER_GAMES", 3000, 30_000)
	total := 0
	for seed := range suite.Seeds(t, games) {
		t.Run("", func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("DROVER_SEED=%d", seed)
				}
			}()
			r := rand.New(rand.NewPCG(seed, 7))
			g := &game{T: t, r: r, v: apitest.Volume("v", 10*gib), away: map[string]time.Duration{}, base: map[api.UID]int64{},
				mode: []string{balanceLeast, balanceBest}[r.IntN(2)]}
			g.v.Status.Size, g.v.Spec.StaleReplicaTimeout = g.v.Spec.Size, 30
			g.v.Spec.NumberOfReplicas = int32(2 + r.IntN(3))
			g.v.Spec.DataLocality = []string{api.LocalityDisabled, api.LocalityBestEffort}[r.IntN(2)]
			g.t = clusterView{overPct: 1000, minFreePc: 5, promised: func(api.UID) int64 { return 0 },
				silent:        func(n string) bool { return g.away[n] > 0 },
				topologyRules: topologyRules{softNode: r.IntN(2) == 0, softZone: r.IntN(2) == 0, softDisk: r.IntN(2) == 0}}
			for range 1 + r.IntN(4) {
				g.addNode()
			}
			g.fill()
			first, err := choosePlacement(g.v, g.t)
			if err != nil {
				return // a world without room
			}
			g.place(first, "")
			g.grow(true)
			for range 60 {
				g.step()
				g.grow(false)
				if r.IntN(3) == 0 {
					g.happens()
				}
			}
			clear(g.away)
			g.moves, g.log = 0, nil
			for n := 0; ; n++ {
				did := g.step()
				if did = g.grow(true) || did; !did {
					break
				}
				if n > 60 {
					t.Fatalf("it does not come to an end: %v", g.log)
				}
			}
			if total += g.moves; g.moves > 12 {
				t.Errorf("%d moves of %d replicas: %v", g.moves, g.v.Spec.NumberOfReplicas, g.log)
			}
		})
	}
	if total == 0 && games > 1 {
		t.Error("nothing ever moved")
	}
	t.Logf("%d moves after all was quiet", total)
}
