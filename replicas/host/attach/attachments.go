package attach

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/semaphore"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/maintain"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/stack"
)

// Replicas are the replicas on this node's disks, as engines see them.
type Replicas interface {
	// Disk is the open disk of a uid.
	Disk(ctx context.Context, uid api.UID) (*stack.Disk, error)
	// Damaged notes that a replica could not be opened, and why.
	Damaged(ctx context.Context, replica api.UID, why error)
	// Created notes that a replica exists on its disk.
	Created(replica api.UID)
	// Wake requeues a replica, by the name of its object.
	Wake(name string)
}

// Snapshots are the snapshots of volumes, as engines see them.
type Snapshots interface {
	// Sealed notes that the head of a volume became a layer, on the local member if there is one.
	Sealed(ctx context.Context, v *api.Volume, local api.UID)
	// Reported reports whether users know a snapshot of a volume.
	Reported(ctx context.Context, volume string, k stack.Snapshot) (bool, error)
	// Chain are the snapshots of a stack that the head alone stands on, the newest first.
	Chain(m stack.Meta) []stack.Snapshot
	// DeleteChain deletes the objects of a chain; kept says why the rest stays.
	DeleteChain(ctx context.Context, v *api.Volume, chain []stack.Snapshot) (deleted []string, kept string, err error)
}

// Options of New.
type Options struct {
	Node   *localnode.Node
	Host   *device.Host
	Merges *maintain.MergeWorker
	Remote *remote.Server
	Watch  *engine.Watch // of members, here and on other nodes
}

// Attachments of a node.
type Attachments struct {
	*localnode.Node
	host      *device.Host
	merges    *maintain.MergeWorker
	remote    *remote.Server
	watch     *engine.Watch
	replicas  Replicas
	snapshots Snapshots

	queue    atomic.Pointer[backlog.Queue]
	trims    *maintain.Workers
	rebuilds semaphore.Set[string] // of replicas compared as a whole: key "full"
	offline  *offlineRebuilds

	resumed chan struct{} // closed when all devices are resumed, or have failed
	closing chan struct{} // closed when Stop begins

	mu       sync.Mutex
	sessions map[string]*Session        // by volume name
	resuming map[string]bool            // volumes with a resume in progress
	left     map[*Session]chan struct{} // sessions that end in the background; the channel is closed at the end
}

// New has no session yet. Connect follows.
func New(o Options) *Attachments {
	as := &Attachments{Node: o.Node, host: o.Host, merges: o.Merges, remote: o.Remote, watch: o.Watch,
		trims: maintain.NewWorkers(), resumed: make(chan struct{}), closing: make(chan struct{}),
		sessions: map[string]*Session{}, resuming: map[string]bool{}, left: map[*Session]chan struct{}{}}
	as.offline = &offlineRebuilds{Attachments: as}
	return as
}

// Connect gives the owner the other two, before the first resume.
func (as *Attachments) Connect(replicas Replicas, snapshots Snapshots) {
	as.replicas, as.snapshots = replicas, snapshots
}

// Session is the session of a volume with a device; nil: the volume is not attached here.
func (as *Attachments) Session(volume string) *Session {
	as.mu.Lock()
	defer as.mu.Unlock()
	return as.sessions[volume]
}

// addSession registers a session with a device.
func (as *Attachments) addSession(s *Session) {
	as.mu.Lock()
	as.sessions[s.Volume] = s
	as.mu.Unlock()
	if m, r := s.memberHere(); r != nil {
		as.replicas.Created(m.UID)
	}
	s.startWatch(func() { as.Wake(s.Volume) })
}

// removeSession unregisters a session.
func (as *Attachments) removeSession(s *Session) {
	as.mu.Lock()
	defer as.mu.Unlock()
	delete(as.sessions, s.Volume)
}

// Sessions are the sessions of all attached volumes.
func (as *Attachments) Sessions() []*Session {
	as.mu.Lock()
	defer as.mu.Unlock()
	list := make([]*Session, 0, len(as.sessions))
	for _, s := range as.sessions {
		list = append(list, s)
	}
	return list
}

// Wake requeues a volume's Attachment.
func (as *Attachments) Wake(volume string) {
	if q := as.queue.Load(); q != nil {
		(*q).Add(watch.Request(volume))
	}
}

// Stop ends trims and resumes, and leaves the devices to the holder for the next process. The manager has stopped.
// After an error the process changes nothing: requests are in progress, or wait for room, and the end of the engines
// would fail the requests; the next process serves the requests, once this process has ended.
func (as *Attachments) Stop() error {
	close(as.closing)
	as.trims.Close()
	if err := as.awaitResumed(); err != nil {
		return err
	}
	for _, s := range as.Sessions() {
		s.membership.endSwaps()
	}
	if err := as.host.Close(); err != nil {
		return fmt.Errorf("devices are left as they are: %w", err)
	}
	return nil
}

// Close ends all sessions after Stop, and returns how many wait for a disk.
func (as *Attachments) Close() (waiting int, err error) {
	sessions := as.Sessions()
	errs := make([]error, len(sessions))
	var ends sync.WaitGroup
	for i, s := range sessions {
		as.removeSession(s)
		ends.Go(func() { // a disk that hangs delays the end once, not once for each volume
			if err := as.closeSession(s); err != nil {
				errs[i] = fmt.Errorf("volume %s: %w", s.Volume, err)
			}
		})
	}
	ends.Wait()
	return as.awaitLeft(), errors.Join(errs...)
}

// awaitResumed waits a bounded time for the resumes in progress.
func (as *Attachments) awaitResumed() error {
	as.mu.Lock()
	left := len(as.resuming)
	as.mu.Unlock()
	if left == 0 {
		return nil
	}
	late := time.NewTimer(resumeWait)
	defer late.Stop()
	select {
	case <-as.resumed:
		return nil
	case <-late.C:
		return api.Errorf(api.Unavailable, "devices are left as they are: the disks of %d of them do not answer", left)
	}
}
