package attach

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
func (as *reconciler) detach(ctx context.Context, a *api.Attachment) error {
	s := as.Session(a.Spec.Volume)
	if s == nil {
		for _, held := range as.host.Held() { // a device of the process before: the last writes must reach the disk
			if held.Name != a.Spec.Volume {
				continue
			}
			var err error
			if s, err = as.resumeLocked(ctx, held); err != nil {
				if err := as.discardDevice(ctx, a, held, err); err != nil {
					return err
				}
			}
		}
	}
	if s != nil && a.Annotations[api.AnnotationForce] != "" {
		if err := as.forceDetach(a, s); err != nil {
			return err
		}
	}
	if s != nil {
		var v api.Volume
		if as.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) == nil && v.Status.UID == s.VolumeUID {
			as.writeRecord(s, &v)
		}
		if err := as.reportUsed(ctx, s, true); err != nil && !apierrors.IsConflict(err) {
			return err
		}
		if err := as.detachSession(ctx, s); err != nil {
			return err
		}
	}
	as.reportLostDevices(ctx, a, "")
	if err := as.releaseClaim(ctx, a.Spec.Volume, anyEpoch); err != nil {
		return err
	}
	a.Status.Ready, a.Status.Device, a.Status.Size, a.Status.Message = false, "", 0, ""
	if controllerutil.RemoveFinalizer(a, api.Finalizer) {
		return client.IgnoreNotFound(as.Client.Update(ctx, a))
	}
	return nil
}

// forceDetach fails the I/O of a session: a user detached the volume by force.
func (as *reconciler) forceDetach(a *api.Attachment, s *Session) error {
	if err := s.dev.Abort(); err != nil {
		return err
	}
	if !s.forced {
		as.Events.Eventf(a, nil, "Warning", "Forced", "Detach", "a detach by force took the device of volume %s away: "+
			"unanswered I/O failed", s.Volume)
		as.Log.Warn("a device was taken away by force", "volume", s.Volume)
	}
	s.forced = true
	return nil
}

// discardDevice removes a held device that no process will serve again: the replica is destroyed, the disk is on
// another node now, a user has taken the missing disk out of the node, or a user detached the volume by force. The
// device's I/O fails. In any other case discardDevice returns why: the device stays, and I/O waits.
func (as *reconciler) discardDevice(ctx context.Context, a *api.Attachment, held device.Spec, why error) error {
	var b blob
	if err := json.Unmarshal(held.Blob, &b); err == nil && a.Annotations[api.AnnotationForce] == "" {
		if b.Disk == "" { // all members are on other nodes
			return why
		}
		if _, err := as.Disks.Open(ctx, b.Path, b.Disk, false); err == nil {
			if !api.Is(why, api.NotFound) && !api.Is(why, api.Corrupt) {
				return why
			}
		} else if gone, err := as.diskLeft(ctx, b); err != nil {
			return err
		} else if !gone { // no event reports the disk on another node
			return api.Errorf(api.Unavailable, "%w", why)
		}
	}
	if err := as.host.Discard(held.Key); err != nil {
		return err
	}
	as.Events.Eventf(a, nil, "Warning", "DeviceDiscarded", "Detach", "the device of volume %s cannot be served any more, "+
		"its unanswered I/O failed: %s", held.Name, why)
	as.Log.Error("a device that cannot be served any more was taken down", "volume", held.Name, "err", why)
	return nil
}

// diskLeft reports whether the disk of a held device surely left this node: a user took the disk out of the node, or
// another node has the disk and no other replica can serve the device.
func (as *reconciler) diskLeft(ctx context.Context, b blob) (bool, error) {
	if gone, err := as.DiskForgotten(ctx, b.Disk); gone || err != nil {
		return gone, err
	}
	if slices.ContainsFunc(b.Members, func(m memberSpec) bool { return m.Disk != b.Disk }) {
		return false, nil
	}
	var nodes api.NodeList
	if err := as.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return false, err
	}
	return api.DiskMovedTo(nodes.Items, b.Disk, as.Name, time.Now()) != "", nil
}

