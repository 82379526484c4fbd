package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// script is the input of the fuzz test, read as the steps of a hostile engine in a session.
type script struct{ b []byte }

func (s *script) byte() byte {
	if len(s.b) == 0 {
		return 0
	}
	c := s.b[0]
	s.b = s.b[1:]
	return c
}

func (s *script) bytes(n int) []byte {
	n = min(n, len(s.b))
	b := s.b[:n]
	s.b = s.b[n:]
	return b
}

// number is an edge case, or any number.
func (s *script) number() int64 {
	c := s.byte()
	odd := [...]int64{0, 1, -1, 2, 7, 63, 64, 512, 4095, 4096, 4097, 8192, 1 << 16, 1 << 20, 1<<20 - 4096, 1 << 21,
		4 << 20, 16 << 20, fuzzSize - 4096, fuzzSize, fuzzSize + 4096, 2 * fuzzSize, 1 << 30, maxRegions - 1, maxRegions, maxPieces,
		api.MaxVolumeSize, api.MaxVolumeSize + 4096, 1 << 62, 1<<63 - 4096, 1<<63 - 1, -4096, -1 << 63}
	if int(c) < len(odd) {
		return odd[c]
	}
	if c < 128 {
		return int64(c) * 4096
	}
	var b [8]byte
	copy(b[:], s.bytes(8))
	return int64(binary.LittleEndian.Uint64(b[:]))
}

const fuzzSize = 32 << 20

// hostile is a connection of an adopted engine.
type hostile struct {
	nc   net.Conn
	w    *bufio.Writer
	id   uint64
	dead bool
}

func (h *hostile) frame(k kind, session uint32, payload []byte) {
	h.id++
	h.send(header{kind: k, session: session, id: h.id}, payload)
}

func (h *hostile) send(x header, payload []byte) {
	if writeControl(h.w, x, payload) != nil {
		h.dead = true
	}
}

// fuzzed is a node with a replica on a real disk, the target of many scripts.
type fuzzed struct {
	*far
	log    logged
	epoch  int64
	played int
	names  []string // of all calls
	ids    []string // of layers and snapshots, and invalid ids
}

func newFuzzed(f *testing.F) *fuzzed {
	dir, err := os.MkdirTemp("/dev/shm", "drover")
	if err != nil {
		dir = f.TempDir()
	}
	f.Cleanup(func() { _ = os.RemoveAll(dir) })
	disk, err := stack.Add(context.Background(), filepath.Join(dir, "disk"))
	if err != nil {
		f.Fatal(err)
	}
	z := &fuzzed{names: slices.Sorted(maps.Keys(methods)), epoch: 1}
	z.far = newFarOn(f, disk, fuzzSize, func(o *ServerOptions) {
		o.Log = slog.New(slog.NewTextHandler(&z.log, &slog.HandlerOptions{Level: slog.LevelError}))
		o.Allow = func(_ context.Context, _, _, _ string, epoch int64) error {
			if epoch > z.epoch {
				return api.Errorf(api.Denied, "epoch %d", epoch)
			}
			return nil
		}
	})
	return z
}

// renew makes a new replica for the next scripts, with a layer below the replica, and a larger layer on the same disk.
func (z *fuzzed) renew(t *testing.T) {
	ctx := t.Context()
	if err := z.s.Release(z.uid); err != nil {
		t.Fatal(err)
	}
	if err := z.disk.RemoveReplica(z.uid); err != nil {
		t.Fatal(err)
	}
	z.ids = []string{"", "..", "../x", "a", strings.Repeat("a", 65)}
	for _, size := range []int64{fuzzSize, 4 * fuzzSize} {
		uid := string(api.NewUID())
		w, err := z.disk.Create(ctx, uid, size)
		if err == nil {
			_, err = w.WriteAt(bytes.Repeat([]byte{7}, 1<<20), size-1<<20)
		}
		if err == nil {
			_, _, err = w.Seal(ctx)
		}
		if err != nil {
			t.Fatal(err)
		}
		z.ids = append(z.ids, uid)
	}
	z.uid = string(api.NewUID())
	if err := z.disk.CreateReplica(ctx, stack.Spec{UID: z.uid, Volume: "v", VolumeUID: z.volume, Size: fuzzSize,
		Layers: z.ids[5:6]}); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		z.ids = append(z.ids, string(api.NewUID()))
	}
}

// connect opens and adopts session 1. The test fails if the server refuses a sound engine.
func (z *fuzzed) connect(t *testing.T) net.Conn {
	nc, err := net.Dial("tcp", z.at())
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(5 * time.Minute))
	z.epoch++
	for i, say := range []any{hello{Version: Version, MinVersion: minVersion, Node: "near"}, openRequest{z.uid, z.volume},
		adoption{z.epoch, 1, []string{z.uid, "other"}}} {
		k := [...]kind{kindHello, kindOpen, kindAdopt}[i]
		b, err := json.Marshal(say)
		if err == nil {
			_, err = exchangeOn(nc, header{kind: k, session: 1, id: uint64(i)}, b)
		}
		if err != nil {
			t.Fatalf("a sound engine: frame of kind %d: %v", k, err)
		}
	}
	return nc
}

