package replicas

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
)

// detachTime bounds one try to detach; the next try continues.
const detachTime = 30 * time.Second

// detach removes the device, releases the volume, and removes the finalizer of the object.
func (l *attachmentLoop) detach(ctx context.Context, a *api.Attachment) error {
	s := l.session(a.Spec.Volume)
	if s == nil {
		for _, held := range l.Host.Held() { // a predecessor's: its last writes must reach the disk
			if held.Name != a.Spec.Volume {
				continue
			}
			var err error
			if s, err = l.resumeLocked(ctx, held); err != nil {
				if err := l.discard(ctx, a, held, err); err != nil {
					return err
				}
			}
		}
	}
	if s != nil && a.Annotations[api.AnnotationForce] != "" {
		if err := l.force(a, s); err != nil {
			return err
		}
	}
	if s != nil {
		var v api.Volume
		if l.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) == nil && v.Status.UID == s.VolumeUID {
			l.note(s, &v)
		}
		if err := l.renew(ctx, s, true); err != nil && !apierrors.IsConflict(err) {
			return err
		}
		if err := l.end(ctx, s); err != nil {
			return err
		}
	}
	l.lost(ctx, a, "")
	if err := l.giveBack(ctx, a.Spec.Volume, anyEpoch); err != nil {
		return err
	}
	a.Status.Ready, a.Status.Device, a.Status.Size, a.Status.Message = false, "", 0, ""
	if controllerutil.RemoveFinalizer(a, api.Finalizer) {
		return client.IgnoreNotFound(l.Client.Update(ctx, a))
	}
	return nil
}

// force fails the I/O of a session: a user detached the volume by force.
func (l *attachmentLoop) force(a *api.Attachment, s *session) error {
	if err := s.dev.Abort(); err != nil {
		return err
	}
	if !s.forced {
		l.Events.Eventf(a, nil, "Warning", "Forced", "Detach", "the device of volume %s was taken away by force: I/O that "+
			"was not answered failed", s.Volume)
		l.Log.Warn("a device was taken away by force", "volume", s.Volume)
	}
	s.forced = true
	return nil
}

// discard removes a held device that no process will serve again: its replica is destroyed, the disk is on another node
// now, a user has taken the missing disk out of the node, or a user detached the volume by force. The device's I/O
// fails. In any other case discard returns why: the device stays, and its I/O waits.
func (l *attachmentLoop) discard(ctx context.Context, a *api.Attachment, held device.Spec, why error) error {
	var b blob
	if err := json.Unmarshal(held.Blob, &b); err == nil && a.Annotations[api.AnnotationForce] == "" {
		if b.Disk == "" { // all members are on other nodes
			return why
		}
		if _, err := l.Disks.Open(ctx, b.Path, b.Disk, false); err == nil {
			if !api.Is(why, api.NotFound) && !api.Is(why, api.Corrupt) {
				return why
			}
		} else if gone, err := l.diskLeft(ctx, b); err != nil {
			return err
		} else if !gone { // no event reports the disk on another node
			return api.Errorf(api.Unavailable, "%w", why)
		}
	}
	if err := l.Host.Discard(held.Key); err != nil {
		return err
	}
	l.Events.Eventf(a, nil, "Warning", "DeviceDiscarded", "Detach", "the device of volume %s cannot be served any more, "+
		"its unanswered I/O failed: %s", held.Name, why)
	l.Log.Error("a device that cannot be served any more was taken down", "volume", held.Name, "err", why)
	return nil
}

// diskLeft reports whether the disk of a held device surely left this node: a user took the disk out of the node, or
// another node has the disk and no other replica can serve the device.
func (d *Data) diskLeft(ctx context.Context, b blob) (bool, error) {
	if gone, err := d.DiskForgotten(ctx, b.Disk); gone || err != nil {
		return gone, err
	}
	if slices.ContainsFunc(b.Members, func(m memberSpec) bool { return m.Disk != b.Disk }) {
		return false, nil
	}
	var nodes api.NodeList
	if err := d.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	return api.DiskMovedTo(nodes.Items, b.Disk, d.Name, time.Now()) != "", nil
}

