package suite

import (
	"slices"
	"testing"
	"time"
)

func TestAmountsGrowWithTheSuite(t *testing.T) {
	few := 2
	if testing.Short() {
		few = 1
	}
	for _, c := range []struct {
		test, count, long string
		n                 int
		d                 time.Duration
	}{
		{"", "", "", few, 0},
		{"all", "", "", 50, time.Minute},
		{"", "7", "3h", 7, 3 * time.Hour},
		{"all", "7", "3h", 7, 3 * time.Hour},
	} {
		t.Setenv("DROVER_TEST", c.test)
		t.Setenv("DROVER_SOME_COUNT", c.count)
		t.Setenv("DROVER_SOME_TIME", c.long)
		n, d := Count(t, "DROVER_SOME_COUNT", 2, 50), Duration(t, "DROVER_SOME_TIME", time.Minute)
		if n != c.n || d != c.d {
			t.Errorf("%+v: %d times, for %v", c, n, d)
		}
	}
}

func TestSeedsAreFixedUnlessAllIsWanted(t *testing.T) {
	t.Setenv("DROVER_SEED", "")
	t.Setenv("DROVER_TEST", "")
	if got := slices.Collect(Seeds(t, 3)); !slices.Equal(got, []uint64{1, 2, 3}) {
		t.Errorf("seeds %v", got)
	}
	t.Setenv("DROVER_TEST", "all")
	first := Seed(t)
	if first == 1 || Seed(t) == first {
		t.Errorf("seed %d does not come from the clock", first)
	}
	t.Setenv("DROVER_SEED", "9")
	if got := slices.Collect(Seeds(t, 3)); !slices.Equal(got, []uint64{9}) {
		t.Errorf("seeds %v, want the one that is set", got)
	}
}
