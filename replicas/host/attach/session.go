package attach

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/stack"
)

// blob is the device record, which a later process reads to resume the device without the API.
type blob struct {
	Volume    string  `json:"volume"`
	VolumeUID api.UID `json:"volumeUID"`
	Replica   api.UID `json:"replica,omitempty"` // the local member; empty: all members are on other nodes
	Disk      api.UID `json:"disk,omitempty"`
	Path      string  `json:"path,omitempty"` // of the disk
	Epoch     int64   `json:"epoch"`          // in which the device was made
	// The epoch now with its members, and the epoch and replica of a swap whose outcome is not known.
	Now      int64        `json:"now,omitempty"`
	Members  []memberSpec `json:"members,omitempty"`
	Next     int64        `json:"next,omitempty"`
	Joining  *memberSpec  `json:"joining,omitempty"`
	ReadOnly bool         `json:"readOnly,omitempty"`
	// Alone: the volume has one replica, and the engine notes no intents.
	Alone bool `json:"alone,omitempty"`
	// Lenders are source disks in blobs of older versions. Newer versions keep a source in the layer's hydrating.json.
	Lenders []lender `json:"lenders,omitempty"`
}

// upgrade names the member in an older record of a volume with one replica, which has no members. Upgrade does not know
// the name of the Replica object: noteIntents asks for the name.
func (b *blob) upgrade(node string) {
	if len(b.Members) > 0 {
		return
	}
	b.Now, b.Alone = b.Epoch, true
	b.Members = []memberSpec{{UID: b.Replica, Node: node, Disk: b.Disk, Path: b.Path}}
}

type lender struct {
	Disk api.UID `json:"disk"`
	Path string  `json:"path"`
}

// Session is a volume attached on this node: its member, engine and device.
type Session struct {
	blob
	log        *slog.Logger
	loop       *iothreads.Thread
	local      sync.Map // api.UID to *stack.Replica: the replicas here that are or were members; a rebuild replaces one
	engine     *engine.Engine
	size       atomic.Int64
	serving    atomic.Pointer[engine.Engine] // the engine, once it is open
	membership membership
	dev        *device.Device
	blank      bool // when the device was made

	wasFull bool // as the Attachment says; under the volume's lock
	forced  bool // the device was taken away by force; under the volume's lock

	trim   atomic.Pointer[trimRun] // the last one
	owed   atomic.Bool             // a trim asked for space that is not freed yet
	zeroed atomic.Int64            // zeroed bytes of the head at the last look for a reclaim
	// noting is the replica whose record is being written, or nil: the owner of the volume's lock does not call it.
	noting atomic.Pointer[stack.Replica]

	full   atomic.Bool // writes wait for room
	fence  atomic.Pointer[error]
	wakeUp chan struct{} // a field above changed
	cancel context.CancelFunc
	ended  chan struct{} // watchEngine has returned
}

// probeEvery is how often one write probes for room while others wait: a file system does not report room.
const probeEvery = time.Second

// engineConfig has the options that the engines of all sessions share.
func (as *Attachments) engineConfig(s *Session, size, epoch int64) engine.Config {
	s.size.Store(size)
	return engine.Config{
		Loop: s.loop, Pool: s.loop.Pool, Size: size, Epoch: epoch, Incarnation: as.host.Incarnation(), ReadOnly: s.ReadOnly,
		Drop: as.dropperOf(s), Add: as.adderOf(s), Owns: as.ownerOf(s.blob),
		OnDrop: func(member string, why error) {
			s.log.Warn("a replica was dropped", "replica", member, "err", why)
			s.membership.dropped.Add(1)
			s.membership.mu.Lock()
			s.membership.events = append(s.membership.events, event{"Warning", "ReplicaDropped",
				fmt.Sprintf("the volume is degraded, it continues without a replica: %v", why)})
			s.membership.mu.Unlock()
			s.wake()
			s.membership.wakeRebuilds()
		},
		OnSpace: func(full bool) { s.full.Store(full); s.wake() },
		OnFence: func(err error) { s.fence.Store(&err); s.wake() },
	}
}

// openHere opens a replica of this node for an engine of this node. An engine of another node loses the replica.
func (as *Attachments) openHere(ctx context.Context, disk *stack.Disk, uid string,
	loop *iothreads.Thread) (*stack.Replica, error) {
	if err := as.remote.Release(uid); err != nil {
		as.Log.Warn("the end of a session of another node", "replica", uid, "err", err)
	}
	return disk.OpenReplica(ctx, uid, loop.Loop)
}

// newSession has no engine yet.
func (as *Attachments) newSession(b blob, loop *iothreads.Thread) *Session {
	b.Lenders = nil
	s := &Session{log: as.Log.With("volume", b.Volume), loop: loop,
		wakeUp: make(chan struct{}, 1), ended: make(chan struct{})}
	s.membership.look, s.membership.turn = make(chan struct{}, 1), make(chan struct{}, 1)
	s.membership.joiners, s.membership.rebuilds = &sync.Map{}, map[string]api.RebuildStatus{}
	s.blob = b
	return s
}

