package replicas

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/attempts"
)

// memberSpec has what a later process must know of a replica without the API.
type memberSpec struct {
	Name string  `json:"name"` // of the object
	UID  api.UID `json:"uid"`
	Node string  `json:"node"`
	Disk api.UID `json:"disk"`
	Path string  `json:"path,omitempty"` // of the disk, if this node has the disk
	Boot string  `json:"boot,omitempty"` // the boot of the other machine in the session
	// Absent: an engine of this device began without the member and has not dropped the member yet. No later process
	// adopts the member.
	Absent bool `json:"absent,omitempty"`
}

// mates has a session's state of the members, which the device record repeats, and of the goroutines that rebuild
// replicas.
type mates struct {
	tried  atomic.Int64 // the highest epoch that this engine has asked for
	cancel context.CancelFunc
	done   chan struct{}
	look   chan struct{} // wakes the rebuild goroutine
	turn   chan struct{} // held by the rebuild that resyncs a replica
	// joiners are the replicas that a rebuild is about to join, by uid.
	joiners *sync.Map
	most    atomic.Int64 // seconds that I/O waits for replicas; 0: without end
	fails   atomic.Bool  // I/O waited for longer, and fails
	// Counts of drops and rebuilds since the attach, for the metrics; compared and sent are bytes.
	dropped, deltas, fulls, compared, sent, repaired atomic.Int64
	repairs                                          attempts.Log[api.UID]

	keeping  sync.Mutex // until the holder has a blob that was read, so that none overtakes a newer one; before mu
	mu       sync.Mutex // guards the fields below, and Now, Members, Next, Joining and Alone of the blob
	news     []news
	rebuilds map[string]api.RebuildStatus
	compare  []fresh // snapshots that the members are to be compared in
}

// fresh is a new snapshot, and the snapshot before.
type fresh struct{ before, uid, name string }

// news is an event to emit.
type news struct{ kind, reason, text string }

func (m *mates) end() {
	if m.cancel != nil {
		m.cancel()
		<-m.done
		m.cancel = nil
	}
}

// at is the highest epoch that the session has asked for.
func (s *session) at() int64 { return max(s.mates.tried.Load(), s.Epoch) }

// snapshotBlob copies the blob.
func (s *session) snapshotBlob() blob {
	s.mates.mu.Lock()
	defer s.mates.mu.Unlock()
	b := s.blob
	b.Members = slices.Clone(b.Members)
	return b
}

// keepBlob writes the blob into the device record. A new device gets the record when the holder makes the device.
func (d *Data) keepBlob(s *session) error {
	s.mates.keeping.Lock()
	defer s.mates.keeping.Unlock()
	raw, err := json.Marshal(s.snapshotBlob())
	if err != nil {
		return err
	}
	if err := d.Host.SetBlob(string(s.VolumeUID), raw); err != nil && !api.Is(err, api.NotFound) {
		return err
	}
	return nil
}

// propose records a swap beforehand: if this process dies, its successor asks the API for the outcome.
func (d *Data) propose(s *session, epoch int64, joining *memberSpec) error {
	s.mates.mu.Lock()
	s.Next, s.Joining = epoch, joining
	s.mates.mu.Unlock()
	s.mates.tried.Store(epoch)
	return d.keepBlob(s)
}

// settled records the outcome of a swap.
func (d *Data) settled(s *session, epoch int64, change func(*blob)) {
	s.mates.mu.Lock()
	change(&s.blob)
	s.Now, s.Next, s.Joining = epoch, 0, nil
	s.mates.mu.Unlock()
	if err := d.keepBlob(s); err != nil {
		s.log.Error("what is kept with the device is old", "err", err)
	}
}

