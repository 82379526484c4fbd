package peer

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"reflect"
	"slices"
	"sync"
	"testing"

	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// scripted is a node with a process of some version of the protocol, and with the test's answers.
type scripted struct {
	t       *testing.T
	version int
	answers map[string]string // by call; "open": to open
	ln      net.Listener

	mu    sync.Mutex
	calls map[string]string // the last arguments of each
}

func newScripted(t *testing.T, version int, answers map[string]string) *scripted {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &scripted{t: t, version: version, answers: answers, ln: ln, calls: map[string]string{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { n.serve(nc) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		wg.Wait() // the dialer, which is closed before, ends the connections
	})
	return n
}

func (n *scripted) at() string { return n.ln.Addr().String() }

func (n *scripted) answer(name, standard string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if a, ok := n.answers[name]; ok {
		return a
	}
	return standard
}

func (n *scripted) serve(nc net.Conn) {
	defer nc.Close()
	r := bufio.NewReader(nc)
	var hb [headerSize]byte
	for {
		h, err := readHeader(r, &hb)
		if err != nil {
			return
		}
		b, err := readPayload(r, &h)
		if err != nil {
			n.t.Errorf("a frame that every version refuses: %v", err)
			return
		}
		a, text := header{kind: kindAnswer, id: h.id}, ""
		switch h.kind {
		case kindHello:
			a.kind, text = kindHello, fmt.Sprintf(`{"version":%d,"minVersion":1,"node":"far","boot":"b"}`, n.version)
		case kindPing:
			a.kind = kindPing
		case kindOpen:
			text = n.answer("open", `{"size":1099511627776}`)
		case kindCall:
			name, args, _ := bytes.Cut(b, []byte("\n"))
			n.mu.Lock()
			n.calls[string(name)] = string(args)
			n.mu.Unlock()
			text = n.answer(string(name), "")
		}
		if writeControl(nc, a, []byte(text)) != nil {
			return
		}
	}
}

// TestOldServer: a process of version 1 or 2 gets regions as lists, and the engine understands the process's answers.
func TestOldServer(t *testing.T) {
	for version := 1; version < setsSince; version++ {
		o := newScripted(t, version, map[string]string{
			"intents": `{"region":16777216,"base":3,"joined":2,"regions":[1,2,9]}`})
		m := newDialer(t, o.at).Member(Options{Node: "old", Replica: "r", Volume: "v", Loop: startLoop(t)})
		adoptAs(t, m, 1, 1, "other")
		list := []int64{2, 3, 4, 70}
		if err := m.Intend(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		if err := m.Clean(t.Context(), 5, 6, list); err != nil {
			t.Fatal(err)
		}
		is, err := m.Intents(t.Context())
		want := stack.Intents{Region: 16 << 20, Base: 3, Joined: 2, Regions: []int64{1, 2, 9}}
		if err != nil || !reflect.DeepEqual(is, want) {
			t.Errorf("intents: %+v, %v", is, err)
		}
		o.mu.Lock()
		for name, want := range map[string]string{"intend": `{"Regions":[2,3,4,70]}`,
			"clean": `{"Token":5,"Epoch":6,"Regions":[2,3,4,70]}`, "intents": `{}`} {
			if got := o.calls[name]; got != want {
				t.Errorf("version %d gets %s of %s, not %s", version, name, got, want)
			}
		}
		o.mu.Unlock()
	}
}

// TestOldClient: calls of an engine of version 2 keep their meaning, and the answers keep their form.
func TestOldClient(t *testing.T) {
	f := newFar(t, 1<<30, nil)
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	adoptAs(t, m, 1, 1, "other")
	call := func(text string) []byte {
		t.Helper()
		b, err := m.callRaw(t.Context(), m.c, m.session, kindCall, []byte(text))
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		return b
	}
	noted := func(want ...int64) {
		t.Helper()
		var is stack.Intents // as in these versions
		if err := json.Unmarshal(call("intents\n{}"), &is); err != nil || !slices.Equal(is.Regions, want) {
			t.Errorf("intents: %v, not %v: %v", is.Regions, want, err)
		}
	}
	call("track\n" + `{"On":true}`)
	call("intend\n" + `{"Regions":[1,2,9,63,64,5000]}`) // the volume has 64 regions
	noted(1, 2, 9, 63)
	call("mark\n" + `{"Token":4,"Epoch":0,"Regions":null}`)
	call("clean\n" + `{"Token":4,"Epoch":1,"Regions":[2,63]}`)
	noted(1, 9)
	if b := call("digests\n" + `{"Off":0,"N":8192}`); len(b) != 2*digestSize {
		t.Errorf("%d bytes of digests", len(b))
	}
	if b := call("changed\n" + `{"From":"","To":"","Base":null,"Piece":1048576}`); string(b) != "null" {
		t.Errorf("changed: %s", b)
	}
	w := block.Request{Op: block.OpWrite, Off: 5 << 20, Len: block.Size, Buf: bytes.Repeat([]byte{1}, block.Size)}
	if err := Do(t.Context(), m.o.Loop, m, &w); err != nil {
		t.Fatal(err)
	}
	if b := call("changed\n" + `{"From":"","To":"","Base":null,"Piece":1048576}`); string(b) != "[[5,1]]" {
		t.Errorf("changed: %s", b)
	}
}

// TestRegionSets: a set holds exactly the given regions, in the shorter form, and is never larger than a frame.
func TestRegionSets(t *testing.T) {
	for _, list := range [][]int64{nil, {0}, {maxRegions - 1}, {5, 3, 4, 3, 9}, {0, maxRegions - 1}, everyRegion(1),
		everyRegion(2), everyRegion(3), everyRegion(100), everyRegion(4000), everyRegion(2)[100:300]} {
		set, err := newRegionSet(slices.Clone(list))
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(set)
		if err != nil || len(b) > 800<<10 {
			t.Fatalf("%d regions are %d bytes: %v", len(list), len(b), err)
		}
		got, err := decodeJSON[regionSet](b)
		if err == nil {
			err = got.check()
		}
		want := slices.Compact(slices.Sorted(slices.Values(list)))
		if is := got.regionsBelow(maxRegions); err != nil || !slices.Equal(is, want) {
			t.Errorf("%d regions became %d: %v", len(want), len(is), err)
		}
		if is := got.regionsBelow(4); len(is) > 4 {
			t.Errorf("of a volume with 4 regions: %v", is)
		}
	}
	for _, list := range [][]int64{{-1}, {maxRegions}, {3, -1}} {
		if _, err := newRegionSet(list); err == nil {
			t.Errorf("%v: no error", list)
		}
	}
}
