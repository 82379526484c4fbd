package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"net"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/listener"
	"drover.io/drover/replicas/stack"
)

// served is a connection from another node.
type served struct {
	s      *Server
	nc     net.Conn
	below  *records // of TLS; nil: without TLS
	node   string
	speaks int // the version of the protocol
	ctx    context.Context
	cancel context.CancelFunc

	accepted net.Conn // of the listener, below the others

	mu       sync.Mutex
	work     *sync.Cond
	out      []outgoing
	sessions map[uint32]*session
	opening  map[uint32]context.CancelFunc // sessions that are being opened; the end of the session ends the open
	free     []*incoming
	err      error
	calls    sync.WaitGroup
	flying   int   // requests with replicas
	calling  int   // calls in progress
	args     int64 // bytes of the calls
	answers  int64 // bytes of unsent answers to calls

	account account // under the lock of the buffers
}

// outgoing is an answer.
type outgoing struct {
	h       header
	payload []byte
	of      *account // account of the payload's buffer; nil: no buffer
	call    bool
}

// hasty is a connection that breaks when the other side takes no bytes for a while.
type hasty struct {
	net.Conn
	after time.Duration
}

func (c *hasty) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.after)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (c *served) breakConnection(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
		hangUp(c.nc, c.below)
	}
	c.work.Broadcast()
	c.mu.Unlock()
	c.s.bufs.endWaits(&c.account)
}

// dropSession forgets a session: its frames are answered with an error.
func (c *served) dropSession(x *session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropLocked(x)
}

func (c *served) dropLocked(x *session) {
	if c.sessions[x.id] == x {
		delete(c.sessions, x.id)
		x.endCallsLocked()
		c.s.sessions.remove(c.node, 1)
	}
}

// serveConnection serves the connection until it breaks.
func (c *served) serveConnection() {
	defer c.cancel()
	defer func() { _ = c.nc.Close() }()
	r, err := c.exchangeHellos()
	if err != nil {
		if n, report := c.s.refused.Count(); report {
			c.s.o.Log.Info("a connection of another node is refused", "from", c.nc.RemoteAddr().String(), "times", n, "err", err)
		}
		return
	}
	wrote := make(chan struct{})
	go func() {
		defer close(wrote)
		c.writeAnswers()
	}()
	err = c.readFrames(r)
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
		err = api.Errorf(api.Unavailable, "the connection was closed")
	} else if !errors.Is(err, errIdle) {
		c.s.o.Log.Info("the connection of another node broke", "node", c.node, "err", err)
	}
	c.breakConnection(err)
	c.cancel()
	<-wrote
	c.mu.Lock()
	sessions := c.sessions
	c.sessions = map[uint32]*session{}
	c.s.sessions.remove(c.node, len(sessions))
	c.mu.Unlock()
	for _, x := range sessions {
		x.t.removeSession(x)
	}
	c.calls.Wait() // a call may wait for the end of a cut, which the end of the replica ends
	c.mu.Lock()    // requests at replicas still return their buffers
	for c.flying > 0 {
		c.work.Wait()
	}
	for _, o := range c.out {
		c.giveBack(o)
	}
	c.out = nil
	c.mu.Unlock()
}

func (c *served) exchangeHellos() (*bufio.Reader, error) {
	_ = c.nc.SetDeadline(time.Now().Add(helloTime))
	if c.s.o.TLS != nil {
		below := newRecords(c.nc)
		t := tls.Server(below, c.s.o.TLS)
		if err := t.HandshakeContext(c.ctx); err != nil {
			return nil, err
		}
		c.mu.Lock()
		c.nc, c.below = t, below
		c.mu.Unlock()
		if c.s.o.NodeOf != nil {
			var err error
			if c.node, err = c.s.o.NodeOf(t.ConnectionState()); err != nil {
				return nil, err
			}
		}
	}
	r := bufio.NewReaderSize(c.nc, 64<<10)
	var hb [headerSize]byte
	h, err := readHeader(r, &hb)
	if err != nil {
		return nil, err
	}
	if h.kind != kindHello {
		return nil, api.Errorf(api.Corrupt, "the first frame is of kind %d", h.kind)
	}
	b, err := readPayload(r, &h)
	if err != nil {
		return nil, err
	}
	var in hello
	if err := json.Unmarshal(b, &in); err != nil {
		return nil, api.Errorf(api.Corrupt, "hello: %w", err)
	}
	if err := in.validate(); err != nil {
		return nil, err
	}
	answer := hello{Version: Version, MinVersion: minVersion, Node: c.s.o.Node, Boot: c.s.o.Boot, Credit: connCredit}
	c.speaks, err = in.agreeVersion()
	switch {
	case err != nil:
		answer.Error = faultOf(err)
	case c.node == "":
		c.node = in.Node
	case c.node != in.Node:
		err = api.Errorf(api.Denied, "node %s says that it is %s", c.node, in.Node)
		answer.Error = faultOf(err)
	}
	if err == nil { // by its certificate, if the connection has one
		if err = listener.Identify(c.accepted, "node "+c.node); err != nil {
			answer.Error = faultOf(err)
		}
	}
	if b, jerr := json.Marshal(answer); jerr != nil {
		err = jerr
	} else if werr := writeControl(c.nc, header{kind: kindHello}, b); err == nil {
		err = werr
	}
	_ = c.nc.SetDeadline(time.Time{})
	return r, err
}

