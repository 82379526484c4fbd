package protocol

import (
	"iter"
	"math/bits"
)

// The model of a cut over several members: a snapshot of one region. The other model has the write path itself; here a
// write reaches its members one by one, and a new engine resyncs the members before the engine serves. The explorer
// checks that every recorded member has a reported snapshot, that all members hold the same content under this
// snapshot, and that the snapshot has every write which was acknowledged before a user asked for the snapshot.

// cutRules are the rules of the cut; each can be switched off.
type cutRules struct {
	drain     bool // the engine holds writes and waits for those in progress before the first member seals
	allAnswer bool // the engine reports nothing and ends no hold before every member has sealed or was dropped
	confirm   bool // the engine compares all members before it believes the stack of a single member
	rollback  bool // a new engine deletes a snapshot which some member lacks
	fence     bool // a replica refuses a late SEAL of a dead engine
	identity  bool // the engine tells two tries to cut one snapshot apart when a replica comes back
	abort     bool // found by the explorer: an engine aborts a failed cut on every member before anything else
	// Found by the explorer, too: after a failed cut, no write continues before the members have the same snapshots.
	levelFirst bool
	layers     bool // a returning replica gets the snapshots which the replica lacks, and loses the deleted ones
}

func allCutRules() cutRules {
	return cutRules{drain: true, allAnswer: true, confirm: true, rollback: true, fence: true, identity: true,
		abort: true, levelFirst: true, layers: true}
}

type cutLimits struct {
	replicas                                   int
	writes, tries, epochs, kills, hosts, stops int8
	deletes                                    bool
}

// sealed is a snapshot in a replica's stack; try 0: no snapshot.
type sealed struct{ try, val int8 }

type cutReplica struct {
	up         bool
	epoch, inc int8
	cur        int8
	snap       sealed
}

type cutEngine struct {
	phase      int8 // off, claimed, ready, or holding
	epoch, inc int8
	members    uint8
	adopted    uint8
	pending    int8 // guest's write, 0: no write
	got        uint8
	try        int8  // of the cut in progress
	done       uint8 // members that answered the SEAL
	torn       bool  // a cut failed: the members may differ in snapshots
}

const holding int8 = ready + 1

type seal struct {
	on         bool
	epoch, inc int8
	try        int8
}

type cutState struct {
	rep  [maxReplicas]cutReplica
	eng  cutEngine
	msg  [maxReplicas]seal // SEAL in progress
	late [maxReplicas]seal // of a dead incarnation
	api  struct {
		epoch    int8
		members  uint8
		reported sealed
		deleting bool
		deleted  bool
	}
	next, tries         int8
	kills, hosts, stops int8
	acked               int8 // ghosts: the newest acknowledged write; the same when the snapshot was asked for,
	asked               int8 // plus one; 0: not yet asked for
}

func startCut(l cutLimits) cutState {
	var s cutState
	for i := range l.replicas {
		s.rep[i].up = true
		s.api.members |= bit(i)
	}
	s.next = 1
	return s
}

func cutSuccessors(s cutState, l cutLimits, r cutRules) iter.Seq[step[cutState]] {
	return func(yield func(step[cutState]) bool) {
		more := true
		add := func(name string, n cutState) { more = more && yield(step[cutState]{name, n, broken(&n)}) }
		if s.asked == 0 {
			n := s
			n.asked = s.acked + 1
			add("a snapshot is asked for", n)
		}
		if l.deletes && s.api.reported.try != 0 && !s.api.deleting {
			n := s
			n.api.deleting = true
			add("its deletion is asked for", n)
		}
		cutEngineSteps(s, l, r, add)
		for m := range l.replicas {
			cutReplicaSteps(s, m, l, r, add)
		}
	}
}

// broken checks the invariant: only recorded members count, whether they are up or not.
func broken(s *cutState) string {
	is := s.api.reported
	if is.try == 0 || s.api.deleting || s.api.deleted {
		return ""
	}
	for m := range maxReplicas {
		switch p := s.rep[m].snap; {
		case s.api.members&bit(m) == 0:
		case p.try == 0:
			return "a member lacks a snapshot that was reported"
		case p.val != is.val:
			return "members hold different content under one snapshot"
		}
	}
	if is.val < s.asked-1 {
		return "the snapshot lacks an acknowledged write"
	}
	return ""
}

type cutAdder func(name string, n cutState)

