package planner

import (
	"fmt"
	"maps"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
)

// mustHaveMetrics compares series of the registry; -1: the series does not exist.
func mustHaveMetrics(t *testing.T, want map[string]float64) {
	t.Helper()
	families, err := metrics.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			labels := ""
			for _, l := range m.Label {
				labels += fmt.Sprintf(",%s=%q", l.GetName(), l.GetValue())
			}
			if labels != "" && m.Gauge != nil {
				got[f.GetName()+"{"+labels[1:]+"}"] = m.Gauge.GetValue()
			}
		}
	}
	for series, value := range want {
		if n, ok := got[series]; ok != (value >= 0) || ok && n != value {
			t.Errorf("%s is %v (exists: %v), want %v", series, n, ok, value)
		}
	}
}

// TestTargetsAreSummarized: each target with backups of a volume has the newest whole backup, the state of the newest
// one, and the bytes; backups of volumes with the same name do not count.
func TestTargetsAreSummarized(t *testing.T) {
	v := &api.Volume{Status: api.VolumeStatus{UID: "u"}}
	day := func(n int) string { return time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC).Format(time.RFC3339) }
	backup := func(n int, target string, change func(*api.Backup)) api.Backup {
		at := time.Date(2026, 1, n, 1, 0, 0, 0, time.UTC)
		b := api.Backup{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("b", n), CreationTimestamp: metav1.NewTime(at)},
			Spec: api.BackupSpec{Volume: "v", BackupTargetName: target}}
		b.Status.State, b.Status.SnapshotCreatedAt, b.Status.VolumeUID = api.BackupCompleted, day(n), "u"
		b.Status.VolumeSize, b.Status.URL, b.Status.NewlyUploadDataSize = 1, "x", 5
		if change != nil {
			change(&b)
		}
		return b
	}
	unfinished := func(state api.BackupState) func(*api.Backup) {
		return func(b *api.Backup) {
			b.Status = api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: state}}
		}
	}
	found := func(b *api.Backup) { b.Spec.SnapshotID, b.CreationTimestamp = "f", metav1.Now() }
	for what, c := range map[string]struct {
		backups []api.Backup
		want    map[string]targetSummary
	}{
		"none": {nil, nil},
		"two targets": {[]api.Backup{backup(2, "a", nil), backup(1, "a", nil), backup(1, "b", nil)},
			map[string]targetSummary{"a": {day(2), api.BackupCompleted, 10}, "b": {day(1), api.BackupCompleted, 5}}},
		"the newest failed": {[]api.Backup{backup(1, "a", nil), backup(2, "a", unfinished(api.BackupError))},
			map[string]targetSummary{"a": {day(1), api.BackupError, 5}}},
		"the first one failed": {[]api.Backup{backup(2, "a", unfinished(api.BackupError))},
			map[string]targetSummary{"a": {"", api.BackupError, 0}}},
		"new": {[]api.Backup{backup(2, "a", unfinished(api.BackupNew))},
			map[string]targetSummary{"a": {"", api.BackupPending, 0}}},
		"damaged": {[]api.Backup{backup(2, "a", func(b *api.Backup) { b.Status.Damaged = true })},
			map[string]targetSummary{"a": {"", api.BackupCompleted, 5}}},
		"found after a failure": {[]api.Backup{backup(1, "a", found), backup(2, "a", unfinished(api.BackupError))},
			map[string]targetSummary{"a": {day(1), api.BackupError, 5}}},
		"of a namesake": {[]api.Backup{backup(1, "a", func(b *api.Backup) { b.Status.VolumeUID = "other" })}, nil},
		"of Longhorn": {[]api.Backup{backup(1, "a", func(b *api.Backup) {
			found(b)
			b.Status.VolumeUID = ""
		})}, nil},
	} {
		if got := summarizeTargets(v, c.backups); !maps.Equal(got, c.want) {
			t.Errorf("%s: %+v, want %+v", what, got, c.want)
		}
	}
}