// usesReplica reports whether the engine has a replica.
func (s *Session) usesReplica(ctx context.Context, uid api.UID) (bool, error) {
	if _, joins := s.membership.joiners.Load(string(uid)); joins {
		return true, nil
	}
	_, members, err := s.engine.Epoch(ctx)
	return slices.Contains(members, string(uid)), err
}

// localReplica is a replica of the session on this node, now or before; nil: the replica never was.
func (s *Session) localReplica(uid api.UID) *stack.Replica {
	if x, is := s.local.Load(uid); is {
		return x.(*stack.Replica)
	}
	return nil
}

// localMember is a member on a node, or "".
func (s *Session) localMember(node string) api.UID {
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	for _, m := range s.Members {
		if m.Node == node {
			return m.UID
		}
	}
	return ""
}

// replicaHere is the replica of the session's first member on this node, or nil.
func (s *Session) replicaHere() *stack.Replica {
	_, r := s.memberHere()
	return r
}

// memberHere is the session's first member on this node with its replica; without one the replica is nil. A replica
// that replaces the member on another disk of the node becomes the member here with its swap.
func (s *Session) memberHere() (memberSpec, *stack.Replica) {
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	return s.memberHereLocked()
}

// memberHereLocked is memberHere for a caller with the mutex of the membership.
func (s *Session) memberHereLocked() (memberSpec, *stack.Replica) {
	for _, m := range s.Members {
		if r := s.localReplica(m.UID); r != nil {
			return m, r
		}
	}
	return memberSpec{}, nil
}

func (s *Session) wake() {
	select {
	case s.wakeUp <- struct{}{}:
	default: // a wake-up is pending
	}
}

// startWatch starts watchEngine in a goroutine, for a session with a device; changed is called after each change of
// state.
func (s *Session) startWatch(changed func()) {
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() {
		defer close(s.ended)
		s.watchEngine(ctx, changed)
	}()
}

// watchEngine tries the writes that wait for room, and takes the device down after a fence.
func (s *Session) watchEngine(ctx context.Context, changed func()) {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	tick.Stop()
	full, fenced := false, false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.engine.Retry()
			continue
		case <-s.wakeUp:
		}
		if now := s.full.Load(); now != full {
			if full = now; full {
				s.log.Warn("no replica has room, writes wait")
				tick.Reset(probeEvery)
			} else {
				s.log.Info("a disk has room again, writes continue")
				tick.Stop()
			}
		}
		if why := s.fence.Load(); why != nil && !fenced {
			fenced = true
			s.log.Error("another engine has taken over the volume, the device is taken down", "err", *why)
			if err := s.dev.Abort(); err != nil {
				s.log.Error("device cannot be taken down", "err", err)
			}
		}
		changed()
	}
}

// retryFull wakes the writes that wait, because the disk may have got room.
func (s *Session) retryFull() {
	if s.full.Load() {
		s.engine.Retry()
	}
}

// closeSession ends a session whose device is gone.
func (as *Attachments) closeSession(s *Session) error {
	if s.cancel != nil {
		s.cancel()
		<-s.ended
	}
	s.engine.Hurry() // the device is gone: the engine awaits no member any more
	s.membership.stopRebuilds()
	err := s.engine.Close()
	as.Threads.PutBack(s.loop)
	if err != nil && s.fence.Load() != nil { // another engine has the volume, and marks the clean end
		s.log.Info("a fenced session has no clean end", "err", err)
		return nil
	}
	return err
}

// expand makes members, then the device, size bytes long.
func (s *Session) expand(ctx context.Context, size int64) error {
	if s.fence.Load() != nil {
		return api.Errorf(api.Denied, "the volume was taken over by another engine")
	}
	if s.size.Load() < size {
		if err := s.engine.Expand(ctx, size); err != nil {
			return err
		}
		s.size.Store(size)
	}
	if s.dev.Spec().Size < size {
		return s.dev.Resize(ctx, size)
	}
	return nil
}

func (s *Session) deviceSpec() (device.Spec, error) {
	raw, err := json.Marshal(s.snapshotBlob())
	if err != nil {
		return device.Spec{}, fmt.Errorf("volume %s: %w", s.Volume, err)
	}
	return device.Spec{Key: string(s.VolumeUID), Name: s.Volume, Size: s.size.Load(), ReadOnly: s.ReadOnly,
		Blob: raw}, nil
}

// Device is the device of the session; nil: an offline engine has none.
func (s *Session) Device() *device.Device { return s.dev }

// Fenced is why another engine has the volume; nil: no other engine has the volume.
func (s *Session) Fenced() error {
	if why := s.fence.Load(); why != nil {
		return *why
	}
	return nil
}