func cutEngineSteps(s cutState, l cutLimits, r cutRules, add cutAdder) {
	g := &s.eng
	if g.phase == off {
		var up uint8
		for m := range l.replicas {
			if s.api.members&bit(m) != 0 && s.rep[m].up {
				up |= bit(m)
			}
		}
		if up == 0 || s.api.epoch >= l.epochs {
			return
		}
		n := s // the same swap leaves out the members that the engine cannot reach
		n.api.epoch++
		n.api.members = up
		n.eng = cutEngine{phase: claimed, epoch: n.api.epoch, members: up}
		add("an engine attaches", n)
		return
	}
	if g.phase == claimed && g.adopted == g.members {
		openCut(s, r, add)
	}
	if g.phase == ready {
		serveCut(s, l, r, add)
	}
	if g.phase == holding {
		holdCut(s, l, r, add)
	}
	for m := range l.replicas {
		b := bit(m)
		if g.members&b != 0 && g.adopted&b == 0 && s.rep[m].up {
			n := s
			n.rep[m].epoch, n.rep[m].inc = g.epoch, g.inc
			n.eng.adopted |= b
			add("a member adopts", n)
		}
		// The engine drops a member that does not answer; another member must be in its session.
		if g.members&b != 0 && g.adopted&b == 0 && g.adopted != 0 && s.api.epoch < l.epochs {
			n := s
			n.api.epoch++
			n.api.members &^= b
			h := &n.eng
			h.members, h.epoch, h.inc, h.adopted = n.api.members, n.api.epoch, 0, 0
			h.got &^= b
			h.done &^= b
			for i := range l.replicas {
				if n.msg[i].on {
					n.late[i], n.msg[i] = n.msg[i], seal{}
				}
			}
			if h.phase != claimed {
				h.phase += 10 // returns to its phase once the survivors have adopted
			}
			add("a member is dropped", n)
		}
		join := g.phase == ready && g.pending == 0 && !g.torn && g.members&b == 0 && s.rep[m].up
		if join && g.adopted == g.members && s.api.epoch < l.epochs {
			n := s
			src := &s.rep[bits.TrailingZeros8(g.members)]
			q := &n.rep[m]
			q.cur, q.epoch, q.inc = src.cur, g.epoch, g.inc // the replica adopts before the engine copies anything
			if r.layers && (r.identity && q.snap.try != src.snap.try || (q.snap.try == 0) != (src.snap.try == 0)) {
				q.snap = src.snap
			}
			n.api.epoch++
			n.api.members |= b
			n.eng.members, n.eng.epoch, n.eng.inc, n.eng.adopted, n.eng.phase = n.api.members, n.api.epoch, 0, 0, ready+10
			add("a replica comes back", n)
		}
	}
	if g.phase > 10 && g.adopted == g.members {
		n := s
		n.eng.phase -= 10
		add("the survivors are in the new epoch", n)
	}
	dies := func() cutState {
		n := s
		for m := range l.replicas {
			if n.msg[m].on {
				n.late[m], n.msg[m] = n.msg[m], seal{}
			}
		}
		return n
	}
	if s.kills < l.kills {
		n := dies()
		n.kills++
		n.eng = cutEngine{phase: claimed, epoch: g.epoch, inc: g.inc + 1, members: g.members, pending: g.pending}
		add("the engine is killed and resumes", n)
	}
	if s.hosts < l.hosts {
		n := dies()
		n.hosts++
		n.eng = cutEngine{}
		add("the engine's host crashes", n)
	}
}

// openCut resyncs the contents of the members and levels the lists of snapshots, before the engine serves.
func openCut(s cutState, r cutRules, add cutAdder) {
	g := &s.eng
	for w := range maxReplicas { // any member may be the winner
		if g.members&bit(w) == 0 {
			continue
		}
		n := s
		for m := range maxReplicas {
			if g.members&bit(m) != 0 {
				n.rep[m].cur = s.rep[w].cur
			}
		}
		level(&n, r)
		n.eng.phase, n.eng.got = ready, 0
		n.eng.try, n.eng.done, n.eng.torn = 0, 0, false
		add("the members are made equal", n)
	}
}

// levelled ends a failed cut.
func levelled(s cutState, r cutRules, add cutAdder) {
	n := s
	level(&n, r)
	n.eng.torn, n.eng.phase = false, ready
	if r.abort { // no cut is prepared any more: a late SEAL finds nothing to do
		n.msg = [maxReplicas]seal{}
	}
	add("the snapshots are levelled", n)
}

// level makes the snapshots of the members the same.
func level(n *cutState, r cutRules) {
	var first sealed
	same := true
	for m := range maxReplicas {
		if n.eng.members&bit(m) == 0 {
			continue
		}
		p := n.rep[m].snap
		if m == bits.TrailingZeros8(n.eng.members) {
			first = p
		}
		same = same && p.try == first.try
	}
	for m := range maxReplicas {
		switch {
		case same || n.eng.members&bit(m) == 0:
		case r.rollback:
			n.rep[m].snap = sealed{}
		}
	}
}

