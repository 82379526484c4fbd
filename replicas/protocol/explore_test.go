package protocol

import (
	"strings"
	"testing"

	"drover.io/drover/block/suite"
)

// explore visits every reachable state, breadth first, and returns how many there are, and the shortest story that ends
// in a broken invariant, if any.
func explore(l limits, r rules, most int) (visited int, story []string, bad string) {
	type from struct {
		parent int32
		name   string
	}
	first := start(l)
	seen := map[state]struct{}{first: {}}
	queue := []state{first}
	trail := []from{{-1, ""}}
	for i := 0; i < len(queue); i++ {
		for _, n := range successors(queue[i], l, r) {
			if n.bad != "" {
				story = []string{n.name}
				for k := int32(i); trail[k].parent >= 0; k = trail[k].parent {
					story = append([]string{trail[k].name}, story...)
				}
				return len(queue), story, n.bad
			}
			if _, ok := seen[n.to]; ok {
				continue
			}
			if len(queue) >= most {
				return len(queue), nil, "too many states"
			}
			seen[n.to] = struct{}{}
			queue = append(queue, n.to)
			trail = append(trail, from{int32(i), n.name})
		}
	}
	return len(queue), nil, ""
}

// worlds are the bounded scopes that are searched whole.
var worlds = map[string]limits{
	"kill":     {replicas: 2, writes: 2, epochs: 3, kills: 1},
	"power":    {replicas: 2, writes: 2, epochs: 3, powers: 2},
	"hosts":    {replicas: 2, writes: 2, epochs: 3, hosts: 1},
	"restarts": {replicas: 2, writes: 1, epochs: 4, stops: 1, powers: 1},
	"return":   {replicas: 2, writes: 2, epochs: 4, stops: 1},
	"three":    {replicas: 3, writes: 1, epochs: 3, stops: 1},
	"winners":  {replicas: 2, writes: 1, epochs: 3, kills: 1, hosts: 1},
}

func TestProtocolHolds(t *testing.T) {
	suite.Slow(t)
	for name, l := range worlds {
		t.Run(name, func(t *testing.T) {
			n, story, bad := explore(l, allRules(), 3_000_000)
			if bad != "" {
				t.Fatalf("%s after %d states:\n  %s", bad, n, strings.Join(story, "\n  "))
			}
			t.Logf("%d states, every one keeps the invariants", n)
		})
	}
}

// TestEveryRuleIsNeeded takes one rule out at a time; the explorer must find what goes wrong then.
func TestEveryRuleIsNeeded(t *testing.T) {
	suite.Slow(t)
	for name, c := range map[string]struct {
		without func(*rules)
		world   limits
	}{
		"drop before ack": {func(r *rules) { r.dropBeforeAck = false }, worlds["return"]},
		"fence":           {func(r *rules) { r.fence = false }, worlds["hosts"]},
		"incarnations":    {func(r *rules) { r.incarnations = false }, worlds["kill"]},
		"resync first":    {func(r *rules) { r.resyncFirst = false }, worlds["hosts"]},
		"both intents":    {func(r *rules) { r.bothIntents = false }, worlds["return"]},
		"durable intent":  {func(r *rules) { r.durableIntent = false }, worlds["power"]},
		"keep intents":    {func(r *rules) { r.keepIntents = false }, worlds["return"]},
		"boot record":     {func(r *rules) { r.bootRecord = false }, worlds["power"]},
		"session answers": {func(r *rules) { r.sessionAnswers = false }, worlds["power"]},
		"intact survivor": {func(r *rules) { r.intactSurvivor = false }, worlds["restarts"]},
		"absent stays":    {func(r *rules) { r.absentStays = false }, worlds["hosts"]},
		"absent kept":     {func(r *rules) { r.absentKept = false }, worlds["winners"]},
		"synced join":     {func(r *rules) { r.syncedJoin = false }, limits{replicas: 2, writes: 1, epochs: 4, stops: 1, powers: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			r := allRules()
			c.without(&r)
			n, story, bad := explore(c.world, r, 3_000_000)
			if len(story) == 0 {
				t.Fatalf("%d states and nothing found (%s): the rule is not needed, or the model does not see why", n, bad)
			}
			t.Logf("%s after %d states:\n  %s", bad, n, strings.Join(story, "\n  "))
		})
	}
}
