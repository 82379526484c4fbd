package api

import (
	"encoding/json"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestBoundTimeCanBeWritten: objects keep every bounded time, also a time whose year in UTC is 10000. Times within the
// years stay.
func TestBoundTimeCanBeWritten(t *testing.T) {
	for _, at := range []time.Time{
		time.Date(9999, 12, 31, 23, 59, 59, 0, time.FixedZone("", -24*3600+60)),
		time.Date(0, 1, 1, 0, 0, 0, 0, time.FixedZone("", 24*3600-60)),
		time.Unix(1<<60, 0), time.Unix(-1<<60, 0), {},
	} {
		text, err := json.Marshal(metav1.NewTime(BoundTime(at)))
		var back metav1.Time
		if err == nil {
			err = json.Unmarshal(text, &back)
		}
		if err != nil || !back.Time.Equal(BoundTime(at)) {
			t.Errorf("%v: written as %s, read as %v, %v", at, text, back, err)
		}
	}
	if at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.FixedZone("", 3600)); !BoundTime(at).Equal(at) {
		t.Errorf("%v became %v", at, BoundTime(at))
	}
}
