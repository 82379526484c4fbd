package replicas

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/engine"
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
	// Of a volume with several replicas, or with one elsewhere: the epoch now and its members, and those of a swap whose
	// outcome is not known.
	Now      int64        `json:"now,omitempty"`
	Members  []memberSpec `json:"members,omitempty"`
	Next     int64        `json:"next,omitempty"`
	Joining  *memberSpec  `json:"joining,omitempty"`
	ReadOnly bool         `json:"readOnly,omitempty"`
	// Lenders are the disks that layers were borrowed from when the device was made.
	Lenders []lender `json:"lenders,omitempty"`
}

type lender struct {
	Disk api.UID `json:"disk"`
	Path string  `json:"path"`
}

// session is a volume attached on this node: its member, engine and device.
type session struct {
	blob
	log     *slog.Logger
	loop    *ioLoop
	here    atomic.Pointer[stack.Replica] // nil: it has none here. Another one once it was dropped and is back
	others  sync.Map                      // further replicas that it has, or had, here: *stack.Replica by api.UID
	engine  *engine.Engine
	size    atomic.Int64
	serving atomic.Pointer[engine.Engine] // the engine, once it is open
	mates   mates                         // what a volume with several replicas has
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

// dropper takes a member out of the volume's record, for the engine.
type dropper func(ctx context.Context, epoch int64, member string) error

// claimer says in which epoch a replica may be opened, or why it may not.
type claimer func(stack.Meta) (epoch int64, err error)

// open opens the replica, claims an epoch, has the replica adopt it, and starts the engine.
func (d *Data) open(ctx context.Context, b blob, disk *stack.Disk, claim claimer) (_ *session, err error) {
	loop, err := d.pick()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.putBack(loop)
		}
	}()
	member, err := d.openHere(ctx, disk, string(b.Replica), loop)
	if err != nil {
		return nil, err
	}
	m := member.Meta()
	if b.Epoch, err = claim(m); err != nil {
		return nil, errors.Join(err, member.Close())
	}
	s := d.newSession(b, loop, member)
	c := d.config(s, m.Size, b.Epoch)
	c.Members = []engine.Named{{Name: string(b.Replica), Local: true, Member: d.backendOf(member, loop)}}
	if s.engine, err = engine.Open(ctx, c); err != nil {
		return nil, errors.Join(err, member.Close())
	}
	s.serving.Store(s.engine)
	return s, nil
}

