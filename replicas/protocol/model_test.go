package protocol

import (
	"iter"
	"math/bits"
)

// The model. One region of one volume; a value is the number of the write with this content, 0 the initial content.
// Every rule of the protocol can be switched off in `rules`.

const (
	maxReplicas = 3
	engines     = 2
)

type rules struct {
	dropBeforeAck bool // I2: a member leaves the API's record before the engine acknowledges a write without the member
	fence         bool // I3: a replica refuses every (epoch, incarnation) below the adopted pair
	incarnations  bool // rule 3: within an epoch, an older process's late message is refused
	resyncFirst   bool // rule 2: after an unclean end the engine copies one member to the others before any read
	bothIntents   bool // rule 1: a resync copies the union of both sides' intents
	durableIntent bool // rule 1: the intent is durable before the write
	keepIntents   bool // rule 1: intents stay while a replica is away
	// Found by the explorer:
	bootRecord     bool // a replica whose machine restarted since the last session says so at the next adoption
	sessionAnswers bool // an answer counts only during the session of the answer
	intactSurvivor bool // the engine drops no member unless a member with an unbroken session stays
	syncedJoin     bool // a newcomer's copy is durable before the swap makes the newcomer a member
	// An engine may begin without missing members. The engine has not copied the winner to the missing members:
	missingStays bool // missing members never serve, until the engine has dropped them
	missingKept  bool // and the device record names the missing members for the next process
}

func allRules() rules {
	return rules{true, true, true, true, true, true, true, true, true, true, true, true, true}
}

type limits struct {
	replicas                                    int
	writes, epochs, kills, hosts, stops, powers int8
}

type message struct {
	on              bool
	epoch, inc, val int8
}

type replica struct {
	up         bool
	lost       bool // the machine restarted since the replica's last session
	intent     bool
	epoch, inc int8
	cur, dur   int8 // content as read now; content after power loss
}

type engine struct {
	phase   int8 // off, claimed, ready
	epoch   int8
	inc     int8
	members uint8
	adopted uint8
	copied  uint8 // members with the winner's content
	winner  int8  // source of this process's copies: replica + 1, 0: none needed. Known to no disk and no server
	missing uint8 // members that this engine began without
	pending int8  // guest's write, 0: no write
	got     uint8
}

const (
	off     int8 = iota
	claimed      // has the swap, members must adopt, dirty regions must be copied out
	ready        // serves the guest
)

type state struct {
	rep [maxReplicas]replica
	eng [engines]engine
	// msg: a write in progress; late: a write of a dead incarnation.
	msg, late [engines][maxReplicas]message
	api       struct {
		epoch   int8
		members uint8
		clean   bool
		engine  int8 // engine + 1
	}
	next                      int8 // number of the next write
	kills, hosts, stops, pows int8 // faults used up
	// Ghosts, the promises to the guest: floor = oldest content that a read may still show; flushed = the same after
	// power loss; seen = the newest content that a read has shown.
	floor, flushed, seen int8
}

func bit(m int) uint8 { return 1 << m }

func start(l limits) state {
	var s state
	for i := range l.replicas {
		s.rep[i].up = true
		s.api.members |= bit(i)
	}
	s.api.clean, s.next = true, 1
	return s
}

// successors are all possible next steps.
func successors(s state, l limits, r rules) iter.Seq[step[state]] {
	return func(yield func(step[state]) bool) {
		more := true
		add := func(name string, to state, bad string) { more = more && yield(step[state]{name, to, bad}) }
		for e := range engines {
			engineSteps(s, e, l, r, add)
		}
		for m := range l.replicas {
			replicaSteps(s, m, l, r, add)
		}
	}
}

type adder func(name string, to state, bad string)

