package listener

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if os.Getenv("DROVER_TEST_DESCRIPTORS") != "" {
		if err := withoutDescriptors(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const late = 2 * time.Minute

// told is a log which hands its lines to a test.
type told chan string

func (l told) Write(b []byte) (int, error) {
	select {
	case l <- string(b):
	default:
	}
	return len(b), nil
}

func (l told) says(part string) error {
	enough := time.NewTimer(late)
	defer enough.Stop()
	for {
		select {
		case line := <-l:
			if strings.Contains(line, part) {
				return nil
			}
		case <-enough.C:
			return fmt.Errorf("the log never says %q", part)
		}
	}
}

// server keeps accepted connections open. A byte identifies the peer.
type server struct {
	l    *Listener
	addr string
	mu   sync.Mutex
	all  []net.Conn
	wg   sync.WaitGroup
	end  chan error
}

func serve(t *testing.T, o Options) *server {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &server{l: Wrap(ln, o), addr: ln.Addr().String(), end: make(chan error, 1)}
	go func() { s.end <- s.accept() }()
	t.Cleanup(func() {
		_ = s.l.Close()
		if err := <-s.end; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
		s.mu.Lock()
		for _, c := range s.all {
			_ = c.Close()
		}
		s.mu.Unlock()
		s.wg.Wait()
		s.l.mu.Lock()
		defer s.l.mu.Unlock()
		if s.l.unknown.Len()+len(s.l.sources)+len(s.l.peers) > 0 {
			t.Errorf("left: %d unknown, sources %v, peers %v", s.l.unknown.Len(), s.l.sources, s.l.peers)
		}
	})
	return s
}

func (s *server) accept() error {
	for {
		c, err := s.l.Accept()
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.all = append(s.all, c)
		s.mu.Unlock()
		s.wg.Go(func() {
			defer c.Close()
			b := make([]byte, 1)
			if _, err := io.ReadFull(c, b); err != nil || Identify(c, string(b)) != nil {
				return
			}
			_, _ = c.Write(b)
			_, _ = io.Copy(io.Discard, c)
		})
	}
}

// dial connects from an address of the loopback network.
func (s *server) dial(t *testing.T, from string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}, Timeout: late}
	c, err := d.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// known sends the peer's identity, and reports whether the server accepted the identity.
func known(c net.Conn, peer byte) bool {
	_ = c.SetDeadline(time.Now().Add(late))
	b := []byte{peer}
	if _, err := c.Write(b); err != nil {
		return false
	}
	_, err := io.ReadFull(c, b)
	return err == nil
}

// ended waits until the server has closed a connection.
func ended(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(late))
	var ne net.Error
	if _, err := c.Read(make([]byte, 1)); errors.As(err, &ne) && ne.Timeout() {
		t.Fatal("a connection is open still")
	}
}

// TestAFloodCompetesWithItself: sources which open connections without end and send nothing end no identified
// connection, and keep no other source out.
func TestAFloodCompetesWithItself(t *testing.T) {
	log := make(told, 16)
	s := serve(t, Options{Unknown: 32, PerSource: 4, Deadline: late, Log: slog.New(slog.NewTextHandler(log, nil))})
	first := s.dial(t, "127.0.0.1")
	if !known(first, 'a') {
		t.Fatal("refused at once")
	}
	for i := range 400 {
		s.dial(t, fmt.Sprintf("127.0.1.%d", 1+i%20))
		if i%100 == 99 {
			if !known(s.dial(t, "127.0.0.1"), 'b') {
				t.Fatalf("after %d connections another source is kept out", i)
			}
		}
	}
	s.l.mu.Lock()
	unknown, most := s.l.unknown.Len(), 0
	for _, n := range s.l.sources {
		most = max(most, n)
	}
	s.l.mu.Unlock()
	if unknown > 32 || most > 4 {
		t.Errorf("%d unknown connections, %d of one source", unknown, most)
	}
	if _, err := first.Write([]byte{1}); err != nil {
		t.Errorf("a connection that is identified has ended: %v", err)
	}
	if err := log.says("connections are refused"); err != nil {
		t.Error(err)
	}
	if len(log) > 2 {
		t.Errorf("%d more lines of the log", len(log))
	}
}

// TestUnknownConnectionsEnd: the listener closes a connection without an identity at the deadline, and keeps an
// identified connection.
func TestUnknownConnectionsEnd(t *testing.T) {
	s := serve(t, Options{Deadline: 100 * time.Millisecond})
	c := s.dial(t, "127.0.0.1")
	ended(t, c)
	s = serve(t, Options{Deadline: late})
	c = s.dial(t, "127.0.0.1")
	if !known(c, 'a') {
		t.Fatal("refused")
	}
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if s.l.unknown.Len() != 0 || s.l.peers["a"] != 1 {
		t.Errorf("%d unknown, peers %v", s.l.unknown.Len(), s.l.peers)
	}
}

