package attach

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/attempts"
)

// memberSpec is a member in the device record, for a later process without the API.
type memberSpec struct {
	Name string  `json:"name"` // of the object
	UID  api.UID `json:"uid"`
	Node string  `json:"node"`
	Disk api.UID `json:"disk"`
	Path string  `json:"path,omitempty"` // of the disk, if this node has the disk
	Boot string  `json:"boot,omitempty"` // the boot of the other machine in the session
	// Missing: an engine of this device began without the member and has not dropped the member yet. No later process
	// adopts the member.
	Missing bool `json:"absent,omitempty"`
}

// membership is the state of a session's members, which the device record repeats, and of the goroutines that rebuild
// replicas.
type membership struct {
	tried  atomic.Int64 // the highest epoch that this engine has asked for
	cancel context.CancelFunc
	done   chan struct{}
	look   chan struct{} // wakes the rebuild goroutine
	turn   chan struct{} // held by the rebuild that resyncs a replica
	// joiners describe the replicas that a rebuild is about to join, by uid: func() memberSpec.
	joiners *sync.Map
	most    atomic.Int64 // seconds that I/O waits for replicas; 0: without end
	fails   atomic.Bool  // I/O waited for longer, and fails
	// Counts of drops and rebuilds since the attach, for the metrics; compared and sent are bytes.
	dropped, deltas, fulls, compared, sent, repaired atomic.Int64
	repairs                                          attempts.Log[api.UID]

	recording sync.Mutex // held until the holder has the blob, so that no older blob overtakes a newer blob; before mu
	leaving   bool       // guarded by recording: this process gives its devices up
	mu        sync.Mutex // guards the fields below, and Now, Members, Next, Joining and Alone of the blob
	events    []event
	rebuilds  map[string]api.RebuildStatus
	compare   []fresh // snapshots to compare on all members
}

// fresh is a new snapshot, and the snapshot before.
type fresh struct{ uid, name string }

// event is an event to emit.
type event struct{ kind, reason, text string }

func (m *membership) stopRebuilds() {
	if m.cancel != nil {
		m.cancel()
		<-m.done
		m.cancel = nil
	}
}

// askedEpoch is the highest epoch that the session has asked for.
func (s *Session) askedEpoch() int64 { return max(s.membership.tried.Load(), s.Epoch) }

// snapshotBlob copies the blob.
func (s *Session) snapshotBlob() blob {
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	b := s.blob
	b.Members = slices.Clone(b.Members)
	if m, r := s.memberHereLocked(); r != nil {
		b.Replica, b.Disk, b.Path = m.UID, m.Disk, m.Path
	}
	return b
}

// writeBlob writes the blob into the device record. A new device gets the record when the holder makes the device.
func (as *Attachments) writeBlob(s *Session) error {
	s.membership.recording.Lock()
	defer s.membership.recording.Unlock()
	return as.writeBlobLocked(s)
}

// writeBlobLocked is writeBlob for a caller with the recording lock.
func (as *Attachments) writeBlobLocked(s *Session) error {
	raw, err := json.Marshal(s.snapshotBlob())
	if err != nil {
		return err
	}
	if err := as.host.SetBlob(string(s.VolumeUID), raw); err != nil && !api.Is(err, api.NotFound) {
		return err
	}
	return nil
}

// boundWait fails I/O that has waited for replicas longer than the setting allows.
func (as *Attachments) boundWait(ctx context.Context, s *Session) {
	if as.APIReached() {
		s.membership.most.Store(as.Setting(ctx, settingLost))
	}
	fails, err := s.engine.FailAfter(ctx, time.Duration(s.membership.most.Load())*time.Second)
	if err != nil || s.membership.fails.Swap(fails) == fails {
		return
	}
	n := event{"Normal", "ReplicasBack", "a replica is reached again: I/O continues"}
	if fails {
		n = event{"Warning", "IOFails", fmt.Sprintf("no replica was reached for %d s (%s): I/O fails until one is back",
			s.membership.most.Load(), settingLost)}
	}
	s.log.Warn(n.text)
	s.membership.mu.Lock()
	s.membership.events = append(s.membership.events, n)
	s.membership.mu.Unlock()
}

const settingLost = "all-replicas-lost-timeout"

// emitEvents emits events about the volume.
func (as *Attachments) emitEvents(ctx context.Context, s *Session) {
	s.membership.mu.Lock()
	list := s.membership.events
	s.membership.events = nil
	s.membership.mu.Unlock()
	var v api.Volume
	if len(list) == 0 || !as.APIReached() || as.Client.Get(ctx, client.ObjectKey{Name: s.Volume}, &v) != nil {
		return
	}
	for _, n := range list {
		as.Events.Eventf(&v, nil, n.kind, n.reason, "Replicate", "%s", n.text)
	}
}

// listRebuilds lists the rebuilds for the Attachment's status.
func (s *Session) listRebuilds() (list []api.RebuildStatus) {
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	for _, r := range s.membership.rebuilds {
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

// callEvery calls fn at once and then every so often, until ctx ends.
func callEvery(ctx context.Context, pause time.Duration, fn func()) error {
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
