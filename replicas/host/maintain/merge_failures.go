package maintain

import (
	"context"
	"fmt"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// The worker tries a failed merge again without end. A merge that fails more than once is reported in the
// Replica's status, and from there in a condition and an event of the volume, until it succeeds.

// failsAfter is how many tries in a row must have failed.
const failsAfter = 2

// failure has the outcome of the last merges of a replica.
type failure struct {
	tries int    // in a row that failed
	why   string // empty: the last try succeeded
}

// mergeEnded notes how a try ended, and has the replica's status written if that has changed.
func (w *MergeWorker) mergeEnded(ctx context.Context, uid, volume string, err error) {
	w.mu.Lock()
	was, known := w.failures[uid]
	now := failure{}
	if err != nil {
		now = failure{was.tries + 1, err.Error()}
	}
	w.failures[uid] = now
	w.mu.Unlock()
	// The first that succeeds is reported, too: a former process may have reported that it fails.
	report := now.tries == failsAfter || now.tries > failsAfter && was.why != now.why ||
		err == nil && (!known || was.tries >= failsAfter)
	if report {
		w.node.MergeReported(ctx, uid, volume)
	}
}

// Forget forgets a replica that was removed.
func (w *MergeWorker) Forget(replica string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.failures, replica)
}

// Fails is why several tries to merge layers of a replica failed; empty: they did not.
func (w *MergeWorker) Fails(replica string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := w.failures[replica]; now.tries >= failsAfter {
		return now.why
	}
	return ""
}

// IsDue reports whether layers of a replica are to be merged: no try was made yet, or the last try failed.
func (w *MergeWorker) IsDue(replica string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, is := w.due[replica]
	return is || w.failures[replica].tries > 0
}

// Report writes into a replica's status whether its layers can be merged.
func (w *MergeWorker) Report(r *api.Replica, disk *stack.Disk) {
	w.mu.Lock()
	now, known := w.failures[string(r.Spec.UID)]
	w.mu.Unlock()
	switch {
	case !known && r.Status.MergeError != "": // of a former process: a try decides
		w.Merge(disk, string(r.Spec.UID), r.Spec.Volume)
	case known && now.tries == 0:
		r.Status.MergeError = ""
	case now.tries >= failsAfter:
		r.Status.MergeError = now.why
	}
}

// unfinishedError is the error of a merge whose layers could not be finished: a layer without digests is not merged.
func unfinishedError(disk *stack.Disk, uid string, failed map[string]error) error {
	if len(failed) == 0 {
		return nil
	}
	m, err := disk.Stack(uid)
	if err != nil {
		return nil // the merge itself reports the error
	}
	for _, layer := range m.AllLayers() {
		if err := failed[layer]; err != nil {
			return fmt.Errorf("layer %s has no digests yet: %w", layer, err)
		}
	}
	return nil
}

// markFailedDue marks the replicas as due that name a layer which could not be finished: their merges report the
// failure.
func (w *MergeWorker) markFailedDue(disk *stack.Disk, failed map[string]error) {
	if len(failed) == 0 {
		return
	}
	all, err := disk.Replicas()
	if err != nil {
		w.log.Warn("some replicas cannot be read", "disk", disk.Path(), "err", err)
	}
	for _, m := range all {
		if slices.ContainsFunc(m.AllLayers(), func(l string) bool { return failed[l] != nil }) {
			w.Due(disk, m.UID, m.Volume)
		}
	}
}
