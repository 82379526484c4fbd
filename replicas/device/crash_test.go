package device

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

// The test binary is also the process that serves, and dies.
func TestMain(m *testing.M) {
	if dir := os.Getenv("DROVER_TEST_SERVE"); dir != "" {
		if err := serveUntilKilled(dir); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		return
	}
	if sock := os.Getenv("DROVER_TEST_DIAL"); sock != "" {
		dialAsNobody(sock)
		return
	}
	os.Exit(m.Run())
}

const crashSize = 64 * mib

// serveUntilKilled is a data process with one volume: it resumes the device, or makes it.
func serveUntilKilled(dir string) error {
	ctx := context.Background()
	l, err := uring.New(256)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- l.Run() }()
	h, err := Open(ctx, dir)
	if err != nil {
		return err
	}
	be, err := openDisk(l, filepath.Join(dir, "data"), crashSize)
	if err != nil {
		return err
	}
	if err := be.drain(crashSize); err != nil {
		return err
	}
	var d *Device
	if held := h.Held(); len(held) > 0 {
		d, err = h.Resume(ctx, held[0], l, be)
	} else {
		key := fmt.Sprintf("test-%d-crash", os.Getppid()) // as testKey of the parent
		d, err = h.Attach(ctx, Spec{Key: key, Name: "test-crash", Size: crashSize}, l, be)
	}
	if err != nil {
		return err
	}
	fmt.Println("ready", d.Path())
	go func() {
		seen := int64(0)
		for range time.Tick(2 * time.Millisecond) {
			if n := d.Resent(); n != seen {
				fmt.Println("resent", n-seen)
				seen = n
			}
		}
	}()
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n') // the end of the test, or of its process
	if line == "stick\n" {                                // detach, with a backend that answers no flush
		err = l.Do(func() {
			be.hold = func(q *block.Request) bool {
				if q.Op == block.OpFlush {
					fmt.Println("stuck")
				}
				return q.Op == block.OpFlush
			}
		})
		if err != nil {
			return err
		}
	}
	if line != "" {
		err = d.Detach(ctx)
	}
	return err
}

// child is a running serveUntilKilled.
type child struct {
	cmd    *exec.Cmd
	in     *os.File
	ready  chan string
	stuck  chan bool
	ended  chan error
	resent *atomic.Int64
}

func spawn(t *testing.T, dir string, resent *atomic.Int64) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0]), ready: make(chan string, 1), stuck: make(chan bool, 100),
		ended: make(chan error, 1), resent: resent}
	c.cmd.Env = append(os.Environ(), "DROVER_TEST_SERVE="+dir, "GOTRACEBACK=all")
	c.cmd.Stderr = os.Stderr
	in, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c.cmd.Stdin, c.in = in, w
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	go func() {
		s := bufio.NewScanner(out)
		for s.Scan() {
			word, rest, _ := strings.Cut(s.Text(), " ")
			switch n, _ := strconv.ParseInt(rest, 10, 64); word {
			case "ready":
				c.ready <- rest
			case "resent":
				resent.Add(n)
			case "stuck":
				c.stuck <- true
			default:
				fmt.Fprintln(os.Stderr, "child:", s.Text())
			}
		}
		c.ended <- c.cmd.Wait()
		close(c.ready)
	}()
	return c
}

func (c *child) await(t *testing.T) string {
	t.Helper()
	select {
	case path, ok := <-c.ready:
		if !ok {
			t.Fatal("the serving process ended by itself")
		}
		return path
	case <-time.After(2 * time.Minute):
		t.Fatal("the serving process does not become ready")
	}
	return ""
}

func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	<-c.ended
	_ = c.in.Close()
}

// load writes and verifies through the device with direct I/O. Each worker has its own blocks and rewrites them soon, so
// that a write of a dead process that comes late destroys a newer one and is seen.
type load struct {
	ops, errs, wrong atomic.Int64
	last, gap        atomic.Int64 // ns; the longest time between two completions
	stop             atomic.Bool
	wg               sync.WaitGroup
}

const (
	crashWorkers = 24
	crashBlocks  = 32 // of each worker
	crashBlock   = 32 << 10
)

func (l *load) done() {
	now := time.Now().UnixNano()
	l.ops.Add(1)
	gap := now - l.last.Swap(now)
	for old := l.gap.Load(); gap > old && !l.gap.CompareAndSwap(old, gap); old = l.gap.Load() {
	}
}

