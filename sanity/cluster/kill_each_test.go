package cluster

import (
	"testing"
	"time"

	"drover.io/drover/block/suite"
)

// TestNoIOFailsWhileEachProcessIsKilled kills processes of every kind in turn under verified load on a volume with
// three replicas: data of the engine's node and of other nodes, the node roles, a controller, the API server, all of
// a node. No I/O fails, and all replicas are members again after each kill. DROVER_ROUNDS is the number of rounds.
func TestNoIOFailsWhileEachProcessIsKilled(t *testing.T) {
	rounds := suite.Count(t, "DROVER_ROUNDS", 1, 10)
	c := startAlone(t, Options{Nodes: 3, Controllers: 1})
	l := newLoaded(t, c, "v", 64<<20, 3)
	l.attach(c.Nodes[0])
	awaitVolume(t, c, "v", "healthy", whole)
	l.works(100)
	type turn struct {
		what  string
		m     *Machine
		roles []string
	}
	var turns []turn
	nodes := c.Nodes
	if !suite.All() {
		nodes = c.Nodes[:2] // the engine's and another member's
	}
	for _, m := range nodes {
		turns = append(turns, turn{"data on " + m.Name, m, []string{"data"}}, turn{"serve on " + m.Name, m, []string{"serve"}},
			turn{"serve and data on " + m.Name, m, []string{"serve", "data"}})
	}
	turns = append(turns, turn{"a controller", c.Others[0], []string{"serve"}},
		turn{"the API server and its controller", c.Control, []string{"serve"}})
	n := 0
	for round := range rounds {
		for _, k := range turns {
			must(t, k.m.Kill(k.roles...))
			switch {
			case k.m == c.Control:
				// Without the API server the engine can drop no member: I/O waits for a slow member.
				if !l.worksWithin(20*time.Second, 5) {
					t.Logf("round %d: I/O waits for the API server", round+1)
				}
			// After a kill of both on the engine's node, only the next serve starts data.
			case len(k.roles) == 1:
				l.works(5)
			}
			if k.roles[0] == "serve" {
				k.m.Gone()
				must(t, k.m.Serve(t.Context()))
			}
			if k.m == c.Control {
				must(t, c.connect())
			}
			l.works(20)
			awaitVolume(t, c, "v", "whole after a kill of "+k.what, whole)
			n++
		}
		t.Logf("round %d: %d kills, %d writes, longest request %v", round+1, n, l.load.Writes(),
			l.load.Worst().Round(time.Millisecond))
	}
	l.halt()
	c.detach(t, "v")
	for _, m := range c.Nodes { // all hold the same
		l.attach(m)
		l.halt()
		c.detach(t, "v")
	}
}