// detachSession removes a session's device, ends the session, and records a clean end.
func (as *Attachments) detachSession(ctx context.Context, s *Session) error {
	if s.full.Load() && s.fence.Load() == nil && !s.forced {
		// The flush below would wait in the kernel without end, and with the flush this process.
		return api.Errorf(api.InUse, "volume %s: writes wait because %s: make room there, or delete files on the "+
			"volume; the volume is detached then. `drover volume detach --force` fails the writes instead", s.Volume,
			as.fullDisks(ctx, s))
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	dctx, cancel := context.WithTimeout(ctx, detachTime)
	defer cancel()
	if !s.forced {
		watching.Go(func() { as.watchForce(dctx, s.Volume, cancel) })
	}
	if err := s.dev.Detach(dctx); err != nil {
		return err
	}
	as.removeSession(s)
	as.endSession(ctx, s)
	return as.releaseClaim(ctx, s.Volume, s.askedEpoch())
}

// watchForce ends a try to detach when a user detaches the volume by force.
func (as *Attachments) watchForce(ctx context.Context, volume string, enough func()) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var a api.Attachment
		if as.Client.Get(ctx, client.ObjectKey{Name: volume}, &a) == nil && a.Annotations[api.AnnotationForce] != "" {
			enough()
			return
		}
	}
}

// forcedTime is how long a forced detach waits for the engine.
const forcedTime = 5 * time.Second

// endSession ends a session whose device is gone. A forced end does not wait for a disk that hangs: no caller needs the
// answer, and the engine keeps the replica open until the disk answers, so that no other engine opens the replica. The
// force may come later, if the disk begins to hang here.
func (as *Attachments) endSession(ctx context.Context, s *Session) {
	ended := make(chan struct{})
	as.mu.Lock()
	as.left[s] = ended
	as.mu.Unlock()
	go func() { // Close awaits the goroutine for a bounded time
		if err := as.closeSession(s); err != nil {
			as.Log.Error("the end of a volume's engine", "volume", s.Volume, "err", err)
		}
		as.mu.Lock()
		delete(as.left, s)
		as.mu.Unlock()
		close(ended)
	}()
	var watching sync.WaitGroup
	defer watching.Wait()
	wait, enough := context.WithCancel(ctx)
	defer enough()
	if s.forced {
		defer time.AfterFunc(forcedTime, enough).Stop()
	} else {
		watching.Go(func() { as.watchForce(wait, s.Volume, enough) })
	}
	select {
	case <-ended:
	case <-wait.Done():
		if ctx.Err() != nil {
			return // this process ends, and awaits all sessions
		}
		as.Log.Warn("the disk of a volume does not answer after a detach by force: no process can open the replica "+
			"until the disk answers", "volume", s.Volume)
	}
}

// Ending is how many sessions end in the background.
func (as *Attachments) Ending() int {
	as.mu.Lock()
	defer as.mu.Unlock()
	return len(as.left)
}

// awaitLeft waits a bounded time for the sessions that end in the background, and returns how many have not ended.
func (as *Attachments) awaitLeft() int {
	late := time.NewTimer(forcedTime)
	defer late.Stop()
	for {
		as.mu.Lock()
		n := len(as.left)
		var next chan struct{}
		for _, next = range as.left {
			break
		}
		as.mu.Unlock()
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

// anyEpoch is for a caller that knows that this process, the only data process of the node, has no engine of the
// volume.
const anyEpoch = -1

// releaseClaim clears the engine's node in the volume, unless another engine has claimed a later epoch.
func (as *Attachments) releaseClaim(ctx context.Context, volume string, epoch int64) error {
	for {
		var v api.Volume
		if err := as.Reader.Get(ctx, client.ObjectKey{Name: volume}, &v); err != nil {
			return client.IgnoreNotFound(err)
		}
		if v.Status.EngineNode != as.Name || v.Status.Epoch != epoch && epoch != anyEpoch {
			return nil
		}
		v.Status.EngineNode = ""
		err := as.Client.Status().Update(ctx, &v)
		if !apierrors.IsConflict(err) {
			return client.IgnoreNotFound(err)
		}
	}
}
