package attach

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/peer"
)

// The engine's node rebuilds replicas that are not members. Each replica has a goroutine that probes its node, so that
// a node without power delays no other replica; one replica at a time is resynced.

// rebuildEvery is how often the loop looks at the volume's replicas. A change or a drop wakes the loop at once.
const rebuildEvery = 3 * time.Second

// Times of a rebuild: for the answer to a probe, between the probes of a silent node, and the growing pause between
// tries after another failure.
const (
	replyTime    = 3 * time.Second
	replyAgain   = 500 * time.Millisecond
	rebuildFirst = 250 * time.Millisecond
	rebuildLast  = 5 * time.Second
	stallPause   = 30 * time.Second // the longest pause after a try that a stall ended
)

// rebuildJob is the rebuild of one replica.
type rebuildJob struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu       sync.Mutex
	swapping bool // the swap that adds the replica is in progress
	unwanted bool
}

// giveUp ends the job, unless the swap is in progress: then the engine drops the new member.
func (c *rebuildJob) giveUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unwanted = true; !c.swapping {
		c.cancel()
	}
}

// beginSwap marks the begin of the swap.
func (c *rebuildJob) beginSwap() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unwanted {
		return api.Errorf(api.Unavailable, "the replica is not wanted any more")
	}
	c.swapping = true
	return nil
}

// endSwap marks the end of the swap.
func (c *rebuildJob) endSwap() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.swapping = false; c.unwanted {
		c.cancel()
	}
}

func (c *rebuildJob) isDone() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// startRebuilds starts the goroutine that rebuilds replicas; membership.stopRebuilds ends it.
func (as *Attachments) startRebuilds(s *Session) {
	var ctx context.Context
	ctx, s.membership.cancel = context.WithCancel(context.Background())
	s.membership.done = make(chan struct{})
	go as.rebuildLoop(ctx, s, s.membership.joiners)
}

// rebuildLoop rebuilds replicas that are not members, and reports to the engine whether all are, until ctx ends.
func (as *Attachments) rebuildLoop(ctx context.Context, s *Session, joiners *sync.Map) {
	defer close(s.membership.done)
	if !as.awaitOthers(ctx, s) {
		return
	}
	var beside sync.WaitGroup
	beside.Go(func() { _ = callEvery(ctx, time.Second, func() { as.boundWait(ctx, s) }) })
	beside.Go(func() { _ = callEvery(ctx, compareEvery, func() { as.compareNext(ctx, s) }) })
	defer beside.Wait()
	jobs := map[api.UID]*rebuildJob{}
	tick := time.NewTicker(rebuildEvery)
	defer tick.Stop()
	for {
		as.emitEvents(ctx, s)
		as.startJobs(ctx, s, joiners, jobs, &beside)
		select {
		case <-tick.C:
		case <-s.membership.look:
		case <-ctx.Done():
			return
		}
	}
}

// wakeRebuilds wakes the loop: a replica was dropped, or has returned.
func (m *membership) wakeRebuilds() {
	select {
	case m.look <- struct{}{}:
	default: // a wake-up is pending
	}
}

func (as *Attachments) startJobs(ctx context.Context, s *Session, joiners *sync.Map, jobs map[api.UID]*rebuildJob,
	all *sync.WaitGroup) {
	if !as.APIReached() || s.fence.Load() != nil {
		return
	}
	epoch, members, err := s.engine.Epoch(ctx)
	if err != nil {
		return
	}
	var list api.ReplicaList
	if err := as.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
		return
	}
	whole, known := true, 0
	wanted := map[api.UID]bool{}
	for i := range list.Items {
		r := &list.Items[i]
		switch {
		case r.Spec.VolumeUID != s.VolumeUID:
			continue
		case slices.Contains(members, string(r.Spec.UID)):
			known++
			if r.Spec.Leave && len(members) > 1 {
				s.engine.Suspect(string(r.Spec.UID), api.Errorf(api.Unavailable, "the replica is to leave the volume"))
			} else {
				as.startRepair(ctx, s, r, members, all)
			}
			continue
		case r.DeletionTimestamp != nil || r.Spec.Leave:
			continue
		}
		whole = false
		if r.Status.Mode == "" || r.Status.Mode == api.ReplicaCreating || r.Status.Mode == api.ReplicaFailed {
			continue
		}
		uid, name := r.Spec.UID, r.Name
		wanted[uid] = true
		if c := jobs[uid]; c != nil && !c.isDone() {
			continue
		}
		c := &rebuildJob{done: make(chan struct{})}
		var come context.Context
		come, c.cancel = context.WithCancel(ctx)
		jobs[uid] = c
		all.Go(func() {
			defer close(c.done)
			defer c.cancel()
			as.rebuildReplica(come, s, c, name, uid, joiners)
		})
	}
	for uid, c := range jobs {
		if !wanted[uid] {
			c.giveUp()
			if c.isDone() {
				delete(jobs, uid)
			}
		}
	}
	s.engine.SetWhole(epoch, whole && known == len(members))
}

