package peer

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"net"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/wire"
)

// asker is a client that makes any request, with the certificate of a node.
type asker struct {
	t  *testing.T
	nc net.Conn
	r  *bufio.Reader
	id uint64
}

func newAsker(t *testing.T, f *far, id *wire.Identity) *asker {
	t.Helper()
	cfg, err := id.Client("far", Protocol)
	if err != nil {
		t.Fatal(err)
	}
	nc, err := tls.Dial("tcp", f.at(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	a := &asker{t: t, nc: nc, r: bufio.NewReader(nc)}
	if err := a.ask(kindHello, hello{Version: Version, MinVersion: minVersion, Node: id.Node()}); err != nil {
		t.Fatal(err)
	}
	return a
}

// ask makes a request with JSON and returns the error in the answer.
func (a *asker) ask(k kind, with any) error {
	b, err := json.Marshal(with)
	if err != nil {
		a.t.Fatal(err)
	}
	return a.send(header{kind: k}, b)
}

func (a *asker) send(h header, payload []byte) error {
	a.t.Helper()
	a.id++
	h.id, h.session = a.id, 1
	if err := writeControl(a.nc, h, payload); err != nil {
		a.t.Fatal(err)
	}
	var hb [headerSize]byte
	answer, err := readHeader(a.r, &hb)
	var b []byte
	if err == nil {
		b, err = readPayload(a.r, &answer)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	if answer.status == 0 {
		return nil
	}
	return decodeFault(b)
}

// TestThirdNodeGetsNothing: the API does not name a third node as the engine's node. The third node is not adopted,
// cannot read, write or make any call, and the engine's session continues. A node without any role in the API cannot
// even open.
func TestThirdNodeGetsNothing(t *testing.T) {
	both, err := wire.NewAuthority()
	if err != nil {
		t.Fatal(err)
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]*wire.Identity{}
	for _, node := range []string{"far", "near", "third", "fourth"} {
		id, err := wire.OpenIdentity(t.TempDir(), node)
		if err != nil {
			t.Fatal(err)
		}
		request, err := id.Request()
		if err != nil {
			t.Fatal(err)
		}
		cert, _, err := ca.Sign(request, node, wire.CertificateLife)
		if err == nil {
			err = id.Put(cert, ca.PEM())
		}
		if err != nil {
			t.Fatal(err)
		}
		ids[node] = id
	}
	f := newFar(t, testSize, func(o *ServerOptions) {
		o.TLS, o.NodeOf = ids["far"].Server(Protocol), wire.NodeOf
		o.AllowOpen = func(_ context.Context, node, _, _ string) error {
			if node == "fourth" {
				return api.Errorf(api.Denied, "the API does not name node %s", node)
			}
			return nil
		}
		o.Allow = func(_ context.Context, node, _, _ string, _ int64) error {
			if node != "near" {
				return api.Errorf(api.Denied, "the API does not name node %s", node)
			}
			return nil
		}
	})
	d, loop := newDialer(t, f.at), startLoop(t)
	d.TLS = func(node string) (*tls.Config, error) { return ids["near"].Client(node, Protocol) }
	m := member(t, d, f, loop, nil)
	adoptAs(t, m, 5, 1)
	buf := block.AlignedBuffer(block.Size)
	buf[0] = 7
	do := func(op block.Op) {
		t.Helper()
		if err := Do(context.Background(), loop, m, &block.Request{Op: op, Len: block.Size, Buf: buf}); err != nil {
			t.Fatalf("the engine: %v", err)
		}
	}
	do(block.OpWrite)
	before, err := m.State(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if err := newAsker(t, f, ids["fourth"]).ask(kindOpen, openRequest{f.uid, f.volume}); !api.Is(err, api.Denied) {
		t.Errorf("a node that the API does not name opens the replica: %v", err)
	}
	a := newAsker(t, f, ids["third"])
	if err := a.ask(kindOpen, openRequest{f.uid, f.volume}); err != nil {
		t.Fatal(err)
	}
	for _, epoch := range []int64{4, 5, 6, 1 << 40} {
		if err := a.ask(kindAdopt, adoption{epoch, 1 << 40, []string{f.uid}}); !api.Is(err, api.Denied) {
			t.Errorf("a third node is adopted in epoch %d: %v", epoch, err)
		}
	}
	for k, h := range map[string]header{
		"read": {kind: kindRead, n: block.Size}, "write": {kind: kindWrite, n: block.Size}, "flush": {kind: kindFlush},
		"discard": {kind: kindDiscard, n: block.Size}, "zero": {kind: kindZero, n: block.Size},
	} {
		var payload []byte
		if h.kind == kindWrite {
			payload = make([]byte, block.Size)
		}
		if err := a.send(h, payload); err == nil {
			t.Errorf("a third node: %s", k)
		}
	}
	for call := range methods {
		if err := a.send(header{kind: kindCall}, []byte(call+"\n{}")); !api.Is(err, api.Denied) {
			t.Errorf("a third node calls %s: %v", call, err)
		}
	}
	if err := a.ask(kindClose, struct{}{}); err != nil {
		t.Errorf("the end of a session that was never adopted: %v", err)
	}
	buf[0] = 0
	do(block.OpRead)
	if buf[0] != 7 {
		t.Error("what the engine wrote is gone")
	}
	after, err := m.State(context.Background())
	if err != nil || after.Epoch != before.Epoch || after.Incarnation != before.Incarnation || after.EngineNode != "near" {
		t.Errorf("the record was %+v and is %+v: %v", before, after, err)
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}
