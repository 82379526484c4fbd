package format

import "testing"

// TestIntentsErrOnTheSafeSide: all regions of a damaged page are dirty, the regions of other pages are unchanged.
func TestIntentsErrOnTheSafeSide(t *testing.T) {
	n := NewIntents(3 * RegionsPerPage * IntentsRegion)
	if !n.mark(0, 1) || n.mark(5, 1) || !n.mark(RegionsPerPage*IntentsRegion, IntentsRegion+1) {
		t.Fatal("mark")
	}
	data := EncodeIntents(n)
	data[2*IntentsPageSize+4000] ^= 1
	m, err := DecodeIntents(data)
	if err != nil {
		t.Fatal(err)
	}
	for g := range m.Regions() {
		want := n.Dirty(g) || g/RegionsPerPage == 1
		if m.Dirty(g) != want {
			t.Fatalf("region %d: dirty is %v", g, m.Dirty(g))
		}
	}
}