// config is what the engines of all sessions have in common.
func (d *Data) config(s *session, size, epoch int64) engine.Config {
	s.size.Store(size)
	return engine.Config{
		Loop: s.loop, Pool: s.loop.pool, Size: size, Epoch: epoch, Incarnation: d.Host.Incarnation(), ReadOnly: s.ReadOnly,
		Drop: d.manyDropper(s), Add: d.adder(s), Owns: d.ownerOf(s.blob),
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
func (d *Data) openHere(ctx context.Context, disk *stack.Disk, uid string, loop *ioLoop) (*stack.Replica, error) {
	if d.server != nil {
		if err := d.server.Release(uid); err != nil {
			d.Log.Warn("the end of a session of another node", "replica", uid, "err", err)
		}
	}
	return disk.OpenReplica(ctx, uid, loop.Loop)
}

// newSession is one without an engine yet; member may be nil.
func (d *Data) newSession(b blob, loop *ioLoop, member *stack.Replica) *session {
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
	from, _ := member.Lenders()
	for _, disk := range from {
		s.Lenders = append(s.Lenders, lender{api.UID(disk.UID()), disk.Path()})
	}
	member.OnLost(func(bool) { s.wake() })
}

// uses reports whether a replica is one of the engine's.
func (s *session) uses(ctx context.Context, uid api.UID) (bool, error) {
	if _, joins := s.mates.joiners.Load(string(uid)); joins || !s.mates.many.Load() {
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
	if !s.mates.many.Load() {
		return s.Replica
	}
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
	d.putBack(s.loop)
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
	raw, err := s.encoded()
	if err != nil {
		return device.Spec{}, fmt.Errorf("volume %s: %w", s.Volume, err)
	}
	return device.Spec{Key: string(s.VolumeUID), Name: s.Volume, Size: s.size.Load(), ReadOnly: s.ReadOnly,
		Blob: raw}, nil
}

// resumeWait is how long Resume waits for all devices. One whose disk hangs is taken up when the disk goes on, and
// keeps no other waiting.
const resumeWait = 5 * time.Second

// resumeAgain is when what waits for a device that is being taken up is looked at again.
const resumeAgain = time.Second

// Resume takes up the devices that a predecessor left, each on the epoch that its replica has recorded. It needs no
// API: I/O that waited goes on. A device that cannot be resumed stays held, its I/O waits, and the Attachment loop
// tries again; the error says which. So does one that takes long: that one goes on by itself, until Close.
func (d *Data) Resume(ctx context.Context) error {
	held := d.Host.Held()
	d.mu.Lock()
	for _, spec := range held {
		d.resuming[spec.Name] = true
	}
	d.mu.Unlock()
	var wg sync.WaitGroup
	ended := make(chan error, len(held))
	for _, spec := range held {
		wg.Go(func() {
			_, err := d.resume(ctx, spec)
			if err != nil {
				err = fmt.Errorf("volume %s: %w", spec.Name, err)
				d.Log.Error("device cannot be resumed yet, its I/O waits", "volume", spec.Name, "err", err)
			}
			d.mu.Lock()
			delete(d.resuming, spec.Name)
			d.mu.Unlock()
			d.stir(spec.Name)
			ended <- err
		})
	}
	go func() { // ends with them
		wg.Wait()
		close(d.resumed)
	}()
	var errs []error
	late := time.NewTimer(resumeWait)
	defer late.Stop()
	for range held {
		select {
		case err := <-ended:
			errs = append(errs, err)
			continue
		case <-late.C:
		}
		d.mu.Lock()
		for volume := range d.resuming {
			errs = append(errs, api.Errorf(api.Unavailable, "volume %s: its disk does not answer; it goes on when the disk does",
				volume))
		}
		d.mu.Unlock()
		break
	}
	d.Host.ThawLeft()
	return errors.Join(errs...)
}

// beingResumed reports that a volume's device is being taken up. Who would wait for the volume's lock, as others wait
// for him, looks again later.
func (d *Data) beingResumed(volume string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.resuming[volume]
}

func (d *Data) resume(ctx context.Context, spec device.Spec) (*session, error) {
	defer d.lock(spec.Name)()
	return d.resumeLocked(ctx, spec)
}

// resumeLocked takes up one device. The caller has the volume's lock.
func (d *Data) resumeLocked(ctx context.Context, spec device.Spec) (*session, error) {
	var b blob
	if err := json.Unmarshal(spec.Blob, &b); err != nil || string(b.VolumeUID) != spec.Key {
		return nil, api.Errorf(api.Corrupt, "what is kept with the device makes no sense: %v", err)
	}
	var disk *stack.Disk
	var err error
	if len(b.Members) == 0 {
		if disk, err = d.disks.Open(ctx, b.Path, b.Disk, false); err != nil {
			return nil, err
		}
	}
	for _, from := range b.Lenders {
		if _, err := d.disks.Open(ctx, from.Path, from.Disk, false); err != nil {
			d.Log.Warn("a disk that layers were borrowed from is not there", "volume", b.Volume, "err", err)
		}
	}
	if len(b.Members) > 0 {
		return d.resumeMany(ctx, spec, b)
	}
	s, err := d.open(ctx, b, disk, func(m stack.Meta) (int64, error) {
		if m.VolumeUID != string(b.VolumeUID) || !slices.Contains(m.Members, string(b.Replica)) {
			return 0, api.Errorf(api.Corrupt, "replica %s is of volume %s, members %v", b.Replica, m.VolumeUID, m.Members)
		}
		if len(m.Members) > 1 {
			return 0, api.Errorf(api.Corrupt, "replica %s has the members %v, and its device was made for one", b.Replica,
				m.Members)
		}
		return m.Epoch, nil
	})
	if err != nil {
		return nil, err
	}
	want, err := s.spec()
	if err == nil {
		s.dev, err = d.Host.Resume(ctx, want, s.loop.Loop, s.engine)
	}
	if err != nil {
		return nil, errors.Join(err, d.close(s))
	}
	d.keep(s)
	d.Log.Info("device resumed", "volume", s.Volume, "device", s.dev.Path(), "epoch", s.Epoch)
	return s, nil
}
