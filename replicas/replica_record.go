package replicas

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// noteTime is how long a reconciler waits for the record on the disk.
const noteTime = 5 * time.Second

// note brings the record on the disk up to date. Without it a later recovery knows an older wish, nothing worse: a disk
// that hangs keeps nobody waiting, and when it goes on the volume is looked at again.
func (d *Data) note(s *session, v *api.Volume) {
	object, err := v.Record()
	if m := s.member(); err == nil && m != nil && s.noting.CompareAndSwap(false, true) {
		noted := make(chan struct{})
		var told error
		go func() {
			told = m.Note(object)
			s.noting.Store(false)
			close(noted)
		}()
		late := time.NewTimer(noteTime)
		defer late.Stop()
		select {
		case <-noted:
			err = told
		case <-late.C:
			err = api.Errorf(api.Unavailable, "its disk does not answer")
			go func() {
				<-noted
				s.wake()
			}()
		}
	}
	if err != nil {
		d.Log.Warn("the volume's record on the disk stays as it was", "volume", s.Volume, "err", err)
	}
}

// freedEvery is how often replicas with mergeable layers are looked for without anything known to have gone.
const freedEvery = 5 * time.Minute

// beat renews the used bytes of attached replicas until ctx ends.
func (d *Data) beat(ctx context.Context) error {
	tick := time.NewTicker(d.Heartbeat)
	defer tick.Stop()
	var beside sync.WaitGroup // it may have to wait for a volume
	defer beside.Wait()
	var reclaims, unpins atomic.Bool
	for looked := time.Now(); ; {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		d.scrubber.WakeDue(ctx)
		look := time.Since(looked) > freedEvery
		if look { // images are deleted by another process
			looked = time.Now()
		}
		for _, disk := range d.Disks.Except(nil) {
			disk.DropHydrating()
			if look {
				d.mergeWorker.Freed(disk)
			}
		}
		if reclaims.CompareAndSwap(false, true) {
			beside.Go(func() {
				defer reclaims.Store(false)
				d.reclaimAll(ctx, look)
			})
		}
		if unpins.CompareAndSwap(false, true) { // on disks that failed, and may hang now
			beside.Go(func() {
				defer unpins.Store(false)
				d.replicas.UnpinLeft()
			})
		}
		for _, s := range d.all() {
			if err := d.renew(ctx, s, false); err != nil && ctx.Err() == nil && !apierrors.IsConflict(err) {
				d.Log.Warn("used bytes cannot be written", "volume", s.Volume, "err", err)
			}
		}
	}
}

// renew writes what a session's replicas here take on their disks, if it has changed enough or for sure. A disk that
// cannot be asked is passed over.
func (d *Data) renew(ctx context.Context, s *session, sure bool) error {
	var list api.ReplicaList
	if err := d.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
		return err
	}
	for i := range list.Items {
		r := &list.Items[i]
		open := s.local(r.Spec.UID)
		if open == nil || r.Spec.VolumeUID != s.VolumeUID || r.DeletionTimestamp != nil {
			continue
		}
		disk, err := d.Disks.Get(r.Spec.Disk)
		var used, shared int64
		if err == nil {
			used, shared, err = disk.Space(string(r.Spec.UID))
		}
		if err != nil { // the volume may do without this disk by now
			s.log.Warn("what a replica takes is not known", "replica", r.Name, "err", err)
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
		if err := d.Client.Status().Patch(ctx, r, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
