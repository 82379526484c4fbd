package peer

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Times of a connection.
const (
	pingEvery   = 2 * time.Second
	silentAfter = 10 * time.Second // a connection from which nothing came for so long is broken
	helloTime   = 5 * time.Second
)

// slotState says which side owns the slot's buffer.
type slotState uint8

const (
	slotIdle    slotState = iota // with the Member, until it has a connection
	slotQueued                   // with a connection, not begun
	slotWriting                  // its payload is being written
	slotSent
	slotReading // its answer is being read
	slotOver
)

// slot is a request in progress, or a call.
type slot struct {
	m      *Member
	req    *block.Request // or
	call   *call
	h      header
	state  slotState // guarded by the connection's lock while on a connection
	id     uint64
	weight int64 // bytes of credit
	ended  bool  // answered; under the Member's lock
	kept   bool  // never used again: a connection may still refer to the slot
	// given: the Member took the slot back while the connection used its buffer, and the connection completes the slot.
	given bool
	err   error
	prev  *slot // among the Member's pending slots
	next  *slot
}

// call is a control request and its answer.
type call struct {
	payload []byte
	answer  []byte
	err     error
	done    chan struct{}
}

// conn is one connection to a node.
type conn struct {
	set     *lanes
	nc      net.Conn
	below   *records // of TLS; nil: without TLS
	credit  int64
	version int // spoken on the connection

	mu       sync.Mutex
	work     *sync.Cond
	sent     *sync.Cond // for readAnswer: writeQueue let go of a slot, or the connection broke
	queue    []*slot
	table    map[uint64]*slot // sent and not answered
	nextID   uint64
	flying   int64            // bytes of credit in use
	shares   map[uint32]int64 // by session
	members  map[uint32]*Member
	ping     bool
	heard    time.Duration
	err      error
	boot     string
	ended    chan struct{} // both goroutines have ended: no buffer is in use
	closed   chan struct{} // and the members know
	finished sync.WaitGroup
}

// dialConn says hello and starts the connection's goroutines.
func dialConn(set *lanes, nc net.Conn, below *records) (*conn, error) {
	c := &conn{set: set, nc: nc, below: below, table: map[uint64]*slot{}, members: map[uint32]*Member{},
		shares: map[uint32]int64{}, ended: make(chan struct{}), closed: make(chan struct{})}
	c.work, c.sent = sync.NewCond(&c.mu), sync.NewCond(&c.mu)
	_ = nc.SetDeadline(time.Now().Add(helloTime))
	r := bufio.NewReaderSize(nc, 64<<10)
	b, err := json.Marshal(hello{Version: Version, MinVersion: minVersion, Node: set.d.Node})
	if err != nil {
		return nil, err
	}
	if err := writeControl(nc, header{kind: kindHello}, b); err != nil {
		return nil, err
	}
	var hb [headerSize]byte
	h, err := readHeader(r, &hb)
	if err == nil && h.kind != kindHello {
		err = api.Errorf(api.Corrupt, "node %s answers hello with a frame of kind %d", set.node, h.kind)
	}
	if err == nil {
		b, err = readPayload(r, &h)
	}
	var answer hello
	if err == nil {
		err = json.Unmarshal(b, &answer)
	}
	if err == nil {
		err = answer.validate()
	}
	if err == nil && answer.Error != nil {
		err = answer.Error.toError()
	}
	if err == nil {
		c.version, err = answer.agreeVersion()
	}
	if err != nil {
		return nil, err
	}
	_ = nc.SetDeadline(time.Time{})
	c.boot, c.credit, c.heard = answer.Boot, max(answer.Credit, maxPayload), set.d.now()
	c.finished.Add(2)
	go c.writeQueue()
	go c.readAnswers(r)
	go func() { // ends with the two, which Close of the Dialer waits for
		c.finished.Wait()
		close(c.ended)
		c.set.notifyMembers(c)
		close(c.closed)
	}()
	return c, nil
}

// writeControl writes a frame with a small payload.
func writeControl(w io.Writer, h header, payload []byte) error {
	h.size, h.sum = uint32(len(payload)), crc32.Checksum(payload, castagnoli)
	b := make([]byte, headerSize+len(payload))
	h.encode((*[headerSize]byte)(b))
	copy(b[headerSize:], payload)
	_, err := w.Write(b)
	return err
}

// enqueueSlot takes a slot of a member; false: the connection is broken.
func (c *conn) enqueueSlot(s *slot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return false
	}
	s.state = slotQueued
	c.queue = append(c.queue, s)
	c.work.Signal()
	return true
}

