package targets

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// OwnerOf returns the node that looks after a BackupTarget, and when that may change without an event; zero: never.
func OwnerOf(target types.UID, nodes []api.Node, now time.Time) (owner string, next time.Time) {
	return ownerOf(target, nodes, now), nextSilence(nodes, now)
}

// Jobs owns the goroutines of other work with stores, as a Runnable of the manager: at most one for each key. The end
// of a job wakes the reconciler of its object.
type Jobs = jobSet

// NewJobs returns Jobs, which the caller adds to the manager.
func NewJobs() *Jobs { return newJobSet() }

// Wake has an event with the name of an object after each end of a job.
func (s *jobSet) Wake() <-chan event.GenericEvent { return s.wake }

// Job is a piece of work with a store.
type Job[T any] = job[T]

// StartJob starts a job for an object, or returns nil while an earlier job of the object for the same work runs.
func StartJob[T any](ctx context.Context, s *Jobs, object, work string, do func(context.Context) T) *Job[T] {
	return startJob(ctx, s, object, work, do)
}

// Cancel ends the context of the job.
func (j *job[T]) Cancel() { j.stop() }

// Result returns the result of a job that has ended.
func (j *job[T]) Result() (result T, ended bool) {
	if !j.hasEnded() {
		return result, false
	}
	return j.result, true
}

// RequestSweep asks the owner of a BackupTarget to free the space of what an unfinished backup uploaded.
func RequestSweep(ctx context.Context, c client.Client, target *api.BackupTarget) error {
	_, err := await.EditStatus(ctx, c, target.Name, func(t *api.BackupTarget) (bool, error) {
		if t.UID != target.UID {
			return false, nil
		}
		now := metav1.Now() // later than an earlier request, which a sweep that runs now may end
		t.Status.SweepRequested = &now
		return true, nil
	})
	return client.IgnoreNotFound(err)
}

// AddHealed adds blobs that this node wrote again to the status of a BackupTarget. The owner then looks whether damage
// is left.
func AddHealed(ctx context.Context, c client.Client, target *api.BackupTarget, blobs int64) error {
	_, err := await.EditStatus(ctx, c, target.Name, func(t *api.BackupTarget) (bool, error) {
		v := t.Status.Verification
		if t.UID != target.UID || v == nil {
			return false, nil
		}
		v.HealedBlobs, v.UncheckedBlobs = v.HealedBlobs+blobs, v.UncheckedBlobs+blobs
		return true, nil
	})
	return client.IgnoreNotFound(api.Explain(err, "backup target %s: add the healed blobs to the status", target.Name))
}
