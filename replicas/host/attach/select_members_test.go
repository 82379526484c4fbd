package attach

import (
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/peer"
)

// TestSelectMembers: the engine attaches with a member whose machine restarted only if no engine holds a member with
// possibly newer writes.
func TestSelectMembers(t *testing.T) {
	v := &api.Volume{ObjectMeta: apitest.Named("v")}
	v.Status.Size, v.Status.Epoch, v.Status.RevertedEpoch = 1<<30, 7, 5
	whole := memberProbe{spec: memberSpec{Name: "whole"}, info: peer.Info{Size: 1 << 30}}
	small := memberProbe{spec: memberSpec{Name: "small"}, info: peer.Info{Size: 4096}}
	reverted := memberProbe{spec: memberSpec{Name: "reverted"}, info: peer.Info{Size: 1 << 30, Epoch: 5, Reverted: 5}}
	restarted := memberProbe{spec: memberSpec{Name: "restarted"}, info: peer.Info{Size: 1 << 30, Restarted: true}}
	away := memberProbe{spec: memberSpec{Name: "away"}, err: api.Errorf(api.Unavailable, "it is away")}
	busy := memberProbe{spec: memberSpec{Name: "busy"}, err: api.Errorf(api.Busy, "it is open")}
	held := memberProbe{spec: memberSpec{Name: "held"}, err: api.Errorf(api.Unavailable, "no sign of life"), held: true}
	for name, c := range map[string]struct {
		list []memberProbe
		take string
		kind api.Kind
	}{
		"one says that it is smaller":          {[]memberProbe{small, whole}, "whole", api.Other},
		"the only one is smaller":              {[]memberProbe{small, away}, "small", api.Other},
		"whole before restarted":               {[]memberProbe{restarted, whole}, "whole", api.Other},
		"restarted, the others are away":       {[]memberProbe{away, restarted}, "restarted", api.Other},
		"one is about to be free":              {[]memberProbe{busy, whole}, "", api.Busy},
		"one is held, another is whole":        {[]memberProbe{held, whole}, "whole", api.Other},
		"one is held, another has restarted":   {[]memberProbe{held, restarted}, "", api.Busy},
		"one is held, and there is no other":   {[]memberProbe{held}, "", api.Unavailable},
		"one was not reverted":                 {[]memberProbe{reverted, whole}, "reverted", api.Other},
		"restarted, and the other one is held": {[]memberProbe{restarted, held}, "", api.Busy},
	} {
		take, err := selectMembers(v, c.list)
		switch {
		case c.take == "":
			if !api.Is(err, c.kind) {
				t.Errorf("%s: %v, %v", name, take, err)
			}
		case err != nil || len(take) != 1 || take[0].spec.Name != c.take:
			t.Errorf("%s: %v, %v", name, take, err)
		}
	}
}

// TestOneMembersWordLeavesNobodyOut: the word of one member about itself leaves no other member out of a new engine.
func TestOneMembersWordLeavesNobodyOut(t *testing.T) {
	v := &api.Volume{ObjectMeta: apitest.Named("v")}
	v.Status.Size, v.Status.Epoch, v.Status.RevertedEpoch = 1<<30, 7, 3
	honest := memberProbe{spec: memberSpec{Name: "honest"}, info: peer.Info{Size: 1 << 30, Epoch: 6, Joined: 4}}
	for name, word := range map[string]peer.Info{
		"reverted in the volume's epoch": {Size: 1 << 30, Epoch: 7, Joined: 7, Reverted: 7},
		"reverted and joined long ago":   {Size: 1 << 30, Epoch: 6, Joined: 1, Reverted: 5},
		"larger than the volume":         {Size: 1 << 40, Epoch: 6, Joined: 4},
	} {
		take, err := selectMembers(v, []memberProbe{honest, {spec: memberSpec{Name: "other"}, info: word}})
		if err != nil || len(take) != 2 {
			t.Errorf("%s: the engine begins with %v, %v", name, take, err)
		}
	}
}