// cancelSlot takes a slot back; false: the connection uses its buffer, and completes the slot afterwards.
func (c *conn) cancelSlot(s *slot) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s.state {
	case slotWriting, slotReading:
		s.given = true
		return false
	case slotSent:
		c.forgetSlot(s)
	}
	s.state = slotOver
	return true
}

// forgetSlot takes a sent slot out of the table. The caller has the lock.
func (c *conn) forgetSlot(s *slot) {
	delete(c.table, s.id)
	c.countCredit(s.h.session, -s.weight)
	c.work.Signal()
}

// countCredit counts what a session has of the credit. The caller has the lock.
func (c *conn) countCredit(session uint32, n int64) {
	c.flying += n
	if c.shares[session] += n; c.shares[session] == 0 {
		delete(c.shares, session)
	}
}

// subscribeMember subscribes a member to the end of the connection.
func (c *conn) subscribeMember(session uint32, m *Member) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.members[session] = m
}

// unsubscribeSession unsubscribes a session.
func (c *conn) unsubscribeSession(session uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.members, session)
}

// breakConnection breaks the connection.
func (c *conn) breakConnection(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
		hangUp(c.nc, c.below)
	}
	c.work.Broadcast()
	c.sent.Broadcast()
	c.mu.Unlock()
}

func (c *conn) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// writeQueue sends the queue. Several frames travel together; writeQueue flushes the buffer when the queue is empty.
func (c *conn) writeQueue() {
	defer c.finished.Done()
	w := newFrames(c.nc, c.below)
	var hb [headerSize]byte
	for {
		s, ping, err := c.awaitWork(w)
		if err != nil {
			c.breakConnection(err)
			return
		}
		if ping {
			h := header{kind: kindPing}
			h.encode(&hb)
			_, err = w.Write(hb[:])
		} else {
			err = c.sendFrame(w, s, &hb)
			c.releaseSent(s)
		}
		if err != nil {
			c.breakConnection(err)
			return
		}
	}
}

// releaseSent lets go of a slot after the write. The answer may have arrived already, and waits in readAnswer.
func (c *conn) releaseSent(s *slot) {
	c.mu.Lock()
	over := s.given
	if s.state = slotSent; over {
		c.forgetSlot(s)
		s.state = slotOver
	}
	c.sent.Broadcast()
	c.mu.Unlock()
	if over {
		s.m.completeSlot(s, errGiven)
	}
}

var errGiven = api.Errorf(api.Unavailable, "the request was abandoned")

// awaitWork waits for something to write.
func (c *conn) awaitWork(w *frames) (s *slot, ping bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.err != nil:
			return nil, false, c.err
		case c.ping:
			c.ping = false
			return nil, true, nil
		}
		if s := c.nextSlot(); s != nil {
			return s, false, nil
		}
		if w.hasUnflushed() {
			c.mu.Unlock()
			err := w.Flush()
			c.mu.Lock()
			if err != nil {
				return nil, false, err
			}
			continue
		}
		c.work.Wait()
	}
}

// nextSlot takes the first slot from the queue that has credit; nil: no slot has. nextSlot passes over all slots of a
// session without credit, so that their order stays: other sessions do not wait for a hanging disk. The caller has the
// lock.
func (c *conn) nextSlot() *slot {
	var few [8]uint32
	short := few[:0] // sessions without credit
	for i := 0; i < len(c.queue); {
		s := c.queue[i]
		switch {
		case s.state != slotQueued: // taken back
			c.queue = slices.Delete(c.queue, i, i+1)
		case slices.Contains(short, s.h.session):
			i++
		case !c.hasCredit(s):
			short = append(short, s.h.session)
			i++
		default:
			c.queue = slices.Delete(c.queue, i, i+1)
			c.nextID++
			s.id, s.state = c.nextID, slotWriting
			c.table[s.id] = s
			c.countCredit(s.h.session, s.weight)
			return s
		}
	}
	return nil
}

// hasCredit reports whether a slot has credit. A session with little in progress gets its share beyond the credit, as
// of the server's buffers. The caller has the lock.
func (c *conn) hasCredit(s *slot) bool {
	has := c.shares[s.h.session]
	return s.weight == 0 || c.flying+s.weight <= c.credit || has == 0 || has+s.weight <= sessionShare
}

// sendFrame writes one frame. The payload of a write is the guest's buffer, which does not change before the answer.
func (c *conn) sendFrame(w *frames, s *slot, hb *[headerSize]byte) error {
	h := s.h
	h.id = s.id
	var payload []byte
	switch {
	case s.call != nil:
		payload = s.call.payload
	case s.req.Op == block.OpWrite && len(s.req.Spans) > 0 && c.version >= spansSince:
		return sendSpans(w, h, s.req, hb)
	case s.req.Op == block.OpWrite:
		payload = s.req.Buf
	}
	h.size = uint32(len(payload))
	if h.size > 0 {
		h.sum = crc32.Checksum(payload, castagnoli)
	}
	h.encode(hb)
	if _, err := w.Write(hb[:]); err != nil {
		return err
	}
	_, err := w.Write(payload)
	return err
}