// readFrames takes frames until the connection breaks.
func (c *served) readFrames(r *bufio.Reader) error {
	var hb [headerSize]byte
	used := time.Now()
	for {
		_ = c.nc.SetReadDeadline(time.Now().Add(3 * silentAfter))
		h, err := readHeader(r, &hb)
		if err == nil {
			err = c.awaitRoom(&h)
		}
		if err != nil {
			return err
		}
		if h.kind != kindPing {
			used = time.Now()
		}
		switch h.kind {
		case kindPing:
			if c.isIdle(used) {
				return errIdle
			}
			c.queueAnswer(outgoing{h: header{kind: kindPing}})
		case kindRead, kindWrite, kindFlush, kindDiscard, kindZero:
			err = c.takeRequest(r, &h)
		case kindOpen, kindAdopt, kindClose, kindCall:
			var b []byte
			if b, err = readPayload(r, &h); err == nil {
				ctx := c.beginControl(&h, b)
				c.calls.Add(1)
				go func(h header) { // captured, each header would be allocated
					defer c.calls.Done()
					c.answerControl(ctx, h, b)
				}(h)
			}
		default:
			err = api.Errorf(api.Corrupt, "node %s sends a frame of kind %d", c.node, h.kind)
		}
		if err != nil {
			return err
		}
	}
}

var errIdle = api.Errorf(api.Unavailable, "the connection has no session")

// isIdle reports whether a connection has been without sessions and requests for long. A client connects again when
// necessary.
func (c *served) isIdle(used time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.sessions)+c.flying+c.calling > 0 {
		return false
	}
	return time.Since(used) > c.s.o.Idle
}