func engineSteps(s state, e int, l limits, r rules, add adder) {
	g := &s.eng[e]
	id := string(rune('A' + e))
	if g.phase == off {
		claim(s, e, l, r, add)
		return
	}
	for m := range l.replicas {
		b := bit(m)
		if g.members&b != 0 {
			adopt(s, e, m, r, add)
			drop(s, e, m, l, r, add)
			w := max(g.winner-1, 0)
			if g.winner != 0 && g.adopted == g.members&^g.missing && g.copied&b == 0 && s.rep[m].up &&
				(!r.fence || s.rep[m].epoch == g.epoch && s.rep[m].inc == g.inc && s.rep[w].epoch == g.epoch) {
				n := s
				copyRegion(&n, int(g.winner-1), m, r)
				n.eng[e].copied |= b
				settle(&n, e)
				add(id+" copies the winner out", n, "")
			}
		} else {
			join(s, e, m, l, r, add)
		}
	}
	begin(s, e, add)
	if g.phase == ready {
		serve(s, e, l, r, add)
	}
	if s.kills < l.kills { // kill -9 of the data process; the holder lives, the guest too
		n := s
		n.kills++
		k := &n.eng[e]
		for m := range l.replicas {
			if n.msg[e][m].on {
				n.late[e][m], n.msg[e][m] = n.msg[e][m], message{}
			}
		}
		k.inc++
		k.adopted, k.got, k.copied, k.phase = 0, 0, 0, claimed
		if !r.missingKept {
			k.missing = 0
		}
		winners := []int8{0}
		if k.winner != 0 { // no replica has a record of the dead process's winner, and the guest read nothing
			winners = membersOf(k.members)
		}
		for _, w := range winners {
			if n.eng[e].winner = w; w != 0 {
				n.eng[e].copied = bit(int(w - 1))
			}
			add(id+" is killed and resumes", n, "")
		}
	}
	if s.hosts < l.hosts { // engine and guest die together
		n := s
		n.hosts++
		for m := range l.replicas {
			if n.msg[e][m].on {
				n.late[e][m] = n.msg[e][m]
			}
			n.msg[e][m] = message{}
		}
		n.eng[e] = engine{}
		n.floor, n.seen = min(n.floor, n.flushed), min(n.seen, n.flushed)
		add(id+"'s host crashes", n, "")
	}
}

// membersOf lists the replicas of a set, each plus 1.
func membersOf(set uint8) (list []int8) {
	for m := range maxReplicas {
		if set&bit(m) != 0 {
			list = append(list, int8(m+1))
		}
	}
	return list
}

// claim is the attach: one swap takes the epoch. After an unclean end the engine chooses a winner. Any member may be
// the winner, because each member has all acknowledged writes.
func claim(s state, e int, l limits, r rules, add adder) {
	if s.api.epoch >= l.epochs {
		return
	}
	winners := []int8{0}
	if r.resyncFirst && !s.api.clean && bits.OnesCount8(s.api.members) > 1 {
		winners = winners[:0]
		for m := range l.replicas {
			if s.api.members&bit(m) != 0 && s.rep[m].up {
				winners = append(winners, int8(m+1))
			}
		}
	}
	for _, w := range winners {
		n := s
		n.api.epoch++
		if s.api.clean { // all was flushed: a restart since then lost nothing
			for m := range l.replicas {
				n.rep[m].lost = false
			}
		}
		n.api.clean, n.api.engine = false, int8(e+1)
		n.eng[e] = engine{phase: claimed, epoch: n.api.epoch, members: n.api.members, winner: w}
		if w != 0 {
			n.eng[e].copied = bit(int(w - 1))
		}
		if s.api.engine != 0 && int(s.api.engine-1) != e { // the other guest is given up: only flushed data is promised
			n.floor, n.seen = min(n.floor, n.flushed), min(n.seen, n.flushed)
		}
		add(string(rune('A'+e))+" attaches", n, "")
	}
}

// begin lets an engine serve without the missing members, as long as the engine has a member, and the winner if any.
// Missing members stay members until the engine has dropped them.
func begin(s state, e int, add adder) {
	g := &s.eng[e]
	left := g.members &^ g.adopted
	if g.phase != claimed || g.adopted == 0 || left&^g.missing == 0 ||
		g.winner != 0 && g.adopted&bit(int(g.winner-1)) == 0 {
		return
	}
	n := s
	n.eng[e].missing |= left
	settle(&n, e)
	add(string(rune('A'+e))+" begins without those that are missing", n, "")
}

func older(ae, ai, be, bi int8) bool { return ae < be || ae == be && ai < bi }

func adopt(s state, e, m int, r rules, add adder) {
	g, p := &s.eng[e], &s.rep[m]
	if g.adopted&bit(m) != 0 || !p.up || r.missingStays && g.missing&bit(m) != 0 {
		return
	}
	n := s
	id := string(rune('A' + e))
	if r.fence && older(g.epoch, g.inc, p.epoch, p.inc) {
		n.eng[e] = engine{}
		add(id+" is refused and stops", n, "")
		return
	}
	// The replica's unflushed writes may be lost. Only the last member is adopted in this state.
	if r.bootRecord && p.lost && g.members != bit(m) && g.winner == 0 {
		// No replica has the newest content any more: the device fails, and a new attach decides.
		if !anyIntact(s, g.members&^g.missing) {
			n.eng[e] = engine{}
			n.floor, n.seen = min(n.floor, n.flushed), min(n.seen, n.flushed)
			add(id+" finds every member restarted and stops", n, "")
		}
		return // only drop() can follow
	}
	q := &n.rep[m]
	q.epoch, q.inc, q.lost = g.epoch, g.inc, false
	n.eng[e].adopted |= bit(m)
	n.eng[e].missing &^= bit(m)
	settle(&n, e)
	add(id+" is adopted", n, "")
}