func (l *load) worker(t *testing.T, path string, id int) {
	defer l.wg.Done()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		l.errs.Add(1)
		return
	}
	defer func() { _ = unix.Close(fd) }()
	rng := rand.New(rand.NewPCG(uint64(id), 1))
	model := make([][]byte, crashBlocks) // what a block must hold
	for i := range model {
		model[i] = make([]byte, crashBlock)
	}
	buf := aligned(crashBlock)
	fail := func(what string, err error) {
		if l.errs.Add(1) < 10 {
			t.Errorf("worker %d: %s: %v", id, what, err)
		}
	}
	for seq := uint64(1); !l.stop.Load(); seq++ {
		k := rng.IntN(crashBlocks)
		base := int64(id*crashBlocks+k) * crashBlock
		from := rng.IntN(crashBlock/512) * 512
		n := min(512<<rng.IntN(7), crashBlock-from)
		b := buf[:n]
		switch rng.IntN(8) {
		case 0, 1, 2, 3:
			for o := 0; o < n; o += 8 {
				binary.LittleEndian.PutUint64(b[o:], seq<<16|uint64(id)<<8|uint64(k))
			}
			if m, err := unix.Pwrite(fd, b, base+int64(from)); err != nil || m != n {
				fail("write", err)
				continue
			}
			copy(model[k][from:], b)
		case 4:
			if seq%16 != 0 {
				continue
			}
			if err := unix.Fdatasync(fd); err != nil {
				fail("flush", err)
			}
		default:
			if m, err := unix.Pread(fd, b, base+int64(from)); err != nil || m != n {
				fail("read", err)
				continue
			}
			if !bytes.Equal(b, model[k][from:from+n]) {
				if l.wrong.Add(1) < 10 {
					t.Errorf("worker %d: block %d at %d: other content", id, k, from)
				}
			}
		}
		l.done()
	}
	for k := range model {
		if _, err := unix.Pread(fd, buf, int64(id*crashBlocks+k)*crashBlock); err != nil {
			fail("last read", err)
		} else if !bytes.Equal(buf, model[k]) {
			l.wrong.Add(1)
			t.Errorf("worker %d: block %d: other content at the end", id, k)
		}
	}
}

// TestKill kills the serving process again and again under a verified load, in the mode that is measured too: nothing
// fails, nothing is lost. DROVER_KILLS sets how often.
func TestKill(t *testing.T) {
	dir := runHolder(t)
	kills := 15
	if s := os.Getenv("DROVER_KILLS"); s != "" {
		var err error
		if kills, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	var resent atomic.Int64
	c := spawn(t, dir, &resent)
	defer func() { c.kill() }()
	path := c.await(t)
	l := &load{}
	l.last.Store(time.Now().UnixNano())
	l.wg.Add(crashWorkers)
	for id := range crashWorkers {
		go l.worker(t, path, id)
	}
	var gaps []time.Duration
	for range kills {
		<-time.After(time.Duration(20+rand.IntN(100)) * time.Millisecond)
		before := l.ops.Load()
		l.gap.Store(0)
		c.kill()
		c = spawn(t, dir, &resent)
		if p := c.await(t); p != path {
			t.Fatalf("device %s after %s", p, path)
		}
		await(t, func() bool { return l.ops.Load() > before+2*crashWorkers })
		gaps = append(gaps, time.Duration(l.gap.Load()))
	}
	l.stop.Store(true)
	l.wg.Wait()
	slices.Sort(gaps)
	t.Logf("%d kills, %d verified operations, %d repeated requests, %d I/O errors, %d miscompares; longest wait for a "+
		"completion: median %v, worst %v", kills, l.ops.Load(), resent.Load(), l.errs.Load(), l.wrong.Load(),
		gaps[len(gaps)/2].Round(time.Millisecond/10), gaps[len(gaps)-1].Round(time.Millisecond/10))
	if l.errs.Load() > 0 || l.wrong.Load() > 0 {
		t.Error("the load saw the kills")
	}
	if resent.Load() == 0 {
		t.Error("no request was under way at any kill: this tested nothing")
	}
	if _, err := c.in.WriteString("detach\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-c.ended; err != nil {
		t.Errorf("detach at the end: %v", err)
	}
	c.ended <- nil
}

// A process that is killed while it waits for the last flush of a device, which it serves itself, ends; the next one
// takes over, and can detach.
func TestKillWhileDetaching(t *testing.T) {
	dir := runHolder(t)
	var resent atomic.Int64
	c := spawn(t, dir, &resent)
	path := c.await(t)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("to be flushed..."), 1<<16)
	if _, err := f.WriteAt(want, mib); err != nil { // stays in the page cache
		t.Fatal(err)
	}
	if _, err := c.in.WriteString("stick\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.stuck:
	case <-time.After(time.Minute):
		t.Fatal("the flush does not come")
	}
	c.kill()
	next := spawn(t, dir, &resent)
	if got := next.await(t); got != path {
		t.Fatalf("%s became %s", path, got)
	}
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, mib); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("what was written is not there: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := next.in.WriteString("detach\n"); err != nil {
		t.Fatal(err)
	}
	if err := <-next.ended; err != nil {
		t.Fatal(err)
	}
	_ = next.in.Close()
}
