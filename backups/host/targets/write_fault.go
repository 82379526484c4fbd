package targets

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/backups/target/limited"
)

// writeError is an error of a target's store at a write or, with deletion, at a deletion.
type writeError struct {
	target   types.UID
	deletion bool
	err      error
}

func (e *writeError) Error() string { return e.err.Error() }
func (e *writeError) Unwrap() error { return e.err }

// writeStore is a store whose failed writes and deletions are a writeError: errors of reads say nothing about writes.
type writeStore struct {
	*limited.Store
	target types.UID
}

// Put implements target.Store.
func (s writeStore) Put(ctx context.Context, name string, body []byte) error {
	return s.mark(ctx, false, s.Store.Put(ctx, name, body))
}

// Delete implements target.Store.
func (s writeStore) Delete(ctx context.Context, names ...string) error {
	return s.mark(ctx, true, s.Store.Delete(ctx, names...))
}

func (s writeStore) mark(ctx context.Context, deletion bool, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	return &writeError{s.target, deletion, err}
}

// writeFault is the reason of ConditionWriteFailed for a session that ended with err, or "" if the store of the target
// wrote all that the session asked for. A copy writes locks into the store of its origin, too.
func writeFault(target types.UID, err error) string {
	var w *writeError
	switch {
	case !errors.As(err, &w) || w.target != target || w.deletion:
		return ""
	case errors.Is(w, unix.EROFS):
		return api.ReasonReadOnlyStore
	case api.Is(w, api.Denied):
		return api.ReasonDenied
	case api.Is(w, api.Full):
		return api.ReasonNoRoom
	}
	return api.ReasonWriteFailed
}

// isRefusedDeletion reports whether the store permitted no deletion.
func isRefusedDeletion(err error) bool {
	var w *writeError
	return errors.As(err, &w) && w.deletion && api.Is(w, api.Denied)
}

// ReportWrite brings the outcome of a session that wrote a whole backup, or failed, into ConditionWriteFailed of the
// target. A store that fails without a reason, and that does not answer a read, either, has no fault of writes alone:
// the next visit reports it.
func (o *Opened) ReportWrite(ctx context.Context, outcome error) {
	r, reason := o.repositories, writeFault(o.Target.UID, outcome)
	switch {
	case ctx.Err() != nil, outcome != nil && reason == "":
		return
	case outcome == nil && !meta.IsStatusConditionTrue(o.Target.Status.Conditions, api.ConditionWriteFailed):
		return // of the begin of the session: the end of a fault that began meanwhile is reported by a later session
	case reason == api.ReasonWriteFailed && o.Repository.CheckStore(ctx) != nil:
		return
	}
	message := ""
	if outcome == nil {
		reason = api.ReasonWritten
	} else {
		message = api.ClipMessage(outcome.Error())
	}
	changed := false
	t, err := await.EditStatus(ctx, r.client, o.Target.Name, func(t *api.BackupTarget) (bool, error) {
		all := &t.Status.Conditions
		was := meta.FindStatusCondition(*all, api.ConditionWriteFailed)
		changed = false
		if t.UID != o.Target.UID || outcome == nil && (was == nil || was.Reason == api.ReasonWritten) {
			return false, nil
		}
		changed = api.SetCondition(all, t.Generation, api.ConditionWriteFailed, outcome != nil, reason, message)
		return changed || was.Message != message, nil
	})
	if err != nil {
		err = api.Explain(err, "backup target %s: write the condition %s", o.Target.Name, api.ConditionWriteFailed)
		if client.IgnoreNotFound(err) != nil {
			r.log.Warn("the outcome of a write is not in the status; the next attempt reports again", "err", err)
		}
		return
	}
	if changed && outcome != nil {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "BackupTargetWriteFailed", "Write", "%s: %s", reason, message)
	}
}
