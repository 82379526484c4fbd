package replicas

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// record is what a disk keeps of a volume's object; nil where there is no object.
func (d *Data) record(ctx context.Context, volume string) (json.RawMessage, error) {
	var v api.Volume
	err := d.client.Get(ctx, client.ObjectKey{Name: volume}, &v)
	if apierrors.IsNotFound(err) { // the cache of volumes can be behind that of replicas
		err = d.reader.Get(ctx, client.ObjectKey{Name: volume}, &v)
	}
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	return v.Record()
}

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
		for _, disk := range d.disks.Except(nil) {
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
				d.unpinLeft()
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
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
		return err
	}
	for i := range list.Items {
		r := &list.Items[i]
		open := s.local(r.Spec.UID)
		if open == nil || r.Spec.VolumeUID != s.VolumeUID || r.DeletionTimestamp != nil {
			continue
		}
		disk, err := d.disks.Get(r.Spec.Disk)
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
		if err := d.client.Status().Patch(ctx, r, client.MergeFrom(old)); client.IgnoreNotFound(err) != nil {
			return err
		}
	}
	return nil
}