// rebuildReplica tries to rebuild one replica until the replica is a member, or ctx ends.
func (as *Attachments) rebuildReplica(ctx context.Context, s *Session, c *rebuildJob, name string, uid api.UID,
	joiners *sync.Map) {
	defer s.membership.wakeRebuilds()
	pause := rebuildFirst
	for ctx.Err() == nil {
		var r api.Replica
		if as.Client.Get(ctx, client.ObjectKey{Name: name}, &r) != nil || r.Spec.UID != uid {
			return // the replica was removed
		}
		wait, began := replyAgain, time.Now()
		err := as.probeReplica(ctx, s.loop, &r)
		if err == nil {
			if err = as.resyncAndJoin(ctx, s, c, &r, joiners); err == nil {
				return
			}
			wait, pause = pause, min(2*pause, rebuildLast)
			if api.Is(err, api.Unavailable) { // a disk that stalls has the turns of others half of the time at most
				wait = max(wait, min(time.Since(began), stallPause))
			}
		} else if !api.Is(err, api.Unavailable) {
			wait, pause = pause, min(2*pause, rebuildLast)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

// probeReplica asks whether a replica answers.
func (as *Attachments) probeReplica(ctx context.Context, loop *iothreads.Thread, r *api.Replica) error {
	if r.Spec.Node == as.Name {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, replyTime)
	defer cancel()
	m, err := as.remote.Member(peer.Options{Node: r.Spec.Node, Replica: string(r.Spec.UID),
		Volume: string(r.Spec.VolumeUID), Loop: loop})
	if err != nil {
		return err
	}
	_, _, err = m.Probe(ctx)
	_ = m.Close() // the probe had no session
	return err
}

// resyncAndJoin resyncs one replica, which joins the members.
func (as *Attachments) resyncAndJoin(ctx context.Context, s *Session, c *rebuildJob, r *api.Replica,
	joiners *sync.Map) error {
	mine := false // one replica at a time
	defer func() {
		if mine {
			<-s.membership.turn
		}
	}()
	spec := memberSpec{Name: r.Name, UID: r.Spec.UID, Node: r.Spec.Node, Disk: r.Spec.Disk}
	m, here, err := as.openMember(ctx, s, &spec)
	if err != nil {
		return err
	}
	joiners.Store(string(spec.UID), func() memberSpec { // for the swap, with the boot of the session with the replica
		now := spec
		if p, ok := engine.Unwrap(m.Member).(*peer.Member); ok {
			now.Boot = p.Boot()
		}
		return now
	})
	defer joiners.Delete(string(spec.UID))
	before, known := s.local.Load(spec.UID)
	if here != nil { // before the swap, after which the join still compares
		s.local.Store(spec.UID, here)
	}
	tell := func(p engine.Progress, message string) {
		s.membership.mu.Lock()
		kind := "delta"
		if p.Full {
			kind = "full"
		}
		s.membership.rebuilds[r.Name] = api.RebuildStatus{Replica: r.Name, Kind: kind, Done: p.Done, Total: p.Total,
			Sent: p.Sent, Message: message}
		s.membership.mu.Unlock()
		s.wake()
	}
	tell(engine.Progress{}, "")
	p, err := s.engine.Join(ctx, m, engine.JoinOptions{OnProgress: func(p engine.Progress) { tell(p, "") },
		BytesPerSecond: as.Setting(ctx, "replica-copy-rate-limit") << 20, OnSwap: c.beginSwap,
		Turn: func(ctx context.Context) (func(), error) {
			select {
			case s.membership.turn <- struct{}{}:
				mine = true
				return func() {}, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		},
		WholeTurn: func(ctx context.Context) (func(), error) {
			tell(engine.Progress{}, "waits for whole comparisons of other replicas")
			return as.rebuilds.Acquire(ctx, "full", func() int { return as.CopiesAtOnce(ctx) })
		}})
	c.endSwap()
	s.membership.compared.Add(p.Done)
	s.membership.sent.Add(p.Sent)
	if err != nil {
		if api.Is(err, api.Corrupt) && as.repairFrom(ctx, s, m) {
			err = fmt.Errorf("%w; the rebuilt replica repaired the damage", err)
		}
		if known {
			s.local.Store(spec.UID, before)
		} else {
			s.local.Delete(spec.UID)
		}
		_ = m.Member.Close()
		tell(p, err.Error())
		s.log.Warn("a replica is not rebuilt yet", "replica", r.Name, "err", err)
		return err
	}
	if p.Full {
		s.membership.fulls.Add(1)
	} else {
		s.membership.deltas.Add(1)
	}
	s.membership.mu.Lock()
	delete(s.membership.rebuilds, r.Name)
	s.membership.events = append(s.membership.events, event{"Normal", "ReplicaRebuilt",
		"replica " + r.Name + " is current again: " +
			api.SizeText(p.Sent) + " of " + api.SizeText(p.Total) + " compared had changed"})
	s.membership.mu.Unlock()
	s.wake()
	as.emitEvents(ctx, s)
	return nil
}
