package remote

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// Open opens a replica for an engine on another node.
func (s *Server) Open(ctx context.Context, uid, volume string) (peer.Replica, peer.Loop, error) {
	r, loop, err := s.openServed(ctx, uid, volume)
	if err != nil {
		s.o.Host.Damaged(ctx, api.UID(uid), err)
	}
	return r, loop, err
}

func (s *Server) openServed(ctx context.Context, uid, volume string) (peer.Replica, peer.Loop, error) {
	if s.o.Watch.Abandoned(uid) {
		return nil, nil, fmt.Errorf("replica %s: %w", uid, peer.ErrAbandoned)
	}
	s.openServedDisks(ctx)
	if s.o.Host.APIReached() {
		var list api.ReplicaList
		if s.client.List(ctx, &list, client.MatchingFields{watch.ByNode: s.o.Node}, client.UnsafeDisableDeepCopy) == nil {
			for i := range list.Items {
				if r := &list.Items[i]; string(r.Spec.UID) == uid {
					if err := r.RevertPending(); err != nil {
						return nil, nil, err
					}
					if _, err := s.o.Host.Disk(ctx, r.Spec.Disk); err != nil {
						return nil, nil, err
					}
				}
			}
		}
	}
	disk, err := findDiskOf(s.o.Disks.Except(nil), uid)
	if err != nil {
		return nil, nil, err
	}
	if disk == nil {
		return nil, nil, api.Errorf(api.NotFound, "replica %s is on no disk of node %s", uid, s.o.Node)
	}
	m, err := disk.Stack(uid)
	if err != nil {
		return nil, nil, err
	}
	if m.VolumeUID != volume {
		return nil, nil, api.Errorf(api.Invalid, "replica %s is not one of that volume", uid)
	}
	loop, err := s.o.Threads.Pick()
	if err != nil {
		return nil, nil, err
	}
	r, err := s.openGently(ctx, disk, m, loop)
	if err != nil {
		s.o.Threads.PutBack(loop)
		return nil, nil, err
	}
	if id := api.UID(disk.UID()); s.o.Places.Get().Disks[id] != disk.Path() {
		s.o.Places.Change(func(st *Known) { st.Disks[id] = disk.Path() })
	}
	s.o.Log.Info("replica is served to another node", "replica", uid, "volume", m.Volume)
	l := &Served{peer.NewBackend(r, loop), s, loop, disk, m.Volume}
	s.mu.Lock()
	s.open[api.UID(uid)] = l
	s.mu.Unlock()
	return l, loop, nil
}

// openServedDisks opens the disks whose replicas other nodes used before.
func (s *Server) openServedDisks(ctx context.Context) {
	for id, path := range s.o.Places.Get().Disks {
		if _, err := s.o.Disks.Get(id); err != nil {
			_, _ = s.o.Disks.Open(ctx, path, id, false) // a disk that does not exist has no replica either
		}
	}
}

// findDiskOf finds the disk that has a replica; nil: no disk has. A disk that fails may have the replica, unless
// another has.
func findDiskOf(disks []*stack.Disk, uid string) (*stack.Disk, error) {
	var errs []error
	for _, disk := range disks {
		there, err := disk.Holds(uid)
		if there {
			return disk, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// Served is a replica that the engine of another node has open.
type Served struct {
	*peer.Backend
	server *Server
	loop   *iothreads.Thread
	disk   *stack.Disk
	volume string
}

// openGently opens a replica for another node. A merge in the replica gives way.
func (s *Server) openGently(ctx context.Context, disk *stack.Disk, m stack.Meta,
	loop *iothreads.Thread) (*stack.Replica, error) {
	for tries := 0; ; tries++ {
		r, err := disk.OpenReplica(ctx, m.UID, loop.Loop)
		if !api.Is(err, api.Busy) || tries == 20 || !s.o.Locks.Disturb(m.Volume) {
			return r, err
		}
		pause := time.NewTimer(50 * time.Millisecond)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, err
		}
	}
}

// Opened is a replica that an engine of another node has open; nil: none has.
func (s *Server) Opened(uid string) *Served {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[api.UID(uid)]
}

// Call implements peer.Replica. This node notes the layers that a call commits or deletes.
func (l *Served) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	b, err := l.Backend.Call(ctx, name, args)
	if peer.CommitsLayers(name) {
		l.server.o.Host.LayersChanged(l.disk, l.Meta().UID, l.volume)
	}
	return b, err
}

// Close implements peer.Replica.
func (l *Served) Close() error {
	l.server.mu.Lock()
	if uid := api.UID(l.Meta().UID); l.server.open[uid] == l {
		delete(l.server.open, uid)
	}
	l.server.mu.Unlock()
	err := l.Backend.Close()
	l.server.o.Threads.PutBack(l.loop)
	return err
}
