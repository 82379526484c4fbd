package targets

import (
	"context"
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
)

// TestResultOfAnotherStoreIsDropped: a visit of the store that the target had before tells nothing about the target; a
// change of the interval drops nothing.
func TestResultOfAnotherStoreIsDropped(t *testing.T) {
	seen := api.BackupTargetSpec{BackupTargetURL: "file:///a", CredentialSecret: &api.SecretRef{Name: "s"}}
	for name, c := range map[string]struct {
		change func(*api.BackupTargetSpec)
		want   string
	}{
		"url":      {func(s *api.BackupTargetSpec) { s.BackupTargetURL = "file:///b" }, ""},
		"secret":   {func(s *api.BackupTargetSpec) { s.CredentialSecret = nil }, ""},
		"interval": {func(s *api.BackupTargetSpec) { s.PollInterval = &metav1.Duration{Duration: time.Hour} }, "id"},
	} {
		b := &api.BackupTarget{Spec: *seen.DeepCopy()}
		c.change(&b.Spec)
		rec := &targetRecord{visitedSpec: seen, visit: &job[visitResult]{
			result: visitResult{reason: api.ReasonAvailable, storeFacts: storeFacts{repositoryID: "id"}}}}
		rec.applyVisit(b, "node-1", time.Now())
		if b.Status.RepositoryID != c.want || b.Status.Available != (c.want != "") {
			t.Errorf("%s: status %+v", name, b.Status)
		}
	}
}

// TestEndedJobsKeepTheirResults: jobs that end after the status was written have results that no status has. No other
// job takes their place, although each is due.
func TestEndedJobsKeepTheirResults(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // a job would begin nowhere
	ended := make(chan struct{})
	close(ended)
	now := time.Now()
	past := metav1.NewTime(now.Add(-time.Hour))
	b := &api.BackupTarget{Spec: api.BackupTargetSpec{VerifyRequestedAt: &past},
		Status: api.BackupTargetStatus{Available: true, SweepRequested: &past}}
	r := &targetReconciler{jobs: newJobSet(), opts: Options{Now: time.Now}}
	visit, sweep := &job[visitResult]{ended: ended}, &job[sweepResult]{ended: ended}
	verification := &job[verifyResult]{ended: ended}
	rec := &targetRecord{visit: visit, sweep: sweep, verification: verification, memory: newVisitMemory()}
	if _, err := r.startJobs(ctx, b, rec, nil, now); err != nil {
		t.Fatal(err)
	}
	if rec.visit != visit || rec.sweep != sweep || rec.verification != verification {
		t.Errorf("startJobs replaced jobs whose results no status has: %+v", rec)
	}
}

// TestVisitsAreDue: a visit begins at once for a new target or spec, after the interval, after a shorter pause while
// the target is unavailable or after an attempt that failed, and when a missing backup may be deleted.
func TestVisitsAreDue(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	backups, again := []api.StoredBackup{&api.Backup{}}, metav1.NewTime(now.Add(time.Hour))
	for name, c := range map[string]struct {
		poll   time.Duration
		down   bool
		change func(*api.BackupTarget, *targetRecord)
		want   time.Duration // from the last visit; negative: never
	}{
		"first": {time.Hour, false, func(_ *api.BackupTarget, rec *targetRecord) {
			rec.visited = time.Time{}
		}, time.Minute},
		"changed": {time.Hour, false, func(b *api.BackupTarget, _ *targetRecord) { b.Generation++ }, time.Minute},
		"claimed": {time.Hour, true, func(_ *api.BackupTarget, rec *targetRecord) {
			rec.claimed = &api.TargetClaim{}
		}, time.Minute},
		"interval":    {time.Hour, false, nil, time.Hour},
		"on request":  {0, false, nil, -1},
		"negative":    {-time.Hour, false, nil, -1},
		"tiny":        {time.Nanosecond, false, nil, time.Second},
		"unavailable": {0, true, nil, 30 * time.Second},
		"failed attempt": {time.Hour, false, func(_ *api.BackupTarget, rec *targetRecord) {
			backups[0].Common().NextTry = &again
			rec.failures = failures{"": metav1.NewTime(again.Add(-time.Second))}
		}, 30 * time.Second},
		"failed attempt before the visit": {time.Hour, false, func(_ *api.BackupTarget, rec *targetRecord) {
			backups[0].Common().NextTry = &again
			rec.failures = failuresOf(backups)
		}, time.Hour},
		"failed backup": {time.Hour, false, func(_ *api.BackupTarget, _ *targetRecord) {
			backups[0].Common().NextTry, backups[0].Common().State = &again, api.BackupError
		}, time.Hour},
		"missing": {time.Hour, false, func(_ *api.BackupTarget, rec *targetRecord) {
			rec.missingAt = rec.visited.Add(time.Second)
		}, time.Second},
	} {
		b := &api.BackupTarget{Spec: api.BackupTargetSpec{PollInterval: &metav1.Duration{Duration: c.poll}}}
		b.Status.Available = !c.down
		visited := now.Add(-time.Minute)
		rec := &targetRecord{visited: visited}
		*backups[0].Common() = api.CommonBackupStatus{}
		if c.change != nil {
			c.change(b, rec)
		}
		want := visited.Add(c.want)
		if c.want < 0 {
			want = time.Time{}
		}
		if got := rec.nextVisit(b, backups, 30*time.Second, now); !got.Equal(want) {
			t.Errorf("%s: due %v, want %v", name, got, want)
		}
	}
}