// exchangeOn sends a frame and receives the answer.
func exchangeOn(nc net.Conn, h header, payload []byte) ([]byte, error) {
	if err := writeControl(nc, h, payload); err != nil {
		return nil, err
	}
	var hb [headerSize]byte
	a, err := readHeader(nc, &hb)
	var b []byte
	if err == nil {
		b, err = readPayload(nc, &a)
	}
	if err == nil && a.status != 0 {
		err = decodeFault(b)
	}
	return b, err
}

// arguments has the fields of all calls.
func (z *fuzzed) arguments(s *script) []byte {
	id := func() string { return z.ids[int(s.byte())%len(z.ids)] }
	n := s.number
	snapshot := map[string]any{"uid": id(), "name": strings.Repeat("s", int(s.byte())*2), "layer": id()}
	all := map[string]any{"Off": n(), "N": n(), "Size": n(), "On": s.byte()&1 > 0, "Token": n() % 3, "Epoch": n(),
		"UID": id(), "From": id(), "To": id(), "Base": []string{id(), id()}, "Piece": n(), "Layer": id()}
	maps.Copy(all, snapshot)
	switch s.byte() % 8 {
	case 0:
		all["Regions"] = []int64{n(), n(), n()}
	case 1:
		all["Set"] = map[string]any{"runs": [][2]int64{{n(), n()}, {n(), n()}}}
	case 2:
		all["Set"] = map[string]any{"first": n(), "bits": s.bytes(9)}
	case 3:
		all["Set"] = true // which intents takes
	case 4:
		all["Right"] = s.bytes(int(s.byte()))
		all["From"], all["To"], all["Base"] = "", "", z.ids[5:6]
	case 5:
		all["From"], all["To"], all["Base"] = "", "", z.ids[6:7]
	case 6:
		delete(all, "Base")
		all["From"], all["To"] = "", ""
	}
	b, err := json.Marshal(all)
	if err != nil {
		panic(err) // strings and numbers have JSON
	}
	return b
}

// step plays one step of a script.
func (z *fuzzed) step(h *hostile, s *script) {
	session := uint32(1)
	switch s.byte() % 12 {
	case 0, 1, 2, 3, 4:
		name := z.names[int(s.byte())%len(z.names)]
		args := z.arguments(s)
		if name == "seal" {
			args = fmt.Appendf(nil, "[%s]", args)
		}
		h.frame(kindCall, session, append([]byte(name+"\n"), args...))
	case 5:
		h.frame(kindCall, session, append([]byte(z.names[int(s.byte())%len(z.names)]+"\n"), s.bytes(int(s.byte()))...))
	case 6, 7:
		k := kindRead + kind(s.byte())%(kindZero-kindRead+1)
		x := header{kind: k, flags: s.byte() & flagFUA, session: session, off: s.number(), n: s.number()}
		var payload []byte
		if k == kindWrite {
			x.n = int64(s.byte()) * 2048
			payload = bytes.Repeat([]byte{s.byte()}, int(x.n))
			if s.byte()&1 > 0 {
				x.flags |= flagSpans
				payload = append(s.bytes(20), payload[:min(len(payload), 4096*int(s.byte()&7))]...)
			}
		}
		h.id++
		x.id = h.id
		h.send(x, payload)
	case 8:
		x := header{kind: kind(s.byte()), flags: s.byte(), status: s.byte() & 1, session: uint32(s.byte() & 3),
			off: s.number(), n: s.number(), id: uint64(s.byte())}
		h.send(x, s.bytes(int(s.byte())))
	case 9:
		b, _ := json.Marshal(adoption{s.number(), s.number(), []string{z.uid, z.ids[int(s.byte())%len(z.ids)]}})
		h.frame(kindAdopt, uint32(s.byte()&3), b)
	case 10:
		b, _ := json.Marshal(openRequest{z.uid, z.volume})
		h.frame(kindOpen, uint32(s.byte()&3), b)
		if s.byte()&3 == 0 {
			h.frame(kindClose, uint32(s.byte()&3), []byte("{}"))
		}
	case 11:
		if s.byte()&7 == 0 {
			if _, err := h.w.Write(s.bytes(60)); err != nil {
				h.dead = true
			}
		}
	}
}

