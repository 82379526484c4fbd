package format

import "testing"

// TestIntentsErrOnTheSafeSide damages single pages: their regions are dirty then, the others stay as they were.
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