// dropper is the engine's way to take a member out of the volume's record.
func (d *Data) dropper(s *session) func(ctx context.Context, epoch int64, member string) error {
	drop := d.dropMember(s.blob)
	return func(ctx context.Context, epoch int64, member string) error {
		if !d.APIReached() { // before the proposal: a successor would have to ask the API for the outcome
			return api.Errorf(api.Unavailable, "volume %s: replica %s cannot be dropped before the API is reached",
				s.Volume, member)
		}
		if err := d.propose(s, epoch+1, nil); err != nil {
			return err
		}
		s.mates.mu.Lock()
		i := slices.IndexFunc(s.Members, func(m memberSpec) bool { return string(m.UID) == member })
		name := ""
		if i >= 0 {
			name = s.Members[i].Name
		}
		s.mates.mu.Unlock()
		if err := drop(ctx, epoch, name); err != nil {
			return err
		}
		d.settled(s, epoch+1, func(b *blob) {
			b.Members = slices.DeleteFunc(slices.Clone(b.Members), func(m memberSpec) bool { return string(m.UID) == member })
		})
		return nil
	}
}

// dropMember takes a member, by the name of its object, out of the volume's record.
func (d *Data) dropMember(b blob) func(ctx context.Context, epoch int64, name string) error {
	return func(ctx context.Context, epoch int64, name string) error {
		var v api.Volume
		if err := d.Reader.Get(ctx, client.ObjectKey{Name: b.Volume}, &v); apierrors.IsNotFound(err) {
			return api.Errorf(api.Denied, "volume %s does not exist any more", b.Volume)
		} else if err != nil {
			return api.Errorf(api.Unavailable, "volume %s: %w", b.Volume, err)
		}
		there := slices.Index(v.Status.Members, name)
		switch {
		case v.Status.UID != b.VolumeUID || v.Status.EngineNode != d.Name:
			return api.Errorf(api.Denied, "volume %s has its engine on node %s", b.Volume, v.Status.EngineNode)
		case v.Status.Epoch == epoch+1 && there < 0:
			return nil // an earlier call did it
		case v.Status.Epoch != epoch:
			return api.Errorf(api.Denied, "volume %s is at epoch %d, this engine at %d", b.Volume, v.Status.Epoch, epoch)
		case there < 0:
			return api.Errorf(api.Unavailable, "replica %s is no member of volume %s", name, b.Volume)
		}
		v.Status.Members = slices.Delete(v.Status.Members, there, there+1)
		v.Status.Epoch++
		if err := d.Client.Status().Update(ctx, &v); err != nil {
			return api.Errorf(api.Unavailable, "drop replica %s: %w", name, err)
		}
		return nil
	}
}

// ownerOf is the engine's way to ask the API whether the API still names this engine. The API may have made a swap that
// this engine asked for.
func (d *Data) ownerOf(b blob) func(ctx context.Context, epoch int64) error {
	return func(ctx context.Context, epoch int64) error {
		if !d.APIReached() {
			return api.Errorf(api.Unavailable, "node %s cannot ask the API yet", d.Name)
		}
		var v api.Volume
		if err := d.Reader.Get(ctx, client.ObjectKey{Name: b.Volume}, &v); apierrors.IsNotFound(err) {
			return api.Errorf(api.Denied, "volume %s does not exist any more", b.Volume)
		} else if err != nil {
			return api.Errorf(api.Unavailable, "volume %s: %w", b.Volume, err)
		}
		switch {
		case v.Status.UID != b.VolumeUID || v.Status.EngineNode != d.Name:
			return api.Errorf(api.Denied, "volume %s has its engine on node %q", b.Volume, v.Status.EngineNode)
		case v.Status.Epoch != epoch && v.Status.Epoch != epoch+1:
			return api.Errorf(api.Denied, "volume %s is at epoch %d, this engine at %d", b.Volume, v.Status.Epoch, epoch)
		}
		return nil
	}
}

// adder makes a replica a member in the volume's record.
func (d *Data) adder(s *session) func(ctx context.Context, epoch int64, member string) error {
	asked := int64(0) // the epoch in which the API was asked, with any outcome; one call at a time
	return func(ctx context.Context, epoch int64, member string) error {
		x, ok := s.mates.joiners.Load(member)
		if !ok {
			return api.Errorf(api.NotFound, "replica %s is not one that joins", member)
		}
		spec := x.(memberSpec)
		if err := d.propose(s, epoch+1, &spec); err != nil {
			return err
		}
		if err := d.add(ctx, s, epoch, spec, &asked); err != nil {
			if api.Is(err, api.NotFound) {
				d.settled(s, epoch, func(*blob) {})
			}
			return err
		}
		d.settled(s, epoch+1, func(b *blob) { b.Members = append(slices.Clone(b.Members), spec) })
		return nil
	}
}