// sendSpans writes the frame of a write with spans.
func sendSpans(w *frames, h header, q *block.Request, hb *[headerSize]byte) error {
	table := encodeSpans(q.Spans)
	h.flags |= flagSpans
	h.size, h.sum = uint32(len(table)), crc32.Checksum(table, castagnoli)
	for _, s := range q.Spans {
		h.size += uint32(s.Len)
		h.sum = crc32.Update(h.sum, castagnoli, q.Buf[s.Off:][:s.Len])
	}
	h.encode(hb)
	if _, err := w.Write(hb[:]); err != nil {
		return err
	}
	if _, err := w.Write(table); err != nil {
		return err
	}
	for _, s := range q.Spans {
		if _, err := w.Write(q.Buf[s.Off:][:s.Len]); err != nil {
			return err
		}
	}
	return nil
}

// readAnswers takes answers.
func (c *conn) readAnswers(r *bufio.Reader) {
	defer c.finished.Done()
	var hb [headerSize]byte
	for {
		h, err := readHeader(r, &hb)
		if err == nil {
			err = c.readAnswer(r, &h)
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = api.Errorf(api.Unavailable, "node %s closed the connection", c.set.node)
			}
			c.breakConnection(err)
			return
		}
	}
}

// awaitSent returns the slot of an id once writeQueue does not use the slot any more; nil: the slot was given up. A
// node may answer before it has read the request: until the write ends the slot's buffer is in use. If the write does
// not end, checkSilence breaks the connection. The caller has the lock.
func (c *conn) awaitSent(id uint64) (*slot, error) {
	for {
		s := c.table[id]
		switch {
		case s == nil || s.state != slotWriting:
			return s, nil
		case c.err != nil:
			return nil, c.err
		}
		c.sent.Wait()
	}
}

func (c *conn) readAnswer(r *bufio.Reader, h *header) error {
	c.mu.Lock()
	c.heard = c.set.d.now()
	if h.kind == kindPing {
		c.mu.Unlock()
		return nil
	}
	if h.kind != kindAnswer {
		c.mu.Unlock()
		return api.Errorf(api.Corrupt, "node %s sends a frame of kind %d", c.set.node, h.kind)
	}
	s, err := c.awaitSent(h.id)
	if err != nil {
		c.mu.Unlock()
		return err
	}
	if s != nil {
		c.forgetSlot(s)
		s.state = slotReading
	}
	c.mu.Unlock()
	var broken error
	switch {
	case s == nil: // given up meanwhile
		_, broken = io.CopyN(io.Discard, r, int64(h.size))
	case h.status != 0:
		var b []byte
		if b, broken = readPayload(r, h); broken == nil {
			if err = decodeFault(b); errors.Is(err, errSession) {
				broken = err
			}
		}
	case s.call != nil:
		s.call.answer, broken = readPayload(r, h)
	case s.req.Op == block.OpRead:
		if int64(h.size) != s.req.Len {
			broken = api.Errorf(api.Corrupt, "node %s answers a read of %d bytes with %d", c.set.node, s.req.Len, h.size)
		} else {
			broken = h.readInto(r, s.req.Buf)
		}
	case h.size != 0:
		broken = api.Errorf(api.Corrupt, "node %s sends bytes without a request", c.set.node)
	}
	if s == nil {
		return broken
	}
	c.mu.Lock()
	over := broken == nil || s.given
	switch {
	case over:
		s.state, err = slotOver, cmp.Or(err, broken)
	case s.call != nil:
		c.queue = append(c.queue, s) // lost answers the call when the connection has ended
		fallthrough
	default:
		s.state = slotIdle // the next connection sends the slot again
	}
	c.mu.Unlock()
	if over {
		s.m.completeSlot(s, err)
	}
	return broken
}

// checkSilence pings an idle connection, and breaks a silent one. The Dialer's clock calls checkSilence.
func (c *conn) checkSilence(now time.Duration) {
	c.mu.Lock()
	silent := now - c.heard
	if silent >= pingEvery && !c.ping && c.err == nil {
		c.ping = true
		c.work.Signal()
	}
	c.mu.Unlock()
	if silent >= silentAfter {
		c.breakConnection(api.Errorf(api.Unavailable, "the connection to node %s does not answer", c.set.node))
	}
}