// settle makes an engine ready once all members, except missing members, have adopted the engine and have the winner's
// content. The engine then sends the guest's pending write again to the members without an answer.
func settle(s *state, e int) {
	g := &s.eng[e]
	here := g.members &^ g.missing
	if g.adopted&here != here || g.winner != 0 && g.copied&here != here {
		return
	}
	g.phase, g.winner, g.copied = ready, 0, 0
	if g.pending == 0 {
		return
	}
	for m := range maxReplicas {
		if here&bit(m) != 0 && g.got&bit(m) == 0 && !s.msg[e][m].on {
			s.msg[e][m] = message{true, g.epoch, g.inc, g.pending}
		}
	}
}

func drop(s state, e, m int, l limits, r rules, add adder) {
	g := &s.eng[e]
	b := bit(m)
	if g.members == b || s.api.epoch >= l.epochs {
		return
	}
	// A suspicion may be false, but needs an occasion.
	if s.rep[m].up && !s.rep[m].lost && g.pending == 0 && g.missing&b == 0 {
		return
	}
	if r.intactSurvivor && g.adopted&^b == 0 {
		return
	}
	n := s
	h := &n.eng[e]
	id := string(rune('A' + e))
	if s.api.epoch != g.epoch || s.api.engine != int8(e+1) {
		*h = engine{}
		add(id+" loses a swap and stops", n, "")
		return
	}
	if h.winner == int8(m+1) { // nothing was read yet: another may win
		w := int8(bits.TrailingZeros8(g.members&^b&^g.missing)) + 1
		if h.copied&^b != 0 && h.copied != b {
			w = int8(bits.TrailingZeros8(h.copied&^b)) + 1
		}
		h.winner, h.copied = w, bit(int(w-1))
	}
	h.members &^= b
	h.missing &^= b
	h.got &^= b
	n.msg[e][m], n.late[e][m] = message{}, firstOn(s.msg[e][m], s.late[e][m])
	if !r.dropBeforeAck { // acknowledges without telling anyone
		settle(&n, e)
		add(id+" forgets a member", n, "")
		return
	}
	n.api.epoch++
	n.api.members = h.members
	h.epoch, h.inc, h.adopted, h.phase = n.api.epoch, 0, 0, claimed
	for i := range l.replicas { // in flight under the old epoch: sent again under the new epoch
		if n.msg[e][i].on {
			n.late[e][i], n.msg[e][i] = n.msg[e][i], message{}
		}
	}
	add(id+" drops a member", n, "")
}

func firstOn(a, b message) message {
	if a.on {
		return a
	}
	return b
}

func copyRegion(s *state, from, to int, r rules) {
	a, b := &s.rep[from], &s.rep[to]
	if a.intent || r.bothIntents && b.intent {
		b.cur, b.intent = a.cur, true
	}
}

// join brings a replica back: under the region's lock, so no write is in progress.
func join(s state, e, m int, l limits, r rules, add adder) {
	g, p := &s.eng[e], &s.rep[m]
	if g.phase != ready || g.missing != 0 || g.pending != 0 || !p.up || s.api.epoch >= l.epochs {
		return
	}
	if s.api.epoch != g.epoch || s.api.engine != int8(e+1) {
		return
	}
	for i := range l.replicas {
		if g.members&bit(i) != 0 && !s.rep[i].up {
			return
		}
	}
	n := s
	src := bits.TrailingZeros8(g.members)
	// ADOPT comes first, and stops late writes to the newcomer.
	q := &n.rep[m]
	q.epoch, q.inc, q.lost = n.api.epoch+1, 0, false
	copyRegion(&n, src, m, r)
	if r.syncedJoin {
		n.rep[m].dur = n.rep[m].cur
	}
	n.api.epoch++
	h := &n.eng[e]
	h.members |= bit(m)
	n.api.members = h.members
	h.epoch, h.inc, h.adopted, h.phase = n.api.epoch, 0, 0, claimed
	add(string(rune('A'+e))+" takes a replica back", n, "")
}

