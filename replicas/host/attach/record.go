package attach

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// recordTime is how long a reconciler waits for the record on the disk.
const recordTime = 5 * time.Second

// writeRecord writes the record of the volume's object to the local member's disk. With an older record a recovery
// knows an older wish, nothing worse: writeRecord does not wait for a disk that hangs, and wakes the reconciler when
// the disk answers.
func (as *Attachments) writeRecord(s *Session, v *api.Volume) {
	object, err := v.Record()
	if m := s.replicaHere(); err == nil && m != nil && s.noting.CompareAndSwap(nil, m) {
		noted := make(chan struct{})
		var result error
		go func() {
			result = m.Note(object)
			s.noting.Store(nil)
			close(noted)
		}()
		late := time.NewTimer(recordTime)
		defer late.Stop()
		select {
		case <-noted:
			err = result
		case <-late.C:
			err = api.Errorf(api.Unavailable, "the disk of the replica does not answer")
			go func() {
				<-noted
				s.wake()
			}()
		}
	}
	if err != nil {
		as.Log.Warn("the volume's record on the disk stays as it was", "volume", s.Volume, "err", err)
	}
}

// ReportUsed reports the used bytes of all sessions' replicas on this node.
func (as *Attachments) ReportUsed(ctx context.Context) {
	for _, s := range as.Sessions() {
		if err := as.reportUsed(ctx, s, false); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
			as.Log.Warn("used bytes cannot be written", "volume", s.Volume, "err", err)
		}
	}
}

// reportUsed reports the used bytes of a session's replicas on this node, after a large change; sure: after any change.
// A disk that does not answer is left out.
func (as *Attachments) reportUsed(ctx context.Context, s *Session, sure bool) error {
	var list api.ReplicaList
	if err := as.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
		return err
	}
	for i := range list.Items {
		r := &list.Items[i]
		open := s.localReplica(r.Spec.UID)
		if open == nil || r.Spec.VolumeUID != s.VolumeUID || r.DeletionTimestamp != nil {
			continue
		}
		disk, err := as.Disks.Get(r.Spec.Disk)
		var used, shared int64
		if err == nil {
			used, shared, err = disk.Space(string(r.Spec.UID))
		}
		if err != nil { // the volume may do without this disk by now
			s.log.Warn("the used bytes of a replica are unknown", "replica", r.Name, "err", err)
			continue
		}
		epoch := open.Meta().Epoch
		diff := max(used-r.Status.Used, r.Status.Used-used) + max(shared-r.Status.Shared, r.Status.Shared-shared)
		if epoch == r.Status.Epoch && (diff == 0 || !sure && diff < max(1<<20, used/100)) {
			continue
		}
		old := r.DeepCopy()
		r.Status.Used, r.Status.UsedText = used, api.SizeText(used)
		r.Status.Shared, r.Status.Epoch = shared, epoch
		if err := as.Client.Status().Patch(ctx, r, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