// TestFailuresForGood: what another attempt cannot mend ends the backup.
func TestFailuresForGood(t *testing.T) {
	for kind, permanent := range map[api.Kind]bool{
		api.Invalid: true, api.Unsupported: true, api.NotFound: true, api.Denied: false, api.Unavailable: false, api.Busy: false, api.Full: false, api.Other: false, api.Corrupt: false,
	} {
		if IsPermanent(api.Errorf(kind, "x")) != permanent {
			t.Errorf("%v: permanent is %v", kind, !permanent)
		}
	}
}

// TestLockOutlivesTheOtherOperation: a sweep that waits for a lock is reported until a sweep succeeds, whatever
// deletions do meanwhile.
func TestLockOutlivesTheOtherOperation(t *testing.T) {
	b := &api.BackupTarget{}
	locked := func() bool { return meta.IsStatusConditionTrue(b.Status.Conditions, api.ConditionLocked) }
	applyLock(b, api.ReasonDeletionWaits, nil)
	if len(b.Status.Conditions) > 0 {
		t.Errorf("a condition without a lock: %+v", b.Status.Conditions)
	}
	s := newShelf(t, "x")
	holder, err := s.r.Lock(t.Context(), repo.Exclusive)
	must(t, err)
	_, err = s.r.Lock(t.Context(), repo.Shared)
	must(t, holder.Close(t.Context()))
	applyLock(b, api.ReasonSweepWaits, fmt.Errorf("sweep: %w", err))
	applyLock(b, api.ReasonDeletionWaits, nil)
	if !locked() {
		t.Error("a deletion ended the wait of the sweep")
	}
	applyLock(b, api.ReasonSweepWaits, api.Errorf(api.Busy, "a new backup needs garbage"))
	if locked() {
		t.Error("a sweep that fails for another reason still waits")
	}
}

// TestSweepsAreDue: a sweep begins a while after the first of several requests, and later after a failure; without a
// request, and in a store that is read-only or unavailable, none begins.
func TestSweepsAreDue(t *testing.T) {
	at := metav1.NewTime(time.Unix(1_700_000_000, 0))
	b := &api.BackupTarget{Status: api.BackupTargetStatus{Available: true, SweepRequested: &at}}
	rec := &targetRecord{}
	expect := func(what string, want time.Time) {
		t.Helper()
		if got := rec.nextSweep(b, time.Minute); !got.Equal(want) {
			t.Errorf("%s: due %v, want %v", what, got, want)
		}
	}
	expect("requested", at.Add(time.Minute))
	later := metav1.NewTime(at.Add(50 * time.Second))
	b.Status.SweepRequested = &later
	expect("requested again", at.Add(time.Minute))
	rec.sweepAgain = at.Add(time.Hour)
	expect("failed", at.Add(time.Hour))
	b.Spec.ReadOnly = true
	expect("read-only", time.Time{})
	b.Spec.ReadOnly, b.Status.Available = false, false
	expect("unavailable", time.Time{})
	b.Status.Available, b.Status.SweepRequested, rec.sweepAgain = true, nil, time.Time{}
	expect("not requested", time.Time{})
	b.Status.SweepRequested = &later
	expect("a new request", later.Add(time.Minute))
}