// play has a hostile engine play a script, and checks that the server then serves a sound engine.
func (z *fuzzed) play(t *testing.T, input []byte) {
	if z.played%100 == 0 {
		z.renew(t)
	}
	z.played++
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	nc := z.connect(t)
	ended, answers := make(chan struct{}), make(chan struct{}, 1<<10)
	go func() {
		defer close(ended)
		var hb [headerSize]byte
		for r := bufio.NewReader(nc); ; answers <- struct{}{} {
			x, err := readHeader(r, &hb)
			if err == nil {
				_, err = readPayload(r, &x)
			}
			if err != nil {
				return
			}
		}
	}()
	h, s := &hostile{nc: nc, w: bufio.NewWriter(nc)}, &script{input}
	for n := 0; n < 48 && len(s.b) > 0 && !h.dead; n++ {
		z.step(h, s)
	}
	_ = h.w.Flush()
	late := time.After(100 * time.Millisecond) // calls that wait for a prepared cut have no answer
	for open := true; open && h.id > 0; h.id-- {
		select {
		case <-answers:
		case <-ended:
			open = false
		case <-late:
			open = false
		}
	}
	z.sound(t)
	_ = nc.Close()
	<-ended
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 1<<30 {
		t.Errorf("a script of %d bytes took %d bytes of memory", len(input), n)
	}
	z.log.mu.Lock()
	defer z.log.mu.Unlock()
	if text := z.log.buf.String(); strings.Contains(text, "panicked") {
		z.log.buf.Reset()
		t.Errorf("a call panicked: %s", text)
	}
}

// sound is an engine that keeps to the protocol. If the session ends, because the hostile engine had the replica
// closed, the session begins again.
func (z *fuzzed) sound(t *testing.T) {
	for !z.served(t) {
		continue
	}
}

// served reports whether the sound engine's session reached the end.
func (z *fuzzed) served(t *testing.T) bool {
	nc := z.connect(t)
	defer nc.Close()
	content := bytes.Repeat([]byte{byte(z.played)}, block.Size)
	for _, x := range []struct {
		h       header
		payload []byte
	}{{header{kind: kindWrite, session: 1, id: 10, off: 1 << 20, n: block.Size}, content},
		{header{kind: kindFlush, session: 1, id: 11}, nil}, {header{kind: kindCall, session: 1, id: 12}, []byte("meta\n{}")},
		{header{kind: kindCall, session: 1, id: 13}, []byte(`intents` + "\n" + `{"Set":true}`)},
		{header{kind: kindRead, session: 1, id: 14, off: 1 << 20, n: block.Size}, nil}} {
		b, err := exchangeOn(nc, x.h, x.payload)
		if errors.Is(err, errSession) {
			return false
		}
		if err != nil {
			t.Fatalf("a sound engine: %+v: %v", x.h, err)
		}
		var m stack.Meta
		if x.h.id == 12 && json.Unmarshal(b, &m) == nil && (m.Size > fuzzSize || len(m.Layers) > 20) {
			z.played = 0 // the next script gets a new replica
		}
		if x.h.kind == kindRead && !bytes.Equal(b, content) {
			t.Fatal("a sound engine reads something else than it wrote")
		}
	}
	return true
}

// FuzzSession has an adopted engine send any frames to a replica on a disk: no call panics, no call takes memory
// without end, and the server serves the next engine.
func FuzzSession(f *testing.F) {
	z := newFuzzed(f)
	for i := range z.names { // each call, with small numbers, and with odd numbers
		f.Add(append([]byte{0, byte(i)}, bytes.Repeat([]byte{9}, 40)...))
		f.Add(append([]byte{0, byte(i)}, slices.Repeat([]byte{5, 9, 13, 19, 30, 26}, 8)...))
	}
	// A snapshot (7, of layer 8): taken, read, compared and dropped; and unfinished cuts.
	call := func(name string, uid, layer, mode byte) []byte {
		return []byte{0, byte(slices.Index(z.names, name)), uid, 3, layer, 0, 13, 19, 1, 1, 1, uid, 0, 0, 5, 0, 13, layer,
			mode}
	}
	write := []byte{6, 1, 0, 0, 0, 2, 1, 0}
	f.Add(slices.Concat(write, call("prepare-cut", 7, 8, 7), call("hold", 0, 0, 7), call("do-cut", 8, 8, 7),
		call("release", 0, 0, 7), write, call("snap-read", 7, 0, 7), call("snap-digests", 7, 0, 7), call("changed", 7, 0, 4),
		call("snap-end", 0, 0, 7), call("sizes", 0, 0, 7), call("broken", 0, 0, 7), call("repair", 7, 5, 4),
		call("drop-snapshot", 7, 0, 7)))
	f.Add(slices.Concat(call("seal", 9, 10, 7), write, call("seal", 11, 12, 7), call("changed", 0, 0, 5),
		call("prepare-cut", 7, 8, 7), call("hold", 0, 0, 7), write))
	f.Add(slices.Concat(call("track", 0, 0, 7), call("intend", 0, 0, 1), call("mark", 0, 0, 7), call("clean", 0, 0, 2),
		call("intents", 0, 0, 3), call("expand", 0, 0, 7), call("note", 0, 0, 7), call("abort-cut", 0, 0, 7)))
	f.Fuzz(z.play)
}
