package api

import (
	"strings"
	"testing"
	"time"
)

// TestEndIsEstimatedFromTheMeanRate: only bytes since the begin count for the rate, and the end of a transfer that
// hardly moves is not known.
func TestEndIsEstimatedFromTheMeanRate(t *testing.T) {
	began := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		before, done, total int64
		want                time.Duration // from now on; -1: not known
	}{
		{0, 0, 100, -1}, {0, 25, 100, 30 * time.Second}, {50, 75, 100, 10 * time.Second}, {50, 50, 100, -1},
		{0, 100, 100, 0}, {0, 120, 100, -1}, {0, 1, 1 << 60, -1}, {0, 1, 0, -1},
	} {
		now := began.Add(10 * time.Second)
		end := EstimateEnd(began, now, c.before, c.done, c.total)
		if (end == nil) != (c.want < 0) || end != nil && !end.Time.Equal(now.Add(c.want)) {
			t.Errorf("%d of %d after %d: the end is at %v", c.done, c.total, c.before, end)
		}
	}
	p := ByteProgress{BytesDone: 1 << 20, BytesTotal: 4 << 20, EstimatedEnd: EstimateEnd(began, began, 0, 1, 1)}
	const want = "1 MiB of 4 MiB, ends at about 2026-01-02T03:04:05Z"
	if text := p.Text(); p.Percent() != 25 || !strings.Contains(text, want) {
		t.Errorf("%d %%%s", p.Percent(), text)
	}
}
