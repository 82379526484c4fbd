package host

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestEndOfAContinuedRestore: bytes that an earlier process restored do not count for the rate, and the rate begins
// again when a transfer begins again.
func TestEndOfAContinuedRestore(t *testing.T) {
	var r transfer
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i, c := range []struct {
		done int64
		want time.Duration // -1: not known
	}{{500, -1}, {600, 40 * time.Second}, {10, -1}, {110, 89 * time.Second}} {
		bytes := api.ByteProgress{BytesDone: c.done, BytesTotal: 1000}
		r.estimateEnd(&bytes, now)
		if end := bytes.EstimatedEnd; (end == nil) != (c.want < 0) || end != nil && !end.Time.Equal(now.Add(c.want)) {
			t.Errorf("report %d: the end is at %v, at %v", i, end, now)
		}
		now = now.Add(10 * time.Second)
	}
}

// TestEstimateChangesWithTheBytesAlone: a restore that waits for its store has one status, however long it waits.
func TestEstimateChangesWithTheBytesAlone(t *testing.T) {
	var r transfer
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	report := func(done int64) *metav1.Time {
		bytes := api.ByteProgress{BytesDone: done, BytesTotal: 1000}
		now = now.Add(10 * time.Second)
		r.estimateEnd(&bytes, now)
		return bytes.EstimatedEnd
	}
	report(100)
	end := report(200)
	if end == nil || report(200) != end || report(200) != end {
		t.Error("the estimate changes without progress")
	}
	if next := report(300); next == end {
		t.Error("the estimate does not change with progress")
	}
}
