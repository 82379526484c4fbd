package replicas

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

// blob is what the holder keeps beside a device: all that a later process needs to take it up without the API.
type blob struct {
	Volume    string  `json:"volume"`
	VolumeUID api.UID `json:"volumeUID"`
	Replica   api.UID `json:"replica,omitempty"` // the local member; empty: all are on other nodes
	Disk      api.UID `json:"disk,omitempty"`
	Path      string  `json:"path,omitempty"` // of the disk
	Epoch     int64   `json:"epoch"`          // that the device was made in
	// The epoch now and its members, and those of a swap whose outcome is not known.
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

// upgrade names the member of a record that a process wrote for a volume with one replica before records named members.
// The name of its object is not known: leaveAlone asks for it.
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

// session is a volume attached on this node: its member, engine and device.
type session struct {
	blob
	log     *slog.Logger
	loop    *iothreads.Thread
	here    atomic.Pointer[stack.Replica] // nil: it has none here. Another one once it was dropped and is back
	others  sync.Map                      // further replicas that it has, or had, here: *stack.Replica by api.UID
	engine  *engine.Engine
	size    atomic.Int64
	serving atomic.Pointer[engine.Engine] // the engine, once it is open
	mates   mates
	dev     *device.Device
	blank   bool // when the device was made

	wasFull bool // as the Attachment says; under the volume's lock
	forced  bool // the device was taken away by force; under the volume's lock

	trim   atomic.Pointer[trimRun] // the last one
	owed   atomic.Bool             // what a trim asked for did not come back yet
	zeroed atomic.Int64            // of the head when it was last looked at for what can be reclaimed
	noting atomic.Bool             // its record is being written: who has the volume's lock asks the replica nothing then

	full   atomic.Bool // writes wait for room
	fence  atomic.Pointer[error]
	stir   chan struct{} // something of the above changed
	cancel context.CancelFunc
	ended  chan struct{} // care has returned
}

// probeEvery is how often one write probes for room while others wait; nobody tells when a file system gets room.
const probeEvery = time.Second

// config is what the engines of all sessions have in common.
func (d *Data) config(s *session, size, epoch int64) engine.Config {
	s.size.Store(size)
	return engine.Config{
		Loop: s.loop, Pool: s.loop.Pool, Size: size, Epoch: epoch, Incarnation: d.Host.Incarnation(), ReadOnly: s.ReadOnly,
		Drop: d.dropper(s), Add: d.adder(s), Owns: d.ownerOf(s.blob),
		OnDrop: func(member string, why error) {
			s.log.Warn("a replica was dropped", "replica", member, "err", why)
			s.mates.dropped.Add(1)
			s.mates.mu.Lock()
			s.mates.news = append(s.mates.news, news{"Warning", "ReplicaDropped",
				fmt.Sprintf("the volume is degraded, it goes on without a replica: %v", why)})
			s.mates.mu.Unlock()
			s.wake()
			s.mates.lookSoon()
		},
		OnSpace: func(full bool) { s.full.Store(full); s.wake() },
		OnFence: func(err error) { s.fence.Store(&err); s.wake() },
	}
}

// openHere opens a replica of this node for an engine of this node. One of another node that has it loses it.
func (d *Data) openHere(ctx context.Context, disk *stack.Disk, uid string, loop *iothreads.Thread) (*stack.Replica, error) {
	if err := d.remote.Release(uid); err != nil {
		d.Log.Warn("the end of a session of another node", "replica", uid, "err", err)
	}
	return disk.OpenReplica(ctx, uid, loop.Loop)
}

// newSession is one without an engine yet; member may be nil.
func (d *Data) newSession(b blob, loop *iothreads.Thread, member *stack.Replica) *session {
	b.Lenders = nil
	s := &session{log: d.Log.With("volume", b.Volume), loop: loop,
		stir: make(chan struct{}, 1), ended: make(chan struct{})}
	s.mates.look, s.mates.turn = make(chan struct{}, 1), make(chan struct{}, 1)
	s.mates.joiners, s.mates.rebuilds = &sync.Map{}, map[string]api.RebuildStatus{}
	s.blob = b
	if member != nil {
		s.has(member)
		s.blank = member.Empty()
	}
	return s
}

// has notes the replica that a new session has here.
func (s *session) has(member *stack.Replica) {
	s.here.Store(member)
	member.OnLost(func(bool) { s.wake() })
}

// uses reports whether a replica is one of the engine's.
func (s *session) uses(ctx context.Context, uid api.UID) (bool, error) {
	if _, joins := s.mates.joiners.Load(string(uid)); joins {
		return true, nil
	}
	_, members, err := s.engine.Epoch(ctx)
	return slices.Contains(members, string(uid)), err
}

// local is a replica that the session has, or had, here; nil: it had it never.
func (s *session) local(uid api.UID) *stack.Replica {
	if uid == s.Replica {
		return s.member()
	}
	if x, is := s.others.Load(uid); is {
		return x.(*stack.Replica)
	}
	return nil
}

// localMember is a member on a node, or "".
func (s *session) localMember(node string) api.UID {
	s.mates.mu.Lock()
	defer s.mates.mu.Unlock()
	for _, m := range s.Members {
		if m.Node == node {
			return m.UID
		}
	}
	return ""
}

// member is the replica that the session has here, or nil.
func (s *session) member() *stack.Replica { return s.here.Load() }

func (s *session) wake() {
	select {
	case s.stir <- struct{}{}:
	default: // it is going to look anyway
	}
}

// begin starts to look after a session that has its device. changed is called whenever its state has changed.
func (s *session) begin(changed func()) {
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go func() {
		defer close(s.ended)
		s.care(ctx, changed)
	}()
}

// care tries the writes that wait for room, and takes the device down after a fence.
func (s *session) care(ctx context.Context, changed func()) {
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
		case <-s.stir:
		}
		if now := s.full.Load(); now != full {
			if full = now; full {
				s.log.Warn("no replica has room, writes wait")
				tick.Reset(probeEvery)
			} else {
				s.log.Info("there is room again, writes go on")
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

// room wakes the writes that wait, because the disk may have got room.
func (s *session) room() {
	if s.full.Load() {
		s.engine.Retry()
	}
}

// close ends a session whose device is gone.
func (d *Data) close(s *session) error {
	if s.cancel != nil {
		s.cancel()
		<-s.ended
	}
	s.engine.Hurry() // the device is gone: nobody is waited for any more
	s.mates.end()
	err := s.engine.Close()
	d.threads.PutBack(s.loop)
	return err
}

// expand makes members, then the device, size bytes long.
func (s *session) expand(ctx context.Context, size int64) error {
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

func (s *session) spec() (device.Spec, error) {
	raw, err := json.Marshal(s.snapshotBlob())
	if err != nil {
		return device.Spec{}, fmt.Errorf("volume %s: %w", s.Volume, err)
	}
	return device.Spec{Key: string(s.VolumeUID), Name: s.Volume, Size: s.size.Load(), ReadOnly: s.ReadOnly,
		Blob: raw}, nil
}