// TestConnectionsOfAPeerAreBounded: a peer at its bound gets another connection after a connection has ended.
func TestConnectionsOfAPeerAreBounded(t *testing.T) {
	s := serve(t, Options{PerPeer: 2})
	one, two := s.dial(t, "127.0.0.1"), s.dial(t, "127.0.0.1")
	if !known(one, 'a') || !known(two, 'a') {
		t.Fatal("refused")
	}
	if known(s.dial(t, "127.0.0.1"), 'a') {
		t.Error("a peer has more connections than it may")
	}
	if !known(s.dial(t, "127.0.0.1"), 'b') {
		t.Error("another peer is kept out")
	}
	_ = one.Close()
	for until := time.Now().Add(late); !known(s.dial(t, "127.0.0.1"), 'a'); {
		if time.Now().After(until) {
			t.Fatal("the place of a connection that ended is not free")
		}
	}
}

// broken is a listener that fails.
type broken struct{ net.Listener }

func (broken) Accept() (net.Conn, error) { return nil, os.NewSyscallError("accept", syscall.EINVAL) }
func (broken) Close() error              { return nil }

// TestOtherErrorsEndTheServer: Accept returns a lasting error at once.
func TestOtherErrorsEndTheServer(t *testing.T) {
	if _, err := Wrap(broken{}, Options{}).Accept(); !errors.Is(err, syscall.EINVAL) {
		t.Error(err)
	}
}

// TestListenerOutlivesALackOfDescriptors runs a listener in a process of its own with few descriptors.
func TestListenerOutlivesALackOfDescriptors(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*late)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), "DROVER_TEST_DESCRIPTORS=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func withoutDescriptors() error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	limit.Cur = 64
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	log := make(told, 64)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	l := Wrap(ln, Options{Log: slog.New(slog.NewTextHandler(log, nil))})
	got := make(chan error, 16)
	go func() { // ends with the process
		for {
			_, err := l.Accept() // the connection stays open
			got <- err
			if err != nil {
				return
			}
		}
	}()
	dial := func() (net.Conn, error) { return net.DialTimeout("tcp", ln.Addr().String(), late) }
	if _, err := dial(); err != nil {
		return err
	}
	if err := <-got; err != nil {
		return err
	}
	// Files take all descriptors but the last, and the client takes the last.
	var files []*os.File
	for {
		f, err := os.Open("/dev/null")
		if err != nil {
			break
		}
		files = append(files, f)
	}
	if err := files[len(files)-1].Close(); err != nil {
		return err
	}
	c, err := dial()
	if err != nil {
		return err
	}
	if err := log.says("connections wait"); err != nil {
		return err
	}
	for _, f := range files[:len(files)-1] {
		if err := f.Close(); err != nil {
			return err
		}
	}
	if err := log.says("accepted again"); err != nil {
		return err
	}
	if err := <-got; err != nil {
		return fmt.Errorf("the listener has ended: %w", err)
	}
	// The listener leaves the last descriptors to other work, and refuses a new connection at once.
	files = files[:0]
	for {
		f, err := os.Open("/dev/null")
		if err != nil {
			break
		}
		files = append(files, f)
	}
	for _, f := range files[len(files)-4:] {
		if err := f.Close(); err != nil {
			return err
		}
	}
	if _, err = dial(); err != nil {
		return err
	}
	if err := log.says("descriptors are scarce"); err != nil {
		return err
	}
	return c.Close()
}

func TestTallyReportsTheFirstAndThenOnceAMinute(t *testing.T) {
	var tally Tally
	now := time.Unix(1000, 0)
	for i, want := range []int{1, 0, 0} {
		if n, _ := tally.count(now.Add(time.Duration(i) * time.Second)); n != want {
			t.Errorf("event %d: %d", i, n)
		}
	}
	if n, report := tally.count(now.Add(time.Minute)); !report || n != 3 {
		t.Errorf("after a minute: %d, %v", n, report)
	}
}

func TestSources(t *testing.T) {
	for _, c := range []struct{ a, b string }{
		{"127.0.0.1:1", "127.0.0.1:2"}, {"[::ffff:127.0.0.1]:1", "127.0.0.1:2"},
		{"[2001:db8::1]:1", "[2001:db8::ffff:1]:2"}, {"[fe80::1%lo]:1", "[fe80::2%lo]:1"},
	} {
		a, b := addr(c.a), addr(c.b)
		if sourceOf(a) != sourceOf(b) || !sourceOf(a).IsValid() {
			t.Errorf("%s and %s are %s and %s", c.a, c.b, sourceOf(a), sourceOf(b))
		}
	}
	if sourceOf(addr("127.0.0.1:1")) == sourceOf(addr("127.0.0.2:1")) {
		t.Error("two addresses are one source")
	}
}

type addr string

func (a addr) Network() string { return "tcp" }
func (a addr) String() string  { return string(a) }
