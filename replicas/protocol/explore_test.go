package protocol

import (
	"hash/maphash"
	"iter"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/block/suite"
)

// step is a possible event, and the state after the event.
type step[S comparable] struct {
	name string
	to   S
	bad  string // an invariant broken by this step
}

// explore visits every reachable state, breadth first, and returns the number of states, and the shortest story that
// ends in a broken invariant, if any. A hash of 64 bits identifies a state, as in TLC
// (https://lamport.azurewebsites.net/tla/tools.html): with 3 million states the odds that two have the same hash are 1
// to 4 million.
func explore[S comparable](first S, successors func(S) iter.Seq[step[S]], most int) (visited int, story []string, bad string) {
	type from struct {
		parent int32
		name   string
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // all of the heap lives to the end
	seed := maphash.MakeSeed()
	seen := map[uint64]struct{}{maphash.Comparable(seed, first): {}}
	trail := []from{{-1, ""}} // of each state, in the order of the visits
	for level, visit := []S{first}, 0; len(level) > 0; {
		var next []S
		for _, s := range level {
			for n := range successors(s) {
				if n.bad != "" {
					story = []string{n.name}
					for k := int32(visit); trail[k].parent >= 0; k = trail[k].parent {
						story = append([]string{trail[k].name}, story...)
					}
					return len(trail), story, n.bad
				}
				hash := maphash.Comparable(seed, n.to)
				if _, ok := seen[hash]; ok {
					continue
				}
				if len(trail) >= most {
					return len(trail), nil, "too many states"
				}
				seen[hash] = struct{}{}
				next = append(next, n.to)
				trail = append(trail, from{int32(visit), n.name})
			}
			visit++
		}
		level = next
	}
	return len(trail), nil, ""
}

// search explores a world of the protocol.
func search(l limits, r rules) (visited int, story []string, bad string) {
	return explore(start(l), func(s state) iter.Seq[step[state]] { return successors(s, l, r) }, 3_000_000)
}

// worlds are the bounded scopes: the explorer visits all states of each.
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
			if slices.Contains([]string{"restarts", "return", "three"}, name) { // 1.7 to 2.7 million states each
				suite.Long(t)
			}
			n, story, bad := search(l, allRules())
			if bad != "" {
				t.Fatalf("%s after %d states:\n  %s", bad, n, strings.Join(story, "\n  "))
			}
			t.Logf("%d states, every one keeps the invariants", n)
		})
	}
}

// TestEveryRuleIsNeeded: the model without a single rule has a story that breaks an invariant.
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
		"missing stays":   {func(r *rules) { r.missingStays = false }, worlds["hosts"]},
		"missing kept":    {func(r *rules) { r.missingKept = false }, worlds["winners"]},
		"synced join":     {func(r *rules) { r.syncedJoin = false }, limits{replicas: 2, writes: 1, epochs: 4, stops: 1, powers: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			r := allRules()
			c.without(&r)
			n, story, bad := search(c.world, r)
			if len(story) == 0 {
				t.Fatalf("%d states and nothing found (%s): the rule is not needed, or the model does not see why", n, bad)
			}
			t.Logf("%s after %d states:\n  %s", bad, n, strings.Join(story, "\n  "))
		})
	}
}
