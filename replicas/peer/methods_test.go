package peer

import (
	"slices"
	"testing"
)

// TestCallsThatCommitLayers: after these calls the node of a replica looks for merges and reports snapshots. A prepared
// cut does not count: the stack does not change until do-cut, and a merge cannot begin before the cut ends.
func TestCallsThatCommitLayers(t *testing.T) {
	var commit []string
	for name, m := range methods {
		if CommitsLayers(name) {
			commit = append(commit, name)
			if !m.changesLayers() {
				t.Errorf("%s commits layers and does not change them", name)
			}
		}
	}
	slices.Sort(commit)
	if want := []string{"do-cut", "drop-snapshot", "seal"}; !slices.Equal(commit, want) {
		t.Errorf("%q commit layers, want %q", commit, want)
	}
	if CommitsLayers("no such call") {
		t.Error("an unknown call commits layers")
	}
}
