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
	Replica   api.UID `json:"replica"` // the local member
	Disk      api.UID `json:"disk"`
	Path      string  `json:"path"` // of the disk
	Epoch     int64   `json:"epoch"`
	ReadOnly  bool    `json:"readOnly,omitempty"`
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
	log    *slog.Logger
	loop   *ioLoop
	member *stack.Replica
	engine *engine.Engine
	dev    *device.Device
	blank  bool // when the device was made

	wasFull bool // as the Attachment says; under the volume's lock
	forced  bool // the device was taken away by force; under the volume's lock

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
func (d *Data) open(ctx context.Context, b blob, disk *stack.Disk, drop dropper, claim claimer) (
	_ *session, err error) {
	loop, err := d.pick()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			d.putBack(loop)
		}
	}()
	member, err := disk.OpenReplica(ctx, string(b.Replica), loop.Loop)
	if err != nil {
		return nil, err
	}
	m := member.Meta()
	if b.Epoch, err = claim(m); err != nil {
		return nil, errors.Join(err, member.Close())
	}
	b.Lenders = nil
	from, _ := member.Lenders()
	for _, disk := range from {
		b.Lenders = append(b.Lenders, lender{api.UID(disk.UID()), disk.Path()})
	}
	s := &session{blob: b, log: d.Log.With("volume", b.Volume), loop: loop, member: member, blank: member.Empty(),
		stir: make(chan struct{}, 1), ended: make(chan struct{})}
	member.OnLost(func(bool) { s.wake() })
	s.engine, err = engine.Open(ctx, engine.Config{
		Loop: loop, Pool: loop.pool, Size: m.Size, Epoch: b.Epoch, Incarnation: d.Host.Incarnation(), ReadOnly: b.ReadOnly,
		Members: []engine.Named{{Name: string(b.Replica), Local: true, Member: member}},
		Drop:    drop,
		OnSpace: func(full bool) { s.full.Store(full); s.wake() },
		OnFence: func(err error) { s.fence.Store(&err); s.wake() },
	})
	if err != nil {
		return nil, errors.Join(err, member.Close())
	}
	return s, nil
}

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
				s.log.Warn("the disk is full, writes wait", "disk", s.Path)
				tick.Reset(probeEvery)
			} else {
				s.log.Info("the disk has room again, writes go on", "disk", s.Path)
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
	s.member.GiveUp()
	err := s.engine.Close()
	d.putBack(s.loop)
	return err
}

// expand makes members, then the device, size bytes long.
func (s *session) expand(ctx context.Context, size int64) error {
	if s.fence.Load() != nil {
		return api.Errorf(api.Denied, "the volume was taken over by another engine")
	}
	if s.member.Meta().Size < size {
		if err := s.engine.Expand(ctx, size); err != nil {
			return err
		}
	}
	if s.dev.Spec().Size < size {
		return s.dev.Resize(ctx, size)
	}
	return nil
}

func (s *session) spec() (device.Spec, error) {
	raw, err := json.Marshal(s.blob)
	if err != nil {
		return device.Spec{}, fmt.Errorf("volume %s: %w", s.Volume, err)
	}
	return device.Spec{Key: string(s.VolumeUID), Name: s.Volume, Size: s.member.Meta().Size, ReadOnly: s.ReadOnly,
		Blob: raw}, nil
}

// Resume takes up the devices that a predecessor left, each on the epoch that its replica has recorded. It needs no
// API: I/O that waited goes on. A device that cannot be resumed stays held, its I/O waits, and the Attachment loop
// tries again; the error says which.
func (d *Data) Resume(ctx context.Context) error {
	held := d.Host.Held()
	errs := make([]error, len(held))
	var wg sync.WaitGroup
	for i, spec := range held {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if _, err := d.resume(ctx, spec); err != nil {
				errs[i] = fmt.Errorf("volume %s: %w", spec.Name, err)
				d.Log.Error("device cannot be resumed yet, its I/O waits", "volume", spec.Name, "err", err)
			}
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
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
	disk, err := d.disks.open(ctx, b.Path, b.Disk, false)
	if err != nil {
		return nil, err
	}
	for _, from := range b.Lenders {
		if _, err := d.disks.open(ctx, from.Path, from.Disk, false); err != nil {
			d.Log.Warn("a disk that layers were borrowed from is not there", "volume", b.Volume, "err", err)
		}
	}
	s, err := d.open(ctx, b, disk, d.dropper(b), func(m stack.Meta) (int64, error) {
		if m.VolumeUID != string(b.VolumeUID) || !slices.Contains(m.Members, string(b.Replica)) {
			return 0, api.Errorf(api.Corrupt, "replica %s is of volume %s, members %v", b.Replica, m.VolumeUID, m.Members)
		}
		if len(m.Members) > 1 {
			return 0, api.Errorf(api.Unsupported, "several replicas are not supported yet")
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
