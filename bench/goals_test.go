package main

import "testing"

// TestGoals compares figures with goals.
func TestGoals(t *testing.T) {
	for _, c := range []struct {
		r      result
		has    bool
		missed bool
	}{
		{result{Name: "randread-4k-qd32", Subject: "drover-blank", Baseline: loopDirect, Ratio: 0.61}, true, false},
		{result{Name: "randwrite-4k-qd32", Subject: "drover-image", Baseline: loopDirect, Ratio: 0.59}, true, true},
		{result{Name: "randwrite-4k-qd32", Subject: "drover-image", Baseline: "loop-sparse", Ratio: 0.4}, false, false},
		{result{Name: "randwrite-4k-qd32", Subject: "plain-file", Baseline: loopDirect, Ratio: 0.4}, false, false},
		{result{Name: "randread-4k-qd1-added", Subject: "drover-image", Baseline: loopDirect, Value: 76}, true, true},
		{result{Name: "randread-4k-qd1-added", Subject: "drover-image", Baseline: loopDirect, Value: -3}, true, false},
		{result{Name: "clone", Subject: "of-100-GiB", Value: 0.31}, true, true},
		{result{Name: "killed-to-next-io", Subject: "1-local", Value: 0.11}, true, true},
		{result{Name: "images-many", Subject: "volume-attach beside 300", Baseline: "beside 10", Ratio: 1.6}, true, true},
		{result{Name: "snapshot-pause-p99", Subject: "added by a cut", Value: 40, base: 31}, true, false},
		{result{Name: "snapshot-pause-p99", Subject: "added by a cut", Value: 40, base: 29}, true, true},
		{result{Name: "snapshot-pause-2-replicas-p99", Subject: "added by a cut", Value: 118, base: 42}, true, true},
		{result{Name: "image-import-gz", Subject: "gzip"}, false, false},
		{result{Name: "image-import-gz", Subject: "drover", Baseline: "gzip", Ratio: 0.9}, true, true},
		{result{Name: "image-import-gz-du", Subject: "drover", Baseline: "gzip", Ratio: 1.06}, true, true},
	} {
		if c.r.judgeGoal(); (c.r.Goal != "") != c.has || c.r.Missed != c.missed {
			t.Errorf("%s of %s: goal %q, missed %v", c.r.Name, c.r.Subject, c.r.Goal, c.r.Missed)
		}
	}
}
