package cluster

import (
	"math/rand/v2"
	"testing"
)

// TestFaultsAtOnce: the harness repairs two faults of the same process one after the other.
func TestFaultsAtOnce(t *testing.T) {
	c := start(t, Options{Nodes: 1})
	n := c.Nodes[0]
	one, both := "kill serve on "+n.Name, "kill serve and data on "+n.Name
	for _, names := range [][2]string{{one, both}, {both, one}} {
		var now []Fault
		for _, name := range names {
			for _, f := range c.Faults(rand.New(rand.NewPCG(1, 1))) {
				if f.Name == name {
					now = append(now, f)
				}
			}
		}
		for _, f := range now {
			must(t, f.Break(t.Context()))
		}
		for _, f := range now {
			must(t, f.Repair(soon(t)))
		}
	}
	runs(t, n, "serve")
}
