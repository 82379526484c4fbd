package replicas

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

// Replicas that are not members are brought back by the engine's node. Each has a goroutine that knocks at its node, so
// that one whose node is off keeps no other waiting; one at a time is made equal.

// mendEvery is how often the volume's replicas are looked at. What changes, or the engine drops, is looked at once.
const mendEvery = 3 * time.Second

// Times of a replica that is to come back: how long one answer is waited for, when a node that is not reached is asked
// again, and what is waited longer and longer where something else is in the way.
const (
	knockTime  = 3 * time.Second
	knockAgain = 500 * time.Millisecond
	comeFirst  = 250 * time.Millisecond
	comeLast   = 5 * time.Second
)

// comer is a replica that is to come back.
type comer struct {
	cancel context.CancelFunc
	done   chan struct{}

	mu       sync.Mutex
	swapping bool // it is being made a member
	unwanted bool
}

// giveUp ends it, unless it is being made a member: then it is one, and is dropped like one.
func (c *comer) giveUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unwanted = true; !c.swapping {
		c.cancel()
	}
}

// swaps says that it is going to be made a member.
func (c *comer) swaps() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unwanted {
		return api.Errorf(api.Unavailable, "it is not wanted any more")
	}
	c.swapping = true
	return nil
}

// swapped says that this is over.
func (c *comer) swapped() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.swapping = false; c.unwanted {
		c.cancel()
	}
}

func (c *comer) over() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// startRebuilds starts the goroutine that rebuilds replicas; mates.end ends it.
func (d *Data) startRebuilds(s *session) {
	var ctx context.Context
	ctx, s.mates.cancel = context.WithCancel(context.Background())
	s.mates.done = make(chan struct{})
	go d.mend(ctx, s, s.mates.joiners)
}

// mend brings replicas back that are not members, and says whether all are, until ctx ends.
func (d *Data) mend(ctx context.Context, s *session, joiners *sync.Map) {
	defer close(s.mates.done)
	if !d.awaitOthers(ctx, s) {
		return
	}
	var beside sync.WaitGroup
	beside.Go(func() { _ = every(ctx, time.Second, func() { d.bound(ctx, s) }) })
	beside.Go(func() { _ = every(ctx, compareEvery, func() { d.compareNext(ctx, s) }) })
	defer beside.Wait()
	comers := map[api.UID]*comer{}
	tick := time.NewTicker(mendEvery)
	defer tick.Stop()
	for {
		d.tellNews(ctx, s)
		d.mendOnce(ctx, s, joiners, comers, &beside)
		select {
		case <-tick.C:
		case <-s.mates.look:
		case <-ctx.Done():
			return
		}
	}
}

// lookSoon has the volume's replicas looked at: one was dropped, or is back.
func (m *mates) lookSoon() {
	select {
	case m.look <- struct{}{}:
	default: // it is going to be done anyway
	}
}

func (d *Data) mendOnce(ctx context.Context, s *session, joiners *sync.Map, comers map[api.UID]*comer,
	all *sync.WaitGroup) {
	if !d.api.Load() || s.fence.Load() != nil {
		return
	}
	epoch, members, err := s.engine.Epoch(ctx)
	if err != nil {
		return
	}
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
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
				s.engine.Suspect(string(r.Spec.UID), api.Errorf(api.Unavailable, "it is to leave the volume"))
			} else {
				d.repair(ctx, s, r, members, all)
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
		if c := comers[uid]; c != nil && !c.over() {
			continue
		}
		c := &comer{done: make(chan struct{})}
		var come context.Context
		come, c.cancel = context.WithCancel(ctx)
		comers[uid] = c
		all.Go(func() {
			defer close(c.done)
			defer c.cancel()
			d.comeBack(come, s, c, name, uid, joiners)
		})
	}
	for uid, c := range comers {
		if !wanted[uid] {
			c.giveUp()
			if c.over() {
				delete(comers, uid)
			}
		}
	}
	s.engine.SetWhole(epoch, whole && known == len(members))
}

// comeBack brings one replica back, or ends with ctx.
func (d *Data) comeBack(ctx context.Context, s *session, c *comer, name string, uid api.UID, joiners *sync.Map) {
	defer s.mates.lookSoon()
	pause := comeFirst
	for ctx.Err() == nil {
		var r api.Replica
		if d.client.Get(ctx, client.ObjectKey{Name: name}, &r) != nil || r.Spec.UID != uid {
			return // it is gone
		}
		wait := knockAgain
		err := d.knock(ctx, s.loop, &r)
		if err == nil {
			if err = d.bringBack(ctx, s, c, &r, joiners); err == nil {
				return
			}
			wait, pause = pause, min(2*pause, comeLast)
		} else if !api.Is(err, api.Unavailable) {
			wait, pause = pause, min(2*pause, comeLast)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
		}
	}
}

