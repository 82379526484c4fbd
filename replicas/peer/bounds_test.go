package peer

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// TestArgumentsAreBounded: a replica refuses arguments outside of the replica, too long arguments, and names of foreign
// layers, before the replica changes anything. The session continues.
func TestArgumentsAreBounded(t *testing.T) {
	f := newFar(t, 64<<20, nil)
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	adoptAs(t, m, 1, 1, "other")
	foreign := string(api.NewUID()) // a larger layer of the same disk
	w, err := f.disk.Create(t.Context(), foreign, 256<<20)
	if err == nil {
		_, err = w.WriteAt(slices.Repeat([]byte{1}, block.Size), 255<<20)
	}
	if err == nil {
		_, _, err = w.Seal(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	id, most := string(api.NewUID()), "9223372036854775807"
	long := strings.Repeat("a", 1<<20)
	for _, c := range []struct{ call, args string }{
		{"expand", `{"Size":-4096}`}, {"expand", `{"Size":` + most + `}`}, {"expand", `{"Size":67108865}`},
		{"intend", `{"Regions":[-1]}`}, {"intend", `{"Regions":[` + most + `]}`},
		{"intend", `{"Set":{"runs":[[0,` + most + `]]}}`}, {"intend", `{"Set":{"runs":[[5,2],[6,1]]}}`},
		{"intend", `{"Set":{"runs":[[5,0]]}}`}, {"intend", `{"Set":{"runs":[[5,1],[3,1]]}}`},
		{"intend", `{"Set":{"first":` + most + `,"bits":"/w=="}}`}, {"intend", `{"Set":{"first":-1,"bits":"/w=="}}`},
		{"intend", `{"Set":{"runs":[[5,1]],"bits":"/w=="}}`},
		{"intend", `{"Set":{"bits":"` + strings.Repeat("AAAA", 200<<10) + `"}}`},
		{"mark", `{"Epoch":-1}`}, {"clean", `{"Epoch":-1}`}, {"clean", `{"Set":{"runs":[[-9,4194304]]}}`},
		{"digests", `{"Off":-4096,"N":4096}`}, {"digests", `{"Off":0,"N":4095}`}, {"digests", `{"Off":0,"N":-4096}`},
		{"digests", `{"Off":67108864,"N":4096}`}, {"digests", `{"Off":9223372036854771712,"N":8192}`},
		{"note", `"` + long + `"`},
		{"drop-snapshot", `{"UID":""}`}, {"drop-snapshot", `{"UID":"../../x"}`},
		{"drop-snapshot", `{"UID":"` + long + `"}`},
		{"do-cut", `{"UID":"../` + id + `"}`},
		{"prepare-cut", `{"uid":"` + id + `","name":"` + long + `","layer":"` + id + `"}`},
		{"prepare-cut", `{"uid":"..","name":"s","layer":"` + id + `"}`}, {"prepare-cut", `{"uid":"` + id + `","layer":".."}`},
		{"seal", `[]`}, {"seal", `[{"uid":"` + id + `","name":"s","layer":"/"}]`},
		{"seal", `[{"uid":"` + id + `","name":"s","layer":"` + id + `"}` +
			strings.Repeat(`,{"uid":"a","name":"b"}`, maxSnapshots) + `]`},
		{"changed", `{"Piece":0}`}, {"changed", `{"Piece":1}`}, {"changed", `{"Piece":-4096}`},
		{"changed", `{"From":"..","Piece":1048576}`}, {"changed", `{"Piece":4096,"Base":["` + foreign + `"]}`},
		{"changed", `{"Piece":4096,"Base":["","",""]}`},
		{"snap-digests", `{"UID":"` + id + `","Off":0,"N":2097152}`}, {"snap-digests", `{"UID":"","Off":0,"N":4096}`},
		{"snap-read", `{"UID":"` + id + `","Off":0,"N":` + most + `}`},
		{"snap-read", `{"UID":"` + id + `","Off":-1,"N":4096}`},
		{"repair", `{"Layer":"..","Off":0}`}, {"repair", `{"Layer":"` + id + `","Off":4096}`},
		{"repair", `{"Layer":"` + id + `","Off":-2097152}`}, {"repair", `{"Layer":"` + foreign + `","Off":0}`},
		{"track", `{"On":7}`}, {"track", ``}, {"no such call", `{}`}, {strings.Repeat("x", 1<<20), `{}`},
	} {
		_, err := m.callRaw(t.Context(), m.c, m.session, kindCall, []byte(c.call+"\n"+c.args))
		if k := api.KindOf(err); k != api.Invalid && k != api.OutOfRange && k != api.NotFound && k != api.Unsupported {
			t.Errorf("%.20s %.80s: %v", c.call, c.args, err)
		} else if len(err.Error()) > 2*maxMessage {
			t.Errorf("%.20s %.80s: an error of %d bytes", c.call, c.args, len(err.Error()))
		}
	}
	s, err := m.State(t.Context())
	if err != nil || s.Size != 64<<20 || len(s.Snapshots) > 0 || len(s.Layers) > 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if is, err := m.Intents(t.Context()); err != nil || len(is.Regions) > 0 {
		t.Errorf("%+v, %v", is, err)
	}
}

// TestSessionsAreChecked: a server checks the arguments of open and adopt.
func TestSessionsAreChecked(t *testing.T) {
	f := newFar(t, 64<<20, nil)
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	adoptAs(t, m, 1, 1)
	c, most := m.c, strings.Repeat(`"a",`, maxMembers)
	for i, text := range []string{`{"replica":"../x","volume":"v"}`, `{"replica":"","volume":"v"}`,
		`{"replica":"x","volume":"` + strings.Repeat("v", 1000) + `"}`, `{}`, `7`} {
		if _, err := m.callRaw(t.Context(), c, uint32(1000+i), kindOpen, []byte(text)); !api.Is(err, api.Invalid) {
			t.Errorf("%.50s: %v", text, err)
		}
	}
	for _, text := range []string{`{"epoch":-1,"incarnation":1}`, `{"epoch":1,"incarnation":-1}`,
		`{"epoch":2,"incarnation":1,"members":[` + most + `"a"]}`, `{"epoch":2,"incarnation":1,"members":["../x"]}`} {
		if _, err := m.callRaw(t.Context(), c, m.session, kindAdopt, []byte(text)); !api.Is(err, api.Invalid) {
			t.Errorf("%.50s: %v", text, err)
		}
	}
	if s, err := m.State(t.Context()); err != nil || s.Epoch != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}

// TestAnswersAreBounded: an engine refuses an answer that lies about the replica, and takes no memory for the answer.
func TestAnswersAreBounded(t *testing.T) {
	n := newScripted(t, Version, nil)
	m := newDialer(t, n.at).Member(Options{Node: "far", Replica: "r", Volume: "v", Loop: startLoop(t)})
	adoptAs(t, m, 1, 1, "other")
	ctx := t.Context()
	calls := map[string]func() error{
		"changed": func() error { _, err := m.Changed(ctx, "", "", nil, 1<<20); return err },
		"intents": func() error { _, err := m.Intents(ctx); return err },
		"meta":    func() error { _, err := m.State(ctx); return err },
		"sizes":   func() error { _, err := m.Sizes(ctx); return err },
		"broken":  func() error { _, err := m.Broken(ctx); return err },
		"digests": func() error { _, err := m.Digests(ctx, 0, 1<<20); return err },
		"snap-digests": func() error {
			_, err := m.SnapDigests(ctx, "s", 0, 1<<20)
			return err
		},
		"snap-read": func() error { return m.SnapRead(ctx, "s", 0, make([]byte, 8192)) },
	}
	const region = `"region":16777216`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, c := range []struct{ call, answer string }{
		{"changed", `[[0,4611686018427387904]]`}, {"changed", `[[0,1048577]]`}, {"changed", `[[1048576,1]]`},
		{"changed", `[[-1,1]]`}, {"changed", `[[0,0]]`}, {"changed", `[[0,-1]]`}, {"changed", `[[4,2],[5,1]]`},
		{"changed", `[[4,2],[1,1]]`}, {"changed", `[[9223372036854775807,9223372036854775807]]`}, {"changed", `{}`},
		{"intents", `{}`}, {"intents", `{"region":4096}`}, {"intents", `{"region":-16777216}`}, {"intents", `{"region":1}`},
		{"intents", `{` + region + `,"base":-1}`}, {"intents", `{` + region + `,"regions":[-1]}`},
		{"intents", `{` + region + `,"set":{"runs":[[0,4611686018427387904]]}}`},
		{"intents", `{` + region + `,"set":{"first":4611686018427387904,"bits":"/w=="}}`},
		{"meta", `{"Size":-1}`}, {"meta", `{"Size":4096,"UID":"../x"}`}, {"meta", `{"Size":4096,"UID":"r","Layers":["/"]}`},
		{"meta", `{"Size":4096,"UID":"r","Snapshots":[{"uid":"s","name":"n","layer":".."}]}`},
		{"sizes", `{"..":{"size":1}}`}, {"sizes", `{"s":{"size":-1}}`}, {"sizes", `{"s":{"used":-1}}`}, {"sizes", `[]`},
		{"broken", `[{"layer":"l","off":0,"len":4611686018427387904}]`}, {"broken", `[{"layer":"..","off":0,"len":4096}]`},
		{"broken", `[{"layer":"l","off":9223372036854775807,"len":4096}]`}, {"broken", `[{"layer":"l","off":0,"len":-1}]`},
		{"broken", `[` + strings.Repeat(`{"layer":"l","off":0,"len":4096},`, maxBroken) +
			`{"layer":"l","off":0,"len":4096}]`},
		{"digests", `1234`}, {"snap-digests", ``}, {"snap-read", `1234`},
	} {
		n.mu.Lock()
		n.answers = map[string]string{c.call: c.answer}
		n.mu.Unlock()
		if err := calls[c.call](); !api.Is(err, api.Corrupt) {
			t.Errorf("%s %.80s: %v", c.call, c.answer, err)
		}
	}
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 64<<20 {
		t.Errorf("%d bytes were allocated", after.TotalAlloc-before.TotalAlloc)
	}
	for _, c := range []struct{ call, answer string }{ // and takes the truth
		{"changed", `[[0,1048576]]`}, {"changed", `null`}, {"changed", `[[3,4],[7,1],[1048575,1]]`},
		{"intents", `{` + region + `,"base":3,"joined":2,"set":{"runs":[[0,65536]]}}`},
		{"intents", `{` + region + `,"set":{"first":65535,"bits":"AQ=="}}`}, {"sizes", `{"s":{"size":4096,"used":0}}`},
		{"broken", `[{"layer":"l","off":2097152,"len":4096,"snap":"s"}]`}, {"broken", `null`},
	} {
		n.mu.Lock()
		n.answers = map[string]string{c.call: c.answer}
		n.mu.Unlock()
		if err := calls[c.call](); err != nil {
			t.Errorf("%s %s: %v", c.call, c.answer, err)
		}
	}
	for _, text := range []string{`{"size":-1}`, `{"size":4611686018427387904}`, `{"size":4096,"epoch":-1}`} {
		n := newScripted(t, Version, map[string]string{"open": text})
		if _, _, err := newDialer(t, n.at).Member(Options{Node: "far", Replica: "r", Volume: "v",
			Loop: startLoop(t)}).Probe(ctx); !api.Is(err, api.Corrupt) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestDescriptionsAreBounded: a description is corrupt if the size is out of range, or if the epoch of the last session
// or of the last revert is later than the adopted epoch.
func TestDescriptionsAreBounded(t *testing.T) {
	if err := (Info{Size: testSize, Epoch: 3, Joined: 3, Reverted: 3}).validate(); err != nil {
		t.Error(err)
	}
	for _, i := range []Info{{Size: -1}, {Size: api.MaxVolumeSize + 1}, {Epoch: -1}, {Epoch: 3, Joined: 4},
		{Epoch: 3, Reverted: 4}, {Epoch: 3, Joined: -1}, {Epoch: 3, Reverted: -1}} {
		if err := i.validate(); !api.Is(err, api.Corrupt) {
			t.Errorf("%+v: %v", i, err)
		}
	}
}

// TestControlFramesAreBounded: the sender refuses a control frame above the receiver's bound, and sends a frame that is
// as large as the bound.
func TestControlFramesAreBounded(t *testing.T) {
	if err := checkFrame("answer", make([]byte, maxControl)); err != nil {
		t.Error(err)
	}
	if err := checkFrame("answer", make([]byte, maxControl+1)); !api.Is(err, api.OutOfRange) {
		t.Errorf("a frame above the bound: %v", err)
	}
}

// TestMessagesAreBounded: the message of a peer's error is cut, so no peer fills a log.
func TestMessagesAreBounded(t *testing.T) {
	f := fault{Message: strings.Repeat("é", 1<<20)}
	if n := len(f.toError().Error()); n > maxMessage+10 {
		t.Errorf("%d bytes", n)
	}
	if n := len(faultOf(fmt.Errorf("%s", f.Message)).Message); n > maxMessage+10 {
		t.Errorf("%d bytes are sent", n)
	}
	if f := faultOf(stack.ErrFailed); f.toError().Error() != stack.ErrFailed.Error() {
		t.Errorf("%q", f.Message)
	}
}