// end removes a session's device, ends the session, and records a clean end.
func (d *Data) end(ctx context.Context, s *session) error {
	if s.full.Load() && s.fence.Load() == nil && !s.forced {
		// The flush below would wait in the kernel without end, and with the flush this process.
		return api.Errorf(api.InUse, "writes to the volume wait because %s: make room there, or delete what "+
			"is not needed on it; the volume is detached then. `drover volume detach --force` fails them instead",
			d.fullDisks(ctx, s))
	}
	var heed sync.WaitGroup
	defer heed.Wait()
	dctx, cancel := context.WithTimeout(ctx, detachTime)
	defer cancel()
	if !s.forced {
		heed.Go(func() { d.heedForce(dctx, s.Volume, cancel) })
	}
	if err := s.dev.Detach(dctx); err != nil {
		return err
	}
	d.forget(s)
	d.leave(ctx, s)
	return d.giveBack(ctx, s.Volume, s.at())
}

// heedForce ends a try to detach when a user detaches the volume by force.
func (d *Data) heedForce(ctx context.Context, volume string, enough func()) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var a api.Attachment
		if d.Client.Get(ctx, client.ObjectKey{Name: volume}, &a) == nil && a.Annotations[api.AnnotationForce] != "" {
			enough()
			return
		}
	}
}

// forcedTime is how long a forced detach waits for the engine.
const forcedTime = 5 * time.Second

// leave ends a session whose device is gone. A forced leave does not wait for a disk that hangs: no caller needs the
// answer, and the engine keeps the replica open until the disk answers, so that no other engine opens the replica. The
// force may come later, if the disk begins to hang here.
func (d *Data) leave(ctx context.Context, s *session) {
	ended := make(chan struct{})
	d.mu.Lock()
	d.left[s] = ended
	d.mu.Unlock()
	go func() { // Close awaits the goroutine for a bounded time
		if err := d.close(s); err != nil {
			d.Log.Error("the end of a volume's engine", "volume", s.Volume, "err", err)
		}
		d.mu.Lock()
		delete(d.left, s)
		d.mu.Unlock()
		close(ended)
	}()
	var heed sync.WaitGroup
	defer heed.Wait()
	wait, enough := context.WithCancel(ctx)
	defer enough()
	if s.forced {
		defer time.AfterFunc(forcedTime, enough).Stop()
	} else {
		heed.Go(func() { d.heedForce(wait, s.Volume, enough) })
	}
	select {
	case <-ended:
	case <-wait.Done():
		if ctx.Err() != nil {
			return // this process ends, and awaits all sessions
		}
		d.Log.Warn("the disk of a volume that was detached by force does not answer: "+
			"its replica cannot be opened until it does", "volume", s.Volume)
	}
}

// awaitLeft waits a bounded time for the sessions that leave left behind, and returns how many have not ended.
func (d *Data) awaitLeft() int {
	late := time.NewTimer(forcedTime)
	defer late.Stop()
	for {
		d.mu.Lock()
		n := len(d.left)
		var next chan struct{}
		for _, next = range d.left {
			break
		}
		d.mu.Unlock()
		if n == 0 {
			return 0
		}
		select {
		case <-next:
		case <-late.C:
			return n
		}
	}
}

// anyEpoch is for a caller that knows that this node's only data process has no engine of the volume.
const anyEpoch = -1

// giveBack clears the engine's node in the volume if epoch is still the one that this node had claimed.
func (d *Data) giveBack(ctx context.Context, volume string, epoch int64) error {
	for {
		var v api.Volume
		if err := d.Reader.Get(ctx, client.ObjectKey{Name: volume}, &v); err != nil {
			return client.IgnoreNotFound(err)
		}
		if v.Status.EngineNode != d.Name || v.Status.Epoch != epoch && epoch != anyEpoch {
			return nil
		}
		v.Status.EngineNode = ""
		err := d.Client.Status().Update(ctx, &v)
		if !apierrors.IsConflict(err) {
			return client.IgnoreNotFound(err)
		}
	}
}
