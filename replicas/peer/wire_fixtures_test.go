package peer

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// testdata/protocol-1, -2, ... hold the whole conversation of a member and a server of one version of the protocol, one
// frame a line. Nodes of different versions speak with each other during an upgrade, so the file of a version never
// changes: the next version of the protocol gets a new file, written by
//
//	DROVER_WRITE_FIXTURES=1 go test -run TestPeersSpeak ./replicas/peer
//
// The command writes only missing files.

// TestPeersSpeakAsBefore has a clerk write down every frame between a member and a server. Both sides check the
// received values, so an unchanged transcript proves that both sides read old frames, too.
func TestPeersSpeakAsBefore(t *testing.T) {
	for version := minVersion; version <= Version; version++ {
		t.Run(fmt.Sprintf("protocol %d", version), func(t *testing.T) {
			got := converse(t, version)
			name := filepath.Join("testdata", fmt.Sprintf("protocol-%d", version))
			was, err := os.ReadFile(name)
			if errors.Is(err, os.ErrNotExist) && os.Getenv("DROVER_WRITE_FIXTURES") != "" {
				must(t, errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(name, []byte(got), 0o644)))
				return
			}
			must(t, err)
			a, b := strings.Split(got, "\n"), strings.Split(string(was), "\n")
			for i := range max(len(a), len(b)) {
				if i >= len(a) || i >= len(b) || a[i] != b[i] {
					t.Fatalf("line %d of %s differs: the protocol changed. Now\n%s\nand it was\n%s", i+1, name,
						strings.Join(a[min(i, len(a)):min(i+1, len(a))], ""), strings.Join(b[min(i, len(b)):min(i+1, len(b))], ""))
				}
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wording matches the message of an error with a code: the message is for people, and may change.
var wording = regexp.MustCompile(`"message":"[^"]*","code"`)

// clerk stands between a member and a server, and has both agree on a version.
type clerk struct {
	version int
	mu      sync.Mutex
	lines   []string
}

// copy passes frames on; each line begins with who, the sender.
func (c *clerk) copy(who string, to io.Writer, from io.Reader) {
	var head [headerSize]byte
	for {
		if _, err := io.ReadFull(from, head[:]); err != nil {
			return
		}
		payload := make([]byte, binary.LittleEndian.Uint32(head[32:]))
		if _, err := io.ReadFull(from, payload); err != nil {
			return
		}
		if kind(head[0]) == kindHello {
			payload = bytes.Replace(payload, fmt.Appendf(nil, `"version":%d`, Version),
				fmt.Appendf(nil, `"version":%d`, c.version), 1)
			binary.LittleEndian.PutUint32(head[32:], uint32(len(payload)))
			binary.LittleEndian.PutUint32(head[36:], crc32.Checksum(payload, castagnoli))
			binary.LittleEndian.PutUint32(head[44:], crc32.Checksum(head[:44], castagnoli))
		}
		if kind(head[0]) != kindPing { // pings come by chance
			c.mu.Lock()
			c.lines = append(c.lines, who+" "+transcribe(head, payload))
			c.mu.Unlock()
		}
		if _, err := to.Write(append(head[:], payload...)); err != nil {
			return
		}
	}
}

// transcribe is a frame as a line. Only the meaning of JSON counts, not the bytes: the line of a frame with JSON has no
// size and sums.
func transcribe(head [headerSize]byte, payload []byte) string {
	payload = wording.ReplaceAll(payload, []byte(`"message":"WORDS","code"`))
	name, text, is := bytes.Cut(payload, []byte("\n"))
	if !is {
		name, text = nil, payload
	}
	var v any
	numbers := json.NewDecoder(bytes.NewReader(text))
	numbers.UseNumber()
	if len(text) == 0 || numbers.Decode(&v) != nil {
		return fmt.Sprintf("%x %s", head, spell(payload))
	}
	out, _ := json.Marshal(without(v)) // decoded JSON can be encoded
	return fmt.Sprintf("%x %s %s", head[:32], name, out)
}

// without removes null and empty text from JSON: both mean a missing value.
func without(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key, x := range v {
			if v[key] = without(x); x == nil || x == "" {
				delete(v, key)
			}
		}
	case []any:
		for i := range v {
			v[i] = without(v[i])
		}
	}
	return v
}

// spell writes bytes for people: text quoted, eight repeated bytes once, with the count.
func spell(b []byte) string {
	var out []string
	var text []byte
	flush := func() {
		if len(text) > 0 {
			out, text = append(out, fmt.Sprintf("%q", text)), nil
		}
	}
	for len(b) > 0 {
		n := 1
		for len(b) >= 8*(n+1) && bytes.Equal(b[:8], b[8*n:8*(n+1)]) {
			n++
		}
		if n >= 64 {
			flush()
			out = append(out, fmt.Sprintf("%s*%d", hex.EncodeToString(b[:8]), n))
			b = b[8*n:]
			continue
		}
		text, b = append(text, b[0]), b[1:]
	}
	flush()
	return strings.Join(out, " ")
}

// told is a replica that records requests, and answers calls by want.
type told struct {
	t     *testing.T
	want  func(name string, args []byte) (answer []byte, err error)
	mu    sync.Mutex
	reqs  []block.Request
	fails error
	later bool // the next read fails with stack.ErrNotFetched
	adopt []string
}

func (r *told) Post(fn func()) bool { go fn(); return true }

func (r *told) Submit(q *block.Request) {
	r.mu.Lock()
	seen := *q
	seen.Buf, seen.Spans, seen.Done = slices.Clone(q.Buf), slices.Clone(q.Spans), nil
	r.reqs = append(r.reqs, seen)
	q.Err = r.fails
	if r.later && q.Op == block.OpRead {
		q.Err, r.later = stack.ErrNotFetched, false
	}
	r.mu.Unlock()
	if q.Op == block.OpRead {
		copy(q.Buf, pattern(len(q.Buf), 7))
	}
	q.Done(q)
}

func (r *told) AdoptFor(_ context.Context, node string, epoch, incarnation int64, members []string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.adopt = append(r.adopt, fmt.Sprintln(node, epoch, incarnation, members))
	return nil
}

var fixInfo = Info{Size: 64 << 20, Epoch: 6, Joined: 5, Reverted: 4, Empty: true, Restarted: true}

func (r *told) Info() Info                  { return fixInfo }
func (r *told) Drain(context.Context) error { return nil }
func (r *told) Close() error                { return nil }

func (r *told) Call(_ context.Context, name string, args []byte) ([]byte, error) {
	return r.want(name, args)
}

// pattern is content of blocks.
func pattern(n int, v byte) []byte { return bytes.Repeat([]byte{v, 0, 0, 0, 0, 0, 0, 1}, n/8) }

// converse returns the conversation.
func converse(t *testing.T, version int) string {
	rep := &told{t: t}
	s, err := NewServer(ServerOptions{Node: "two", Boot: "boot of two", Log: slog.New(slog.DiscardHandler),
		Open: func(_ context.Context, replica, volume string) (Replica, Loop, error) {
			if replica != "replica-b" || volume != "volume" {
				return nil, nil, api.Errorf(api.NotFound, "replica %s of volume %s", replica, volume)
			}
			return rep, rep, nil
		}})
	must(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	between, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	c := &clerk{version: version}
	var copies sync.WaitGroup
	copies.Go(func() {
		from, err := between.Accept()
		if err != nil {
			return
		}
		to, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			_ = from.Close()
			return
		}
		copies.Go(func() { c.copy("server", from, to); _ = from.Close() })
		c.copy("member", to, from)
		_ = to.Close()
	})
	d := &Dialer{Node: "one", Address: func(context.Context, string) (string, error) {
		return between.Addr().String(), nil
	}}
	m := d.Member(Options{Node: "two", Replica: "replica-b", Volume: "volume", Loop: rep})
	talk(t, m, rep, version)
	must(t, m.Close())
	d.Close()
	_ = between.Close()
	copies.Wait()
	s.Close()
	_ = ln.Close()
	must(t, <-served)
	return strings.Join(c.lines, "\n") + "\n"
}

// talk has the member make all requests and calls.
func talk(t *testing.T, m *Member, rep *told, version int) {
	ctx := context.Background()
	must(t, m.Adopt(ctx, 7, 3, []string{"replica-a", "replica-b"}))
	adopted := []string{"one 7 3 [replica-a replica-b]\n"}
	if m.Info() != fixInfo || m.Boot() != "boot of two" || !slices.Equal(rep.adopt, adopted) {
		t.Errorf("info %+v, boot %q, adopted %v", m.Info(), m.Boot(), rep.adopt)
	}
	requests(t, m, rep, version)
	var regions [][]int64
	for _, c := range calls(version) {
		rep.want = func(name string, args []byte) ([]byte, error) {
			if name != c.name {
				t.Errorf("call %q, not %q", name, c.name)
			}
			if name == "intend" || name == "clean" {
				a, err := decodeJSON[regionArgs](args)
				must(t, err)
				regions = append(regions, a.regionsWithin(limits{fixInfo.Size, fixIntents.Region}))
			}
			if raw, is := c.answer.([]byte); is || c.answer == nil {
				return raw, nil
			}
			return json.Marshal(c.answer)
		}
		got, err := c.call(ctx, m)
		if err != nil || !reflect.DeepEqual(got, c.result) {
			t.Errorf("%s answers %+v, %v; it was %+v", c.name, got, err, c.result)
		}
	}
	named := [][]int64{{1, 3}, {1, 3}}
	if version >= setsSince {
		named = append(named, []int64{1, 2, 3}, []int64{1, 2, 3})
	}
	if !reflect.DeepEqual(regions, named) {
		t.Errorf("calls name the regions %v, not %v", regions, named)
	}
	talkOfFaults(t, m, rep, version)
	if version >= setsSince {
		readLater(t, m, rep, version)
	}
}

// readLater reads a block that the replica still lacks. The server tells a member of version 4, and asks the replica
// again for an older member.
func readLater(t *testing.T, m *Member, rep *told, version int) {
	rep.mu.Lock()
	rep.fails, rep.later = nil, true
	rep.mu.Unlock()
	q := &block.Request{Op: block.OpRead, Off: 8192, Len: 4096, Buf: block.AlignedBuffer(4096)}
	err := Do(context.Background(), rep, m, q)
	if told := errors.Is(err, stack.ErrNotFetched); told != (version >= notFetchedSince) || !told && err != nil {
		t.Errorf("a read that waits for its blocks: %v", err)
	}
	if err == nil && !bytes.Equal(q.Buf, pattern(4096, 7)) {
		t.Error("a read that waited brings something else")
	}
}

func requests(t *testing.T, m *Member, rep *told, version int) {
	const kib = 1 << 10
	spanned := pattern(32*kib, 9)
	for _, want := range []block.Request{
		{Op: block.OpRead, Off: 8 * kib, Len: 16 * kib, Buf: pattern(16*kib, 7)},
		{Op: block.OpWrite, Off: 1 << 30, Len: 8 * kib, Buf: pattern(8*kib, 8)},
		{Op: block.OpWrite, Off: 0, Len: 4 * kib, Buf: pattern(4*kib, 8), FUA: true},
		{Op: block.OpWrite, Off: 64 * kib, Len: 32 * kib, Buf: spanned, FUA: true,
			Spans: []block.Span{{Off: 4 * kib, Len: 4 * kib}, {Off: 16 * kib, Len: 8 * kib}}},
		{Op: block.OpFlush},
		{Op: block.OpDiscard, Off: 4 * kib, Len: 1 << 30},
		{Op: block.OpZero, Off: 4 * kib, Len: 1 << 20},
	} {
		q := want
		q.Buf = nil
		if want.Buf != nil {
			q.Buf = block.AlignedBuffer(len(want.Buf))
		}
		if q.Op == block.OpWrite {
			copy(q.Buf, want.Buf)
		}
		must(t, Do(context.Background(), rep, m, &q))
		if q.Op == block.OpRead && !bytes.Equal(q.Buf, want.Buf) {
			t.Error("a read brings something else")
		}
		rep.mu.Lock()
		got := rep.reqs[len(rep.reqs)-1]
		rep.mu.Unlock()
		whole := []block.Span{{Len: got.Len}}
		if len(want.Spans) > 0 && version >= spansSince {
			whole = want.Spans
		}
		for _, s := range whole {
			if got.Op == block.OpWrite && !bytes.Equal(got.Buf[s.Off:s.Off+s.Len], want.Buf[s.Off:s.Off+s.Len]) {
				t.Errorf("other bytes arrive of the write at %d", want.Off)
			}
		}
		if version < spansSince {
			want.Spans = nil
		}
		got.Buf, want.Buf = nil, nil
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%+v arrives, it was %+v", got, want)
		}
	}
}

// talkOfFaults has requests and calls fail in every way that the other side can tell apart.
func talkOfFaults(t *testing.T, m *Member, rep *told, version int) {
	ctx := context.Background()
	for k := api.Other; k <= api.Denied; k++ {
		rep.want = func(string, []byte) ([]byte, error) { return nil, api.Errorf(k, "kind %d", k) }
		if err := m.Expand(ctx, 128<<20); api.KindOf(err) != k || !strings.Contains(err.Error(), fmt.Sprintf("kind %d", k)) {
			t.Errorf("%v arrives for kind %v", err, k)
		}
	}
	faults := []error{ErrRestarted, stack.ErrFailed, ErrAbandoned, unix.ENOSPC}
	if version >= notFetchedSince {
		faults = append(faults, stack.ErrNotFetched)
	}
	for _, want := range faults {
		rep.want = func(string, []byte) ([]byte, error) { return nil, fmt.Errorf("it fails: %w", want) }
		if err := m.Expand(ctx, 128<<20); !errors.Is(err, want) {
			t.Errorf("%v arrives for %v", err, want)
		}
	}
	rep.mu.Lock()
	rep.fails = unix.EIO
	rep.mu.Unlock()
	if err := Do(ctx, rep, m, &block.Request{Op: block.OpDiscard, Len: 4096}); !errors.Is(err, unix.EIO) {
		t.Errorf("a request fails with %v", err)
	}
}