// add makes the swap. After a request with an unknown outcome, add insists in the same epoch: "not found" would promise
// that the swap is never made.
func (d *Data) add(ctx context.Context, s *session, epoch int64, spec memberSpec, asked *int64) error {
	var v api.Volume
	if err := d.Reader.Get(ctx, client.ObjectKey{Name: s.Volume}, &v); err != nil {
		return api.Errorf(api.Unavailable, "volume %s: %w", s.Volume, err)
	}
	there := slices.Contains(v.Status.Members, spec.Name)
	switch {
	case v.Status.UID != s.VolumeUID || v.Status.EngineNode != d.Name:
		return api.Errorf(api.Denied, "volume %s has its engine on node %s", s.Volume, v.Status.EngineNode)
	case v.Status.Epoch == epoch+1 && there:
		return nil // an earlier call did it
	case v.Status.Epoch != epoch:
		return api.Errorf(api.Denied, "volume %s is at epoch %d, this engine at %d", s.Volume, v.Status.Epoch, epoch)
	}
	var r api.Replica
	switch err := d.Reader.Get(ctx, client.ObjectKey{Name: spec.Name}, &r); {
	case client.IgnoreNotFound(err) != nil:
		return api.Errorf(api.Unavailable, "replica %s: %w", spec.Name, err)
	case *asked != epoch && (err != nil || r.DeletionTimestamp != nil || r.Spec.Leave || r.Spec.UID != spec.UID):
		return api.Errorf(api.NotFound, "replica %s is being removed", spec.Name)
	}
	v.Status.Members = append(slices.Clone(v.Status.Members), spec.Name)
	v.Status.Epoch++
	*asked = epoch
	if err := d.Client.Status().Update(ctx, &v); err != nil {
		return api.Errorf(api.Unavailable, "add replica %s: %w", spec.Name, err)
	}
	return nil
}

// bound fails I/O that has waited for replicas longer than the setting allows.
func (d *Data) bound(ctx context.Context, s *session) {
	if d.APIReached() {
		s.mates.most.Store(d.Setting(ctx, settingLost))
	}
	fails, err := s.engine.FailAfter(ctx, time.Duration(s.mates.most.Load())*time.Second)
	if err != nil || s.mates.fails.Swap(fails) == fails {
		return
	}
	n := news{"Normal", "ReplicasBack", "a replica is reached again: I/O goes on"}
	if fails {
		n = news{"Warning", "IOFails", fmt.Sprintf("no replica was reached for %d s (%s): I/O fails until one is back",
			s.mates.most.Load(), settingLost)}
	}
	s.log.Warn(n.text)
	s.mates.mu.Lock()
	s.mates.news = append(s.mates.news, n)
	s.mates.mu.Unlock()
}

const settingLost = "all-replicas-lost-timeout"

// tellNews emits events about the volume.
func (d *Data) tellNews(ctx context.Context, s *session) {
	s.mates.mu.Lock()
	list := s.mates.news
	s.mates.news = nil
	s.mates.mu.Unlock()
	var v api.Volume
	if len(list) == 0 || !d.APIReached() || d.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) != nil {
		return
	}
	for _, n := range list {
		d.Events.Eventf(&v, nil, n.kind, n.reason, "Replicate", "%s", n.text)
	}
}

// rebuilding lists the rebuilds for the Attachment's status.
func (s *session) rebuilding() (list []api.RebuildStatus) {
	s.mates.mu.Lock()
	defer s.mates.mu.Unlock()
	for _, r := range s.mates.rebuilds {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b api.RebuildStatus) int {
		if a.Replica < b.Replica {
			return -1
		}
		return 1
	})
	return list
}

// every calls fn at once and then every so often, until ctx ends.
func every(ctx context.Context, pause time.Duration, fn func()) error {
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		fn()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
