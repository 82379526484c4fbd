package protocol

import (
	"iter"
	"strings"
	"testing"

	"drover.io/drover/block/suite"
)

// searchCut explores a world of the cut.
func searchCut(l cutLimits, r cutRules) (visited int, story []string, bad string) {
	return explore(startCut(l), func(s cutState) iter.Seq[step[cutState]] { return cutSuccessors(s, l, r) }, 3_000_000)
}

var cutWorlds = map[string]cutLimits{
	"kill":   {replicas: 2, writes: 2, tries: 2, epochs: 3, kills: 2},
	"host":   {replicas: 2, writes: 2, tries: 2, epochs: 4, hosts: 1, stops: 1},
	"return": {replicas: 2, writes: 2, tries: 2, epochs: 4, kills: 1, stops: 1},
	"delete": {replicas: 2, writes: 2, tries: 1, epochs: 3, kills: 1, hosts: 1, deletes: true},
	"three":  {replicas: 3, writes: 1, tries: 1, epochs: 3, kills: 1, stops: 1},
	"again":  {replicas: 2, writes: 2, tries: 2, epochs: 5, hosts: 2, stops: 1},
}

func TestCutHolds(t *testing.T) {
	suite.Slow(t)
	for name, l := range cutWorlds {
		t.Run(name, func(t *testing.T) {
			if name == "again" { // 1.5 million states
				suite.Long(t)
			}
			n, story, bad := searchCut(l, allCutRules())
			if bad != "" {
				t.Fatalf("%s after %d states:\n  %s", bad, n, strings.Join(story, "\n  "))
			}
			t.Logf("%d states, every one keeps the invariants", n)
		})
	}
}

// TestEveryRuleOfTheCutIsNeeded: the model without a single rule of the cut has a story that breaks an invariant.
func TestEveryRuleOfTheCutIsNeeded(t *testing.T) {
	for name, c := range map[string]struct {
		without func(*cutRules)
		world   string
	}{
		"drain":       {func(r *cutRules) { r.drain = false }, "kill"},
		"all answer":  {func(r *cutRules) { r.allAnswer = false }, "kill"},
		"confirm":     {func(r *cutRules) { r.confirm = false }, "kill"},
		"rollback":    {func(r *cutRules) { r.rollback = false }, "kill"},
		"fence":       {func(r *cutRules) { r.fence = false }, "kill"},
		"identity":    {func(r *cutRules) { r.identity = false }, "again"},
		"abort":       {func(r *cutRules) { r.abort = false }, "kill"},
		"level first": {func(r *cutRules) { r.levelFirst = false }, "kill"},
		"layers":      {func(r *cutRules) { r.layers = false }, "return"},
	} {
		t.Run(name, func(t *testing.T) {
			r := allCutRules()
			c.without(&r)
			n, story, bad := searchCut(cutWorlds[c.world], r)
			if len(story) == 0 {
				t.Fatalf("%d states and nothing found (%s): the rule is not needed, or the model does not see why", n, bad)
			}
			t.Logf("%s after %d states:\n  %s", bad, n, strings.Join(story, "\n  "))
		})
	}
}
