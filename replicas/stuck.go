package replicas

import (
	"context"
	"fmt"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// A merge that fails is tried again, for as long as it takes. What fails more than once is told: in the Replica's
// status, from there in a condition and an event of the volume, until it succeeds.

// stuckAfter is how many tries in a row must have failed.
const stuckAfter = 2

// stuck is what is known of the merges of one replica.
type stuck struct {
	tries int    // in a row that failed
	why   string // empty: the last one did not
}

// mergeEnded notes how a try ended, and has the replica looked at if there is something to tell.
func (d *Data) mergeEnded(ctx context.Context, uid, volume string, err error) {
	d.mu.Lock()
	was, known := d.stuck[uid]
	now := stuck{}
	if err != nil {
		now = stuck{was.tries + 1, err.Error()}
	}
	d.stuck[uid] = now
	d.mu.Unlock()
	// The first that succeeds is told, too: a former process may have told that it fails.
	tell := now.tries == stuckAfter || now.tries > stuckAfter && was.why != now.why ||
		err == nil && (!known || was.tries >= stuckAfter)
	if !tell {
		return
	}
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		return // the next look at the replica tells
	}
	for i := range list.Items {
		if r := &list.Items[i]; string(r.Spec.UID) == uid {
			d.tellReplica(r.Name)()
		}
	}
}

// mergeGone forgets a replica that is gone.
func (d *Data) mergeGone(uid api.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.stuck, string(uid))
}

// mergeLook is when the end of a merge is looked for.
const mergeLook = time.Second

// merging tells of a merge under way in the stack that a revert, or a move, has to find at rest. It is asked before
// the volume's lock is taken: whoever takes that ends the merge, and with a try after another it would never come to
// its end.
func (l *replicaLoop) merging(ctx context.Context, r *api.Replica) error {
	on, uid := r.Spec.Disk, r.Spec.UID
	switch from := r.Spec.From; {
	case r.DeletionTimestamp != nil:
		return nil
	case r.RevertPending() != nil:
	case from != nil && from.Whole && (r.Status.Mode == "" || r.Status.Mode == api.ReplicaCreating):
		uid = from.Replica
		if from.Disk != "" {
			on = from.Disk
		}
	default:
		return nil
	}
	disk, err := l.disk(ctx, on)
	if err != nil {
		return nil // told by who needs it
	}
	m, err := disk.Stack(string(uid))
	if err != nil || m.Merge == nil {
		return nil
	}
	if uid == r.Spec.UID {
		l.merges(r, disk)
		if l.mergeFails(uid) != "" { // for how long, nobody knows: the revert is told so, and ends
			return nil
		}
	}
	l.mergeSoon(disk, string(uid), r.Spec.Volume) // should nobody be at it
	l.tidy(disk)
	return api.Errorf(api.Busy, "two layers of volume %s are being merged: it goes on when that is done", r.Spec.Volume)
}

// mergeFails is why layers of a replica cannot be merged, as several tries found; empty: nothing is known of that.
func (d *Data) mergeFails(uid api.UID) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now := d.stuck[string(uid)]; now.tries >= stuckAfter {
		return now.why
	}
	return ""
}

// mergeDue reports whether layers of a replica are to be merged: nobody tried yet, or the last try failed.
func (d *Data) mergeDue(uid string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, due := d.untidy[uid]
	return due || d.stuck[uid].tries > 0
}

// merges writes into a replica's status whether its layers can be merged.
func (l *replicaLoop) merges(r *api.Replica, disk *stack.Disk) {
	l.mu.Lock()
	now, known := l.stuck[string(r.Spec.UID)]
	l.mu.Unlock()
	switch {
	case !known && r.Status.MergeError != "": // of a former process: it is found out anew
		l.mergeSoon(disk, string(r.Spec.UID), r.Spec.Volume)
		l.tidy(disk)
	case known && now.tries == 0:
		r.Status.MergeError = ""
	case now.tries >= stuckAfter:
		r.Status.MergeError = now.why
	}
}

// unfinished is a try to merge layers of which some could not be finished: they have no digests, and are not merged.
func unfinished(disk *stack.Disk, uid string, failed map[string]error) error {
	if len(failed) == 0 {
		return nil
	}
	m, err := disk.Stack(uid)
	if err != nil {
		return nil // told elsewhere
	}
	for _, layer := range m.All() {
		if err := failed[layer]; err != nil {
			return fmt.Errorf("layer %s has no digests yet: %w", layer, err)
		}
	}
	return nil
}

// blame has the merges of the replicas looked at that name a layer which could not be finished.
func (d *Data) blame(disk *stack.Disk, failed map[string]error) {
	if len(failed) == 0 {
		return
	}
	all, err := disk.Replicas()
	if err != nil {
		d.Log.Warn("some replicas cannot be read", "disk", disk.Path(), "err", err)
	}
	for _, m := range all {
		if slices.ContainsFunc(m.All(), func(l string) bool { return failed[l] != nil }) {
			d.mergeSoon(disk, m.UID, m.Volume)
		}
	}
}
