package peer

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"testing"

	"drover.io/drover/block"
)

// TestCreditHoldsBack: a server takes requests and answers none. The engine sends no more bytes than the server's
// credit, for any number of requests; each answer lets another request through.
func TestCreditHoldsBack(t *testing.T) {
	const size = 256 << 10
	const credit, all = maxPayload / size, 64 // requests
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d, loop := newDialer(t, at(ln.Addr().String())), startLoop(t)
	m := d.Member(Options{Node: "far", Replica: "r", Volume: "v", Loop: loop})
	adopted := make(chan error, 1)
	go func() { adopted <- m.Adopt(t.Context(), 1, 1, []string{"r"}) }()
	nc, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	r := bufio.NewReader(nc)
	next := func() header { // but for pings
		t.Helper()
		for {
			var hb [headerSize]byte
			h, err := readHeader(r, &hb)
			if err == nil && h.kind == kindPing {
				err = writeControl(nc, header{kind: kindPing}, nil)
				if err == nil {
					continue
				}
			}
			if err == nil {
				_, err = io.CopyN(io.Discard, r, int64(h.size))
			}
			if err != nil {
				t.Fatal(err)
			}
			return h
		}
	}
	answer := func(h header, with any) {
		t.Helper()
		var b []byte
		if with != nil {
			b, _ = json.Marshal(with)
		}
		kind := kindAnswer
		if h.kind == kindHello {
			kind = kindHello
		}
		if err := writeControl(nc, header{kind: kind, id: h.id}, b); err != nil {
			t.Fatal(err)
		}
	}
	answer(next(), hello{Version: Version, MinVersion: minVersion, Node: "far", Credit: maxPayload})
	answer(next(), Info{}) // open
	answer(next(), nil)    // adopt
	if err := within(t, "adoption", adopted); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, all)
	buf := block.AlignedBuffer(size)
	loop.Post(func() {
		for range all {
			m.Submit(&block.Request{Op: block.OpWrite, Len: size, Buf: buf, Done: func(q *block.Request) { done <- q.Err }})
		}
	})
	var taken []header
	for range credit {
		taken = append(taken, next())
	}
	m.mu.Lock()
	c := m.c
	m.mu.Unlock()
	for came := credit; len(taken) > 0; {
		c.mu.Lock()
		if c.flying > c.credit || len(c.table) > credit {
			t.Errorf("%d requests of %d bytes are under way, with a credit of %d bytes", len(c.table), c.flying, c.credit)
		}
		c.mu.Unlock()
		answer(taken[0], nil)
		taken = taken[1:]
		if err := within(t, "end of what was begun", done); err != nil {
			t.Fatal(err)
		}
		if came < all {
			taken = append(taken, next())
			came++
		}
	}
	_ = nc.Close()
	_ = m.Close() // the connection has ended
}
