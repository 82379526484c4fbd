package engine

import (
	"context"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// compared is a member with snapshot "s" over snapshot "s0" over an image. A piece of the layer of "s" has the content of
// digest, and the layer has the root.
type compared struct {
	*cuttable
	root, digest string
	asked        []string // per call of Changed
	ended        int
}

func (m *compared) State(context.Context) (stack.Meta, error) {
	return stack.Meta{Layers: []string{"image", "of-s0", "of-s"},
		Snapshots: []stack.Snapshot{{UID: "s0", Layer: "of-s0"}, {UID: "s", Layer: "of-s"}}}, nil
}

func (m *compared) Sizes(context.Context) (map[string]stack.LayerSize, error) {
	return map[string]stack.LayerSize{"s": {Root: m.root}}, nil
}

func (m *compared) Changed(_ context.Context, from, to string, base []string, _ int64) ([]int64, error) {
	m.asked = append(m.asked, from+".."+to+" over "+strings.Join(base, ","))
	return []int64{0}, nil
}

func (m *compared) SnapDigests(context.Context, string, int64, int64) ([]byte, error) {
	return []byte(m.digest), nil
}

func (m *compared) SnapEnd(context.Context) error {
	m.ended++
	return nil
}

// TestCompare: members with the same content pass, and a difference is an error with both names. The engine reads only
// the layer of the snapshot, and only once all members have finished the layer; before, the layer's map would be the
// file of the former head, and a walk through the file could cost the volume a member.
func TestCompare(t *testing.T) {
	for _, c := range []struct {
		name, snapshot string
		members        []compared
		want           api.Kind
		reads          bool
	}{
		{"same content", "s", []compared{{root: "r", digest: "x"}, {root: "r", digest: "x"}}, api.Other, true},
		{"other content", "s", []compared{{root: "r", digest: "x"}, {root: "q", digest: "y"}}, api.Corrupt, true},
		{"not finished", "s", []compared{{digest: "x"}, {digest: "y"}}, api.Unavailable, false},
		{"a single member", "s", []compared{{root: "r", digest: "x"}}, api.Unavailable, false},
		{"no snapshot", "none", []compared{{root: "r"}, {root: "r"}}, api.NotFound, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, len(c.members), func(cfg *Config) {
				for i, m := range cfg.Members {
					mem := m.Member.(*memory)
					mem.auto = true
					c.members[i].cuttable = &cuttable{mirror: mirror{memory: mem}}
					cfg.Members[i].Member = &c.members[i]
				}
			})
			err := r.e.Compare(t.Context(), c.snapshot, 0)
			if (err != nil) != (c.want != api.Other) || err != nil && !api.Is(err, c.want) {
				t.Errorf("compared: %v", err)
			}
			for i := range c.members {
				m := &c.members[i]
				if name := r.e.cfg.Members[i].Name; c.want == api.Corrupt && !strings.Contains(err.Error(), name) {
					t.Errorf("the error does not name replica %s: %v", name, err)
				}
				if reads := slices.Equal(m.asked, []string{"..s over image,of-s0"}) && m.ended == 1; reads != c.reads {
					t.Errorf("asked for %q, ended %d times", m.asked, m.ended)
				}
			}
		})
	}
}
