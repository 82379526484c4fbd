package planner

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// assumedReplica is a new Replica that the cache may lack.
type assumedReplica struct {
	replica api.Replica
	until   time.Time
	// unsure: no answer said whether the API created the Replica. The reconciler asks again under the same name, so
	// that a request without an answer never makes a second Replica.
	unsure bool
}

// How long an assumption lasts while the cache lacks the Replica, which may be deleted meanwhile, and how long without
// a reconcile of its volume while the reconciler is unsure: the volume may be gone.
const (
	assumeTime = time.Minute
	unsureTime = 10 * time.Minute
)

// resolveAgain is the pause between two requests that settle whether a Replica exists.
const resolveAgain = 2 * time.Second

// createReplica creates a Replica, and assumes it from now on, unless the API refuses it.
func (p *volumeReconciler) createReplica(ctx context.Context, r *api.Replica) error {
	// Before the request: the event, which ends the assumption, can overtake the answer.
	p.assume(assumedReplica{replica: *r.DeepCopy(), unsure: true, until: time.Now().Add(unsureTime)})
	return p.create(ctx, r)
}

// create creates an assumed Replica. The name is random: a Replica of this name is this one.
func (p *volumeReconciler) create(ctx context.Context, r *api.Replica) error {
	err := p.client.Create(ctx, r)
	switch {
	case err == nil || apierrors.IsAlreadyExists(err):
		p.created(r.Name)
		return nil
	case refused(err):
		p.forgetAssumed(r.Name)
	}
	return fmt.Errorf("replica %s: %w", r.Name, err)
}

// refused reports whether an error of a request is the API's answer that nothing has changed.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	switch apierrors.ReasonForError(err) {
	case metav1.StatusReasonTimeout, metav1.StatusReasonServerTimeout, metav1.StatusReasonInternalError,
		metav1.StatusReasonServiceUnavailable, metav1.StatusReasonUnknown:
		return false
	}
	return true
}

// assumedReplicas returns the assumed Replicas of a volume that the cache lacks; seen are the names that the cache has.
// A Replica whose creation got no answer counts until an answer settles whether the Replica exists.
func (p *volumeReconciler) assumedReplicas(ctx context.Context, v *api.Volume, seen map[string]bool) (
	mine []api.Replica) {
	for _, a := range p.assumedOf(v, seen) {
		r := &a.replica
		if a.unsure {
			missing, err := p.resolveCreation(ctx, v, r)
			if missing {
				continue
			}
			if err != nil {
				p.log.Warn("the API does not answer whether a replica exists", "volume", v.Name, "replica", r.Name, "err", err)
				p.requeueAfter(v.Name, resolveAgain)
			}
		}
		mine = append(mine, *r)
	}
	return mine
}

// resolveCreation finds out whether a Replica is missing whose creation got no answer: the reconciler creates the
// Replica again, or deletes it where the volume is being deleted.
func (p *volumeReconciler) resolveCreation(ctx context.Context, v *api.Volume,
	r *api.Replica) (missing bool, err error) {
	if v.DeletionTimestamp == nil {
		err := p.create(ctx, r.DeepCopy())
		return refused(err), err
	}
	err = p.client.Delete(ctx, r.DeepCopy())
	switch {
	case err == nil:
		p.created(r.Name)
	case apierrors.IsNotFound(err):
		p.forgetAssumed(r.Name)
		return true, nil
	}
	return false, err
}

// assumedOf lists the assumed Replicas of a volume, and ends assumptions that are known or old.
func (p *volumeReconciler) assumedOf(v *api.Volume, seen map[string]bool) (list []assumedReplica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, a := range p.assumed {
		switch {
		case seen[name] || time.Now().After(a.until):
			delete(p.assumed, name)
		case a.replica.Spec.VolumeUID == v.Status.UID:
			if a.unsure {
				a.until = time.Now().Add(unsureTime)
				p.assumed[name] = a
			}
			list = append(list, a)
		}
	}
	return list
}

func (p *volumeReconciler) assume(a assumedReplica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.assumed[a.replica.Name] = a
}

// created notes that the API has created an assumed Replica. Its event may have ended the assumption.
func (p *volumeReconciler) created(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if a, is := p.assumed[name]; is {
		a.unsure, a.until = false, time.Now().Add(assumeTime)
		p.assumed[name] = a
	}
}

func (p *volumeReconciler) forgetAssumed(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.assumed, name)
}
