package engine

import (
	"context"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// compared is a member with a snapshot "s" of 64 pieces of 1 MiB: piece 5 has changed, with the content of digest.
type compared struct {
	*cuttable
	layers []string
	digest string
	asked  []string // per call of Changed
	ended  int
}

func (m *compared) State(context.Context) (stack.Meta, error) {
	return stack.Meta{Layers: m.layers, Snapshots: []stack.Snapshot{{UID: "s0", Layer: "of-s0"}, {UID: "s", Layer: "of-s"}}}, nil
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

// TestCompare: members with the same content pass, a difference is an error that names both, and layers are trusted only
// below the snapshots.
func TestCompare(t *testing.T) {
	for _, c := range []struct {
		name, here, there string
		differ            bool
	}{{"same content", "x", "x", false}, {"other content", "x", "y", true}} {
		t.Run(c.name, func(t *testing.T) {
			var all []*compared
			layers := []string{"image", "of-s0", "of-s"}
			r := newRig(t, 2, func(cfg *Config) {
				for i, m := range cfg.Members {
					mem := m.Member.(*memory)
					mem.auto = true
					x := &compared{cuttable: &cuttable{mirror: mirror{memory: mem}}, layers: layers,
						digest: []string{c.here, c.there}[i]}
					all = append(all, x)
					cfg.Members[i].Member = x
				}
			})
			err := r.e.Compare(t.Context(), "", "s", 0)
			if differ := api.Is(err, api.Corrupt); differ != c.differ || err != nil && !differ {
				t.Errorf("compared: %v", err)
			}
			if c.differ && (!strings.Contains(err.Error(), r.e.cfg.Members[0].Name) || !strings.Contains(err.Error(), r.e.cfg.Members[1].Name)) {
				t.Errorf("the error does not name both replicas: %v", err)
			}
			for _, m := range all {
				if !slices.Equal(m.asked, []string{"..s over image"}) || m.ended != 1 {
					t.Errorf("asked for %q, ended %d times", m.asked, m.ended)
				}
			}
		})
	}
}