func serveCut(s cutState, l cutLimits, r cutRules, add cutAdder) {
	g := &s.eng
	if g.pending == 0 && s.next <= l.writes {
		n := s
		n.eng.pending, n.eng.got = n.next, 0
		n.next++
		add("a write begins", n)
	}
	for m := range maxReplicas {
		if g.pending != 0 && g.members&g.adopted&bit(m) != 0 && g.got&bit(m) == 0 && s.rep[m].up {
			n := s
			n.rep[m].cur = g.pending
			n.eng.got |= bit(m)
			add("a write arrives", n)
		}
	}
	if g.pending != 0 && g.got&g.members == g.members {
		n := s
		n.acked, n.eng.pending, n.eng.got = g.pending, 0, 0
		add("a write is acknowledged", n)
	}
	if g.adopted != g.members {
		return
	}
	if g.torn {
		levelled(s, r, add)
	}
	has := common(&s)
	wanted := s.asked != 0 && s.api.reported.try == 0
	if wanted && has.try == 0 && !g.torn && s.tries < l.tries && (g.pending == 0 || !r.drain) {
		n := s
		n.tries++
		n.eng.phase, n.eng.try, n.eng.done = holding, n.tries, 0
		for m := range maxReplicas {
			if g.members&bit(m) != 0 {
				n.msg[m] = seal{true, g.epoch, g.inc, n.tries}
			}
		}
		add("writes are held, the cut begins", n)
	}
	if wanted && has.try != 0 && !g.torn { // of a try whose answer was lost
		n := s
		n.api.reported = has
		add("the snapshot is found and reported", n)
	}
	if s.api.deleting && !s.api.deleted {
		left := false
		for m := range maxReplicas {
			if g.members&bit(m) == 0 || s.rep[m].snap.try == 0 {
				continue
			}
			left = true
			if s.rep[m].up {
				n := s
				n.rep[m].snap = sealed{}
				add("a member drops the snapshot", n)
			}
		}
		if !left {
			n := s
			n.api.deleted = true
			add("the snapshot is gone", n)
		}
	}
}

// common is the snapshot of the first member: the same as on all members, if the engine has compared the members.
func common(s *cutState) (is sealed) {
	for m := range maxReplicas {
		if s.eng.members&bit(m) != 0 {
			return s.rep[m].snap
		}
	}
	return is
}

func holdCut(s cutState, l cutLimits, r cutRules, add cutAdder) {
	g := &s.eng
	if g.torn {
		if g.adopted == g.members {
			levelled(s, r, add)
		}
		return
	}
	for m := range l.replicas { // a cut continues with a member that came back within its session
		if b := bit(m); g.members&b != 0 && g.adopted&b != 0 && g.done&b == 0 && !s.msg[m].on && s.rep[m].up {
			n := s
			n.msg[m] = seal{true, g.epoch, g.inc, g.try}
			add("a member is asked once more", n)
		}
	}
	if g.adopted == g.members && g.done&g.members == g.members || !r.allAnswer && g.done != 0 {
		n := s
		for m := range maxReplicas {
			if g.done&bit(m) != 0 {
				n.api.reported = s.rep[m].snap
			}
		}
		n.eng.phase, n.eng.done = ready, 0
		add("the cut is reported", n)
	}
	if g.done == 0 { // no member answered
		n := s
		if n.eng.torn = true; !r.levelFirst {
			n.eng.phase = ready
		}
		add("the cut is given up", n)
	}
	if !r.confirm && s.asked != 0 && s.api.reported.try == 0 {
		for m := range l.replicas {
			if g.members&bit(m) != 0 && s.rep[m].snap.try != 0 {
				n := s
				n.api.reported = s.rep[m].snap
				add("the snapshot is found on one member", n)
			}
		}
	}
}

func cutReplicaSteps(s cutState, m int, l cutLimits, r cutRules, add cutAdder) {
	p := &s.rep[m]
	if !p.up {
		n := s
		n.rep[m].up = true
		add("a replica returns", n)
		return
	}
	take := func(x seal, n cutState) {
		old := x.epoch < p.epoch || x.epoch == p.epoch && x.inc < p.inc
		if r.fence && old {
			add("a late SEAL is refused", n)
			return
		}
		if q := &n.rep[m]; q.snap.try != x.try {
			q.snap = sealed{x.try, q.cur}
		}
		if g := &n.eng; g.phase == holding && g.epoch == x.epoch && g.inc == x.inc && g.try == x.try {
			g.done |= bit(m)
		}
		add("a member seals", n)
	}
	if s.msg[m].on {
		n := s
		n.msg[m] = seal{}
		take(s.msg[m], n)
	}
	if s.late[m].on {
		n := s
		n.late[m] = seal{}
		take(s.late[m], n)
	}
	if s.stops < l.stops {
		n := s
		n.stops++
		n.rep[m].up = false
		n.eng.adopted &^= bit(m)
		n.eng.got &^= bit(m)
		n.msg[m] = seal{} // its session broke
		if n.eng.phase == ready || n.eng.phase == holding {
			n.eng.phase += 10
		}
		add("a replica's process dies", n)
	}
}
