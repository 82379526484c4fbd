package peer

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net"
	"testing"
	"time"

	"drover.io/drover/block"
)

// liar is a node with arbitrary answers.
type liar struct {
	t  *testing.T
	ln net.Listener
	nc net.Conn
	r  *bufio.Reader
}

func newLiar(t *testing.T) *liar {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return &liar{t: t, ln: ln}
}

// accept takes a connection, and agrees to hello, open and adopt.
func (l *liar) accept(boot string) error {
	nc, err := l.ln.Accept()
	if err != nil {
		return err
	}
	_ = nc.(*net.TCPConn).SetReadBuffer(16 << 10)
	l.nc, l.r = nc, bufio.NewReaderSize(nc, 4<<10)
	if _, _, err := l.frame(); err != nil {
		return err
	}
	b, _ := json.Marshal(hello{Version: Version, MinVersion: minVersion, Node: "far", Boot: boot, Credit: 1 << 40})
	if err := writeControl(nc, header{kind: kindHello}, b); err != nil {
		return err
	}
	for _, answer := range []any{Info{Size: testSize}, nil} {
		h, _, err := l.frame()
		if err != nil {
			return err
		}
		b, _ := json.Marshal(answer)
		if err := writeControl(nc, header{kind: kindAnswer, id: h.id}, b); err != nil {
			return err
		}
	}
	return nil
}

func (l *liar) frame() (header, []byte, error) {
	var hb [headerSize]byte
	h, err := readHeader(l.r, &hb)
	if err != nil {
		return h, nil, err
	}
	b, err := readPayload(l.r, &h)
	return h, b, err
}

// TestAnswerBeforeTheRequest: a node answers a write before the node has read the write. The engine uses the buffer of
// an answered request again: the bytes of other requests must not travel to the node, and the process must live.
func TestAnswerBeforeTheRequest(t *testing.T) {
	l := newLiar(t)
	accepted := make(chan error, 1)
	go func() { accepted <- l.accept("boot") }()
	d, loop := newDialer(t, at(l.ln.Addr().String())), startLoop(t)
	m := d.Member(Options{Node: "far", Replica: "r", Volume: "v", Loop: loop})
	adoptAs(t, m, 1, 1)
	if err := within(t, "session", accepted); err != nil {
		t.Fatal(err)
	}
	const writes = 8
	answered := make(chan int, writes)
	loop.Post(func() {
		for i := range writes {
			buf := block.AlignedBuffer(4 << 20)
			for k := range buf {
				buf[k] = 'a'
			}
			var spans []block.Span
			for off := int64(0); off < int64(len(buf)); off += 2 * block.Size {
				spans = append(spans, block.Span{Off: off, Len: block.Size})
			}
			q := &block.Request{Op: block.OpWrite, Len: int64(len(buf)), Buf: buf, Spans: spans}
			q.Done = func(q *block.Request) {
				if q.Err == nil {
					copy(buf, bytes.Repeat([]byte{'b'}, len(buf))) // another request uses the buffer
					q.Buf = nil
				}
				answered <- i
			}
			m.Submit(q)
		}
	})
	pause(time.Second) // the connection is full
	for id := uint64(3); id < 3+writes; id++ {
		if err := writeControl(l.nc, header{kind: kindAnswer, id: id}, nil); err != nil {
			t.Fatal(err)
		}
	}
	pause(time.Second)
	for n := range writes {
		h, b, err := l.frame()
		if err != nil {
			t.Fatalf("the frame of write %d is not what its sum says: %v; %d requests were answered", n, err, len(answered))
		}
		if bytes.Contains(b, []byte("bbbbbbbb")) {
			t.Fatalf("write %d has %d bytes of another request", h.id, bytes.Count(b, []byte("b")))
		}
	}
	_ = l.nc.Close()
	_ = l.ln.Close()
	_ = m.Close()
}

// TestHelloIsBounded: the boot of a node comes into the device record, which has 48 KiB.
func TestHelloIsBounded(t *testing.T) {
	l := newLiar(t)
	go func() { _ = l.accept(string(bytes.Repeat([]byte("b"), 1<<20))) }()
	d, loop := newDialer(t, at(l.ln.Addr().String())), startLoop(t)
	m := d.Member(Options{Node: "far", Replica: "r", Volume: "v", Loop: loop})
	err := m.Adopt(t.Context(), 1, 1, []string{"r"})
	if n := len(m.Boot()); n > maxID {
		t.Errorf("a boot of %d bytes: %v", n, err)
	}
	_ = m.Close()
}
