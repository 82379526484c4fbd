package targets

import (
	"context"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
)

// keyFileTime is how long a key file is in the status at most. The command that asked reads the key file at once.
const keyFileTime = 2 * time.Minute

// lockTextLimit bounds the names of a lock, which come from the store.
const lockTextLimit = 64

// followRequests answers the requests of a target that its status has not answered. An answer that the end of the
// process cuts short is none.
func (v *visit) followRequests(ctx context.Context, r *repo.Repository, p repo.Passwords, result *visitResult) {
	spec, st := &v.target.Spec, &v.target.Status
	if q := spec.LocksRequest; q != nil && (st.Locks == nil || !st.Locks.Request.At.Equal(&q.At)) {
		if fact := v.listLocks(ctx, r, *q); ctx.Err() == nil {
			result.locks = fact
		}
	}
	if at := spec.KeyRequestedAt; at != nil && (st.KeyFile == nil || !st.KeyFile.Request.Equal(at)) {
		if fact := v.readKeyFile(ctx, r, p, *at); ctx.Err() == nil {
			result.keyFile = fact
		}
	}
}

func (v *visit) listLocks(ctx context.Context, r *repo.Repository, request api.LocksRequest) *api.LocksFact {
	fact := &api.LocksFact{Request: request}
	var err error
	removed := 0
	switch {
	case request.RemoveStale && v.target.Spec.ReadOnly:
		err = api.Errorf(api.Invalid, "no lock is removed, because the target is read-only; set readOnly to false, or run "+
			"`restic unlock`")
	case request.RemoveStale:
		removed, err = r.RemoveStaleLocks(ctx)
	}
	locks, total, listErr := r.ListLocks(ctx, api.ListedLocks)
	if err == nil {
		err = listErr
	}
	if err != nil {
		fact.Message = api.ClipMessage(err.Error())
	}
	fact.Removed, fact.Total = int32(removed), int32(total) //nolint:gosec // a folder lists at most 2^18 objects
	for _, l := range locks {
		fact.Locks = append(fact.Locks, lockFact(&l))
	}
	return fact
}

func lockFact(l *repo.LockInfo) api.LockFact {
	f := api.LockFact{Name: l.Name, Program: "restic", Hostname: clip(l.Hostname), Username: clip(l.Username),
		PID: int64(l.PID), Exclusive: l.Exclusive, Sweep: l.Sweep, Stale: l.Stale}
	if l.Drover {
		f.Program = "drover"
	}
	if !l.Since.IsZero() {
		f.Since = &metav1.Time{Time: l.Since}
	}
	if !l.Refreshed.IsZero() {
		f.RefreshedAt = &metav1.Time{Time: l.Refreshed}
	}
	if l.Err != nil {
		f.Program, f.Message = "", api.ClipMessage(l.Err.Error())
	}
	return f
}

func clip(text string) string {
	return api.PlainText(strings.ToValidUTF8(text[:min(len(text), lockTextLimit)], "?"))
}

func (v *visit) readKeyFile(ctx context.Context, r *repo.Repository, p repo.Passwords,
	request metav1.Time) *api.KeyFileFact {
	fact := &api.KeyFileFact{Request: request}
	var err error
	if p.Recovery == "" {
		err = api.Errorf(api.Invalid, "the Secret has no %s; add a password", api.SecretRecoveryPassword)
	} else {
		fact.Name, fact.Content, err = r.KeyFile(ctx, p.Recovery)
	}
	if api.Is(err, api.NotFound) && v.target.Spec.ReadOnly {
		err = api.Errorf(api.NotFound, "%w, and the target is read-only; set readOnly to false", err)
	}
	if err != nil {
		fact.Message = api.ClipMessage(err.Error())
	}
	return fact
}

// hideKeyFile removes a key file from the status that is no longer requested, or was shown for long enough: the command
// that asked may have died. next is when a key file has to be removed; zero: none is shown.
func hideKeyFile(t *api.BackupTarget, now time.Time) (next time.Time) {
	k := t.Status.KeyFile
	switch {
	case t.Spec.KeyRequestedAt == nil:
		t.Status.KeyFile = nil
	case k == nil || k.Content == nil:
	case k.ShownUntil != nil && now.Before(k.ShownUntil.Time):
		return k.ShownUntil.Time
	default:
		t.Status.KeyFile = &api.KeyFileFact{Request: k.Request, Message: "the key file was shown long enough; ask again"}
	}
	return next
}
