package attach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/stack"
)

// resumeWait is how long Resume waits for all devices. A device whose disk hangs is resumed when the disk answers, and
// delays no other device.
const resumeWait = 5 * time.Second

// Resume resumes the devices that a predecessor left, each in its recorded epoch, without the API: waiting I/O
// continues. A device that cannot be resumed stays held, its I/O waits, and the error names the device. Resume tries
// such a device again in the background until the API answers; then the attachment reconciler does.
func (as *Attachments) Resume(ctx context.Context) error {
	type try struct {
		volume string
		err    error
	}
	held := as.host.Held()
	first := make(chan try, len(held))
	slow := map[string]bool{} // volumes whose first try has not ended
	as.mu.Lock()
	for _, spec := range held {
		as.resuming[spec.Name], slow[spec.Name] = true, true
	}
	as.mu.Unlock()
	var wg sync.WaitGroup
	for _, spec := range held {
		wg.Go(func() {
			defer as.Wake(spec.Name)
			defer as.endResume(spec.Name)
			_, err := as.resumeSession(ctx, spec)
			if err != nil {
				err = fmt.Errorf("volume %s: %w", spec.Name, err)
				as.Log.Error("device cannot be resumed yet, its I/O waits", "volume", spec.Name, "err", err)
			}
			first <- try{spec.Name, err}
			as.resumeAgain(ctx, spec, err)
		})
	}
	go func() { // ends with the resumes
		wg.Wait()
		close(as.resumed)
	}()
	var errs []error
	late := time.NewTimer(resumeWait)
	defer late.Stop()
	for expired := false; len(slow) > 0 && !expired; {
		select {
		case t := <-first:
			delete(slow, t.volume)
			errs = append(errs, t.err)
		case <-late.C:
			expired = true
		}
	}
	for volume := range slow {
		errs = append(errs, api.Errorf(api.Unavailable, "volume %s: its disk does not answer; I/O continues when the "+
			"disk answers", volume))
	}
	as.host.ThawLeft()
	return errors.Join(errs...)
}

// resumeAgain repeats a resume that failed with err until the API answers: from then on the attachment reconciler
// resumes the device. A disk, or the node of a member, may answer earlier than the API.
func (as *Attachments) resumeAgain(ctx context.Context, spec device.Spec, err error) {
	for err != nil && !as.APIReached() && !errors.Is(err, stack.ErrRestarted) && !api.Is(err, api.Denied) {
		pause := time.NewTimer(localnode.ResumePause)
		select {
		case <-pause.C:
		case <-as.closing:
			pause.Stop()
			return
		case <-ctx.Done():
			pause.Stop()
			return
		}
		_, err = as.resumeSession(ctx, spec)
	}
}

func (as *Attachments) endResume(volume string) {
	as.mu.Lock()
	defer as.mu.Unlock()
	delete(as.resuming, volume)
}

// Resuming reports whether a volume's device is being resumed. A reconciler then looks again later, instead of
// waiting for the volume's lock while others wait for the reconciler.
func (as *Attachments) Resuming(volume string) bool {
	as.mu.Lock()
	defer as.mu.Unlock()
	return as.resuming[volume]
}

func (as *Attachments) resumeSession(ctx context.Context, spec device.Spec) (*Session, error) {
	defer as.Locks.Lock(spec.Name)()
	return as.resumeLocked(ctx, spec)
}

// resumeLocked resumes one device in the epoch that its record names. resumeLocked settles an unfinished swap first,
// which needs the API. The caller has the volume's lock.
func (as *Attachments) resumeLocked(ctx context.Context, spec device.Spec) (*Session, error) {
	var b blob
	if err := json.Unmarshal(spec.Blob, &b); err != nil || string(b.VolumeUID) != spec.Key {
		return nil, api.Errorf(api.Corrupt, "volume %s: the device record makes no sense: %v", spec.Name, err)
	}
	b.upgrade(as.Name)
	for _, from := range b.Lenders {
		if _, err := as.Disks.Open(ctx, from.Path, from.Disk, false); err != nil {
			as.Log.Warn("a disk that layers are read from is not there", "volume", b.Volume, "err", err)
		}
	}
	if b.Next != 0 {
		if err := as.resolveSwap(ctx, &b); err != nil {
			return nil, err
		}
	}
	s, err := as.openSession(ctx, b, spec.Size, false)
	if api.Is(err, api.Denied) { // a member's word; the API knows
		if oerr := as.ownerOf(b)(ctx, b.Now); !api.Is(oerr, api.Denied) {
			return nil, api.Errorf(api.Unavailable, "volume %s: %w", b.Volume, errors.Join(err, oerr))
		}
	}
	if api.Is(err, api.Denied) || errors.Is(err, stack.ErrRestarted) {
		// Another engine has the volume, or acknowledged writes are lost: the device must not serve any more.
		return nil, errors.Join(err, as.host.Discard(spec.Key))
	}
	if err != nil {
		return nil, err
	}
	as.startRebuilds(s)
	want, err := s.deviceSpec()
	if err == nil {
		s.dev, err = as.host.Resume(ctx, want, s.loop.Loop, s.engine)
	}
	if err != nil {
		return nil, errors.Join(err, as.closeSession(s))
	}
	if err := as.writeBlob(s); err != nil {
		as.Log.Error("the device record is stale", "volume", s.Volume, "err", err)
	}
	as.addSession(s)
	as.Log.Info("device resumed", "volume", s.Volume, "device", s.dev.Path(), "epoch", s.Now)
	return s, nil
}

// resolveSwap asks the API for the outcome of a swap that a dead process had begun.
func (as *Attachments) resolveSwap(ctx context.Context, b *blob) error {
	if !as.APIReached() {
		return api.Errorf(api.Unavailable, "a swap of the members was in progress: the API server must be reached "+
			"to learn its outcome")
	}
	var v api.Volume
	if err := as.Reader.Get(ctx, client.ObjectKey{Name: b.Volume}, &v); err != nil {
		return api.Errorf(api.Unavailable, "a swap of the members was in progress: %w", err)
	}
	switch {
	case v.Status.UID != b.VolumeUID || v.Status.EngineNode != as.Name:
		return api.Errorf(api.Unavailable, "the engine of volume %s is on node %q by now: detach it here by force", b.Volume,
			v.Status.EngineNode)
	case v.Status.Epoch == b.Now:
		// The swap was not made. A request of the dead process may still arrive: this process takes the epoch, so that the
		// request comes too late.
		v.Status.Epoch = b.Next
		if err := as.Client.Status().Update(ctx, &v); err != nil {
			return api.Errorf(api.Unavailable, "a swap of the members was in progress: %w", err)
		}
		b.Now = b.Next
	case v.Status.Epoch == b.Next:
		all := b.Members
		if b.Joining != nil {
			all = append(slices.Clone(all), *b.Joining)
		}
		b.Members = nil
		for _, m := range all {
			if slices.Contains(v.Status.Members, m.Name) {
				b.Members = append(b.Members, m)
			}
		}
		b.Now = b.Next
	default:
		return api.Errorf(api.Unavailable, "volume %s is at epoch %d, and this engine knows %d: detach it here by force",
			b.Volume, v.Status.Epoch, b.Now)
	}
	b.Next, b.Joining = 0, nil
	return nil
}