// awaitRoom waits until the connection may have one more frame.
func (c *served) awaitRoom(h *header) error {
	size := int64(0)
	if h.kind >= kindClose || h.kind < kindRead {
		size = int64(h.size)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && (len(c.out)+c.flying+c.calling >= connFrames || c.calling >= connCalls ||
		c.args > 0 && c.args+size > connArgs) {
		c.work.Wait()
	}
	return c.err
}

// giveBack frees the memory of an answer after the write, or without one.
func (c *served) giveBack(o outgoing) {
	if o.of != nil {
		c.s.bufs.putBuffer(o.payload, o.of)
	}
}

var ops = map[kind]block.Op{kindRead: block.OpRead, kindWrite: block.OpWrite, kindFlush: block.OpFlush,
	kindDiscard: block.OpDiscard, kindZero: block.OpZero}

// takeRequest hands a request to its replica.
func (c *served) takeRequest(r *bufio.Reader, h *header) error {
	moves := h.kind == kindRead || h.kind == kindWrite
	if moves && h.n == 0 {
		return api.Errorf(api.Corrupt, "an empty request")
	}
	c.mu.Lock()
	x, gone := c.sessions[h.session], errSession
	if x != nil {
		gone = x.failed
	}
	c.mu.Unlock()
	if gone != nil {
		if _, err := io.CopyN(io.Discard, r, int64(h.size)); err != nil {
			return err
		}
		c.queueAnswer(errorAnswer(h.id, gone))
		return nil
	}
	var buf []byte
	if moves {
		var ok bool
		if buf, ok = c.s.bufs.getBuffer(int(h.n), &x.account); !ok {
			return errClosed
		}
	}
	var spans []block.Span
	if h.kind == kindWrite {
		var err error
		if h.flags&flagSpans != 0 {
			spans, err = h.readSpans(r, buf)
		} else {
			err = h.readInto(r, buf)
		}
		if err != nil {
			c.s.bufs.putBuffer(buf, &x.account)
			return err
		}
	}
	c.mu.Lock()
	var in *incoming
	if l := len(c.free); l > 0 {
		in = c.free[l-1]
		c.free = c.free[:l-1]
	} else {
		in = &incoming{}
		in.req.Done = func(q *block.Request) { in.err = q.Err; in.sess.c.takeAnswer(in) }
	}
	c.flying++
	c.mu.Unlock()
	done := in.req.Done
	*in = incoming{sess: x, id: h.id, buf: buf, at: time.Now()}
	in.req = block.Request{Op: ops[h.kind], FUA: h.flags&flagFUA != 0, Off: h.off, Len: h.n, Buf: buf,
		Spans: spans, Done: done}
	x.t.postRequest(in)
	return nil
}

// notFetchedPause is the pause between two reads of a block that the replica fetches.
const notFetchedPause = 100 * time.Millisecond

// resubmitLater submits a read again after a pause if the replica fetches its blocks and the client is too old for that
// answer. resubmitLater reports whether it did.
func (c *served) resubmitLater(in *incoming) bool {
	c.mu.Lock()
	broken := c.err != nil
	c.mu.Unlock()
	if broken || c.speaks >= notFetchedSince || !errors.Is(in.err, stack.ErrNotFetched) {
		return false
	}
	in.err = nil
	time.AfterFunc(notFetchedPause, func() { in.sess.t.postRequest(in) }) // run waits for the request
	return true
}

// takeAnswer takes a replica's answer.
func (c *served) takeAnswer(in *incoming) {
	if in.err != nil && c.resubmitLater(in) {
		return
	}
	c.s.guests.Count(time.Since(in.at))
	o := outgoing{h: header{kind: kindAnswer, id: in.id}}
	switch {
	case in.err == nil && in.req.Op == block.OpRead:
		o.payload, o.of = in.buf, &in.sess.account
	case in.err != nil:
		o = errorAnswer(in.id, in.err)
		fallthrough
	default:
		c.s.bufs.putBuffer(in.buf, &in.sess.account)
	}
	c.mu.Lock()
	c.flying--
	in.sess, in.buf, in.req.Buf, in.err = nil, nil, nil, nil
	c.free = append(c.free, in)
	c.out = append(c.out, o)
	c.work.Broadcast()
	c.mu.Unlock()
}

func errorAnswer(id uint64, err error) outgoing {
	b, jerr := json.Marshal(faultOf(err))
	if jerr != nil {
		b = []byte(`{"message":"unknown"}`)
	}
	return outgoing{h: header{kind: kindAnswer, id: id, status: 1}, payload: b}
}

func (c *served) queueAnswer(o outgoing) {
	c.mu.Lock()
	c.out = append(c.out, o)
	c.work.Broadcast()
	c.mu.Unlock()
}

// writeAnswers sends answers.
func (c *served) writeAnswers() {
	w := newFrames(c.nc, c.below)
	var hb [headerSize]byte
	var list []outgoing
	var sent int64 // of calls' answers
	for {
		c.mu.Lock()
		if sent > 0 {
			c.answers, sent = c.answers-sent, 0
			c.work.Broadcast()
		}
		for c.err == nil && len(c.out) == 0 {
			if w.hasUnflushed() {
				c.mu.Unlock()
				if err := w.Flush(); err != nil {
					c.breakConnection(err)
				}
				c.mu.Lock()
				continue
			}
			c.work.Wait()
		}
		if c.err != nil {
			c.mu.Unlock()
			return
		}
		list, c.out = c.out, list[:0]
		c.work.Broadcast() // there is room
		c.mu.Unlock()
		var err error
		for i := range list {
			o := &list[i]
			if err == nil {
				o.h.size = uint32(len(o.payload))
				if o.h.size > 0 {
					o.h.sum = crc32.Checksum(o.payload, castagnoli)
				}
				o.h.encode(&hb)
				if _, err = w.Write(hb[:]); err == nil {
					_, err = w.Write(o.payload)
				}
			}
			c.giveBack(*o)
			if o.call {
				sent += int64(len(o.payload))
			}
			*o = outgoing{}
		}
		if err != nil {
			c.breakConnection(err)
			return
		}
	}
}