// serve has the steps of a ready engine for its guest.
func serve(s state, e int, l limits, r rules, add adder) {
	g := &s.eng[e]
	id := string(rune('A' + e))
	current := s.api.epoch == g.epoch && s.api.engine == int8(e+1)
	if g.pending == 0 && s.next <= l.writes {
		n := s
		n.eng[e].pending, n.eng[e].got = n.next, 0
		n.next++
		for m := range l.replicas {
			if (g.members&^g.missing)&bit(m) != 0 {
				n.msg[e][m] = message{true, g.epoch, g.inc, n.eng[e].pending}
			}
		}
		add(id+" writes", n, "")
	}
	if g.pending != 0 && g.got&g.members == g.members {
		n := s
		bad := ""
		for m := range l.replicas {
			// Also a fenced engine may hear its members' answers late, if the engine's successor found the write there.
			if s.api.members&bit(m) != 0 && s.rep[m].cur < g.pending && !s.rep[m].lost {
				bad = "acknowledged, but a recorded member does not have the write"
			}
		}
		if current { // a guest given up is promised nothing more
			n.floor, n.seen = g.pending, g.pending
		}
		n.eng[e].pending, n.eng[e].got = 0, 0
		add(id+" acknowledges", n, bad)
	}
	if g.pending != 0 || !current {
		return // a fenced engine's reads may be stale: documented
	}
	up := true
	for m := range l.replicas {
		up = up && (g.members&bit(m) == 0 || s.rep[m].up && !s.rep[m].lost && g.missing&bit(m) == 0)
	}
	for m := range l.replicas { // a read, from whichever member
		if (g.members&^g.missing)&bit(m) == 0 || !s.rep[m].up || s.rep[m].lost {
			continue
		}
		n := s
		bad := ""
		switch v := s.rep[m].cur; {
		case v < s.floor:
			bad = "a read lost an acknowledged write"
		case v < s.seen:
			bad = "a read went back in time"
		default:
			n.seen = v
		}
		add(id+" reads", n, bad)
	}
	if !up {
		return
	}
	n := s // flush
	whole := bits.OnesCount8(g.members) == l.replicas
	for m := range l.replicas {
		if g.members&bit(m) != 0 {
			n.rep[m].dur = n.rep[m].cur
			if whole || !r.keepIntents {
				n.rep[m].intent = false
			}
		}
	}
	n.flushed = max(n.flushed, n.floor)
	add(id+" flushes", n, "")
	if s.api.engine == int8(e+1) {
		n.api.clean, n.api.engine = true, 0
		n.eng[e] = engine{}
		add(id+" detaches", n, "")
	}
}

func replicaSteps(s state, m int, l limits, r rules, add adder) {
	p := &s.rep[m]
	for e := range engines {
		deliver(s, e, m, &s.msg[e][m], func(n *state) *message { return &n.msg[e][m] }, r, add)
		deliver(s, e, m, &s.late[e][m], func(n *state) *message { return &n.late[e][m] }, r, add)
	}
	if !p.up {
		n := s
		n.rep[m].up = true
		add("a replica returns", n, "")
		return
	}
	gone := func(n *state) {
		n.rep[m].up = false
		for e := range engines { // the replica's sessions break
			n.eng[e].adopted &^= bit(m)
			if r.sessionAnswers {
				n.eng[e].got &^= bit(m)
			}
			if n.eng[e].members&bit(m) != 0 && n.eng[e].phase == ready {
				n.eng[e].phase = claimed
			}
			if n.msg[e][m].on {
				n.msg[e][m] = message{}
			}
		}
	}
	if s.stops < l.stops {
		n := s
		n.stops++
		gone(&n)
		add("a replica's process dies", n, "")
	}
	if s.pows < l.powers {
		n := s
		n.pows++
		gone(&n)
		n.rep[m].lost = true
		if !r.durableIntent && p.cur == p.dur {
			n.rep[m].intent = false
		}
		// The last copy, or all copies: the guest's unflushed writes may be lost, as with any disk's cache.
		if others := s.api.members &^ bit(m); !anyIntact(s, others) {
			n.floor, n.seen = min(n.floor, n.flushed), min(n.seen, n.flushed)
		}
		add("a replica loses power, its cache survives", n, "")
		n.rep[m].cur = p.dur
		if !r.durableIntent {
			n.rep[m].intent = false
		}
		add("a replica loses power", n, "")
	}
}

func anyIntact(s state, members uint8) bool {
	for m := range maxReplicas {
		if members&bit(m) != 0 && !s.rep[m].lost {
			return true
		}
	}
	return false
}

func deliver(s state, e, m int, w *message, at func(*state) *message, r rules, add adder) {
	p := &s.rep[m]
	if !w.on || !p.up {
		return
	}
	n := s
	*at(&n) = message{}
	refuse := r.fence && (w.epoch < p.epoch || r.incarnations && w.epoch == p.epoch && w.inc < p.inc)
	if p.lost { // the session broke; the replica takes no write before the next ADOPT
		refuse = true
	}
	if refuse {
		add("a late write is refused", n, "")
		return
	}
	q := &n.rep[m]
	q.cur, q.intent = w.val, true
	g := &n.eng[e]
	if g.epoch == w.epoch && g.inc == w.inc && g.pending == w.val {
		g.got |= bit(m)
	}
	add("a write arrives", n, "")
}