// knock asks whether a replica is there at all.
func (d *Data) knock(ctx context.Context, loop *iothreads.Thread, r *api.Replica) error {
	if r.Spec.Node == d.Node {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, knockTime)
	defer cancel()
	m, err := d.remote.Member(peer.Options{Node: r.Spec.Node, Replica: string(r.Spec.UID),
		Volume: string(r.Spec.VolumeUID), Loop: loop})
	if err != nil {
		return err
	}
	_, _, err = m.Probe(ctx)
	_ = m.Close() // it had no session
	return err
}

// bringBack makes one replica equal to the members, and one of them.
func (d *Data) bringBack(ctx context.Context, s *session, c *comer, r *api.Replica, joiners *sync.Map) error {
	select { // one at a time
	case s.mates.turn <- struct{}{}:
		defer func() { <-s.mates.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	spec := memberSpec{Name: r.Name, UID: r.Spec.UID, Node: r.Spec.Node, Disk: r.Spec.Disk}
	m, here, err := d.openMember(ctx, s, &spec)
	if err != nil {
		return err
	}
	joiners.Store(string(spec.UID), spec)
	defer joiners.Delete(string(spec.UID))
	tell := func(p engine.Progress, message string) {
		s.mates.mu.Lock()
		kind := "delta"
		if p.Full {
			kind = "full"
		}
		s.mates.rebuilds[r.Name] = api.RebuildStatus{Replica: r.Name, Kind: kind, Done: p.Done, Total: p.Total,
			Sent: p.Sent, Message: message}
		s.mates.mu.Unlock()
		s.wake()
	}
	tell(engine.Progress{}, "")
	p, err := s.engine.Join(ctx, m, engine.JoinOptions{OnProgress: func(p engine.Progress) { tell(p, "") },
		BytesPerSecond: d.number(ctx, "replica-copy-rate-limit") << 20, OnSwap: c.swaps,
		Turn: func(ctx context.Context) (func(), error) {
			tell(engine.Progress{}, "it waits for other replicas that are compared as a whole")
			return d.rebuilds.take(ctx, func() int { return (&replicaLoop{d}).copiesAtOnce(ctx) })
		}})
	c.swapped()
	s.mates.compared.Add(p.Done)
	s.mates.sent.Add(p.Sent)
	if err != nil {
		if api.Is(err, api.Corrupt) && d.repairFrom(ctx, s, m) {
			err = fmt.Errorf("%w; that was repaired from it", err)
		}
		_ = m.Member.Close()
		tell(p, err.Error())
		s.log.Warn("a replica cannot be brought back yet", "replica", r.Name, "err", err)
		return err
	}
	if p.Full {
		s.mates.fulls.Add(1)
	} else {
		s.mates.deltas.Add(1)
	}
	switch {
	case here != nil && spec.UID == s.Replica:
		here.OnLost(func(bool) { s.wake() })
		s.here.Store(here)
	case here != nil:
		s.others.Store(spec.UID, here)
	}
	s.mates.mu.Lock()
	delete(s.mates.rebuilds, r.Name)
	s.mates.news = append(s.mates.news, news{"Normal", "ReplicaRebuilt", "replica " + r.Name + " is current again: " +
		api.SizeText(p.Sent) + " of " + api.SizeText(p.Total) + " that were looked at had changed"})
	s.mates.mu.Unlock()
	s.wake()
	d.tellNews(ctx, s)
	return nil
}

// takers are those that do something of which only so many may be done at once.
type takers struct {
	mu      sync.Mutex
	n       int
	waiting []chan struct{}
}

// take waits until fewer than most are at it.
func (t *takers) take(ctx context.Context, most func() int) (release func(), err error) {
	for {
		t.mu.Lock()
		if t.n < most() {
			t.n++
			t.mu.Unlock()
			return t.give, nil
		}
		freed := make(chan struct{})
		t.waiting = append(t.waiting, freed)
		t.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			t.mu.Lock()
			t.waiting = slices.DeleteFunc(t.waiting, func(c chan struct{}) bool { return c == freed })
			t.mu.Unlock()
			return nil, ctx.Err()
		}
	}
}

func (t *takers) give() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n--
	for _, c := range t.waiting { // they look for themselves who is next
		close(c)
	}
	t.waiting = nil
}
