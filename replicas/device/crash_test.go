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

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
)

// TestMain: the test binary is also the serving process, which the tests kill.
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

// serveUntilKilled is a data process with one volume. The process resumes the device, or makes the device.
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
	if os.Getenv("DROVER_TEST_HOLD_FLUSHES") != "" {
		be.hold = holdFlushes // nothing is submitted yet
	}
	var d *Device
	if held := h.Held(); len(held) > 0 {
		d, err = h.Resume(ctx, held[0], l, be)
	} else {
		key := fmt.Sprintf("test-%d-crash", os.Getppid()) // as testKey of the parent
		d, err = h.Attach(ctx, Spec{Key: key, Name: key, Size: crashSize}, l, be)
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
	in := bufio.NewReader(os.Stdin)
	line, _ := in.ReadString('\n') // a command; EOF: the test or its process ended
	if line == "hold reads\n" {
		err = l.Do(func() {
			be.hold = func(q *block.Request) bool {
				switch q.Op {
				case block.OpRead:
					fmt.Println("stuck")
				case block.OpFlush:
					fmt.Println("flushing")
				}
				return q.Op == block.OpRead
			}
		})
		if err != nil {
			return err
		}
		fmt.Println("stuck")
		line, _ = in.ReadString('\n')
	}
	if line == "stick\n" { // detach, while the backend leaves flushes unanswered
		if err := l.Do(func() { be.hold = holdFlushes }); err != nil {
			return err
		}
	}
	if line != "" {
		err = d.Detach(ctx)
		tick := time.NewTicker(50 * time.Millisecond)
		for n := 0; n < 200 && api.Is(err, api.InUse); n++ { // as the node does: a helper may still use the device
			<-tick.C
			err = d.Detach(ctx)
		}
	}
	return err
}

// holdFlushes keeps flushes unanswered.
func holdFlushes(q *block.Request) bool {
	if q.Op == block.OpFlush {
		fmt.Println("stuck")
	}
	return q.Op == block.OpFlush
}

// child is a running serveUntilKilled.
type child struct {
	cmd      *exec.Cmd
	in       *os.File
	ready    chan string
	stuck    chan bool
	flushing chan bool
	ended    chan struct{}
	err      error // how; read after ended
}

// spawn starts a child with additional environment variables. The end of the test kills the child.
func spawn(t *testing.T, dir string, resent *atomic.Int64, env ...string) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0]), ready: make(chan string, 1), stuck: make(chan bool, 100),
		flushing: make(chan bool, 100), ended: make(chan struct{})}
	c.cmd.Env = append(append(os.Environ(), "DROVER_TEST_SERVE="+dir, "GOTRACEBACK=all"), env...)
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
	t.Cleanup(func() { c.kill(t) })
	tell := func(to chan bool) { // the test may read no more values
		select {
		case to <- true:
		default:
		}
	}
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
				tell(c.stuck)
			case "flushing":
				tell(c.flushing)
			default:
				fmt.Fprintln(os.Stderr, "child:", s.Text())
			}
		}
		c.err = c.cmd.Wait()
		close(c.ended)
	}()
	return c
}

func (c *child) await(t *testing.T) string {
	t.Helper()
	select {
	case path := <-c.ready:
		return path
	case <-c.ended:
		t.Fatalf("the serving process ended by itself: %v", c.err)
	case <-time.After(tooLong):
		t.Fatal("the serving process does not become ready")
	}
	return ""
}

func (c *child) kill(t *testing.T) {
	t.Helper()
	_ = c.cmd.Process.Kill()
	_ = c.in.Close()
	within(t, "end of a serving process that was killed", c.ended)
}

// detach has the child detach its device and end.
func (c *child) detach(t *testing.T) {
	t.Helper()
	if _, err := c.in.WriteString("detach\n"); err != nil {
		t.Fatal(err)
	}
	if within(t, "end of a serving process that detaches", c.ended); c.err != nil {
		t.Errorf("detach: %v", c.err)
	}
}

// load writes and verifies through the device with direct I/O. Each worker soon rewrites its own blocks, so a late
// write of a dead process destroys a newer write, and the worker notices.
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

// end stops all workers and waits for their end.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop.Store(true)
	ended := make(chan struct{})
	go func() {
		l.wg.Wait()
		close(ended)
	}()
	within(t, "end of the load", ended)
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
	model := make([][]byte, crashBlocks) // expected content of each block
	for i := range model {
		model[i] = make([]byte, crashBlock)
	}
	buf := block.AlignedBuffer(crashBlock)
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

// TestKill kills the serving process again and again under a verified load, in the mode of the measurements: no I/O
// fails, and no write is lost. DROVER_KILLS sets the number of kills.
func TestKill(t *testing.T) {
	l := &load{}
	t.Cleanup(func() { l.end(t) }) // runs last: unserved I/O fails with the holder's end
	dir := runHolder(t)
	kills := suite.Count(t, "DROVER_KILLS", 5, 50)
	var resent atomic.Int64
	c := spawn(t, dir, &resent)
	path := c.await(t)
	abortIfStuck(t, path)
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
		c.kill(t)
		c = spawn(t, dir, &resent)
		if p := c.await(t); p != path {
			t.Fatalf("device %s after %s", p, path)
		}
		await(t, func() bool { return l.ops.Load() > before+2*crashWorkers })
		gaps = append(gaps, time.Duration(l.gap.Load()))
	}
	l.end(t)
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
	c.detach(t)
}

// TestKillWhileDetaching: a process waits for the last flush of a device which the process itself serves, and is
// killed. The process ends; the next process takes over, and can detach.
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
	within(t, "flush", c.stuck)
	c.kill(t)
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
	next.detach(t)
}

// TestKillWhileSettingUp: a process is killed while the kernel sets up the process's loop device, and waits for a flush
// from the process. The process ends; the next process answers the flush and serves the same device.
func TestKillWhileSettingUp(t *testing.T) {
	dir := runHolder(t)
	var resent atomic.Int64
	c := spawn(t, dir, &resent, "DROVER_TEST_HOLD_FLUSHES=1")
	within(t, "flush of the set-up", c.stuck)
	c.kill(t)
	next := spawn(t, dir, &resent)
	path := next.await(t)
	fd := openDev(t, path, unix.O_RDWR|unix.O_DIRECT)
	want := block.AlignedBuffer(page)
	copy(want, "written after the set-up")
	if _, err := unix.Pwrite(fd, want, 0); err != nil {
		t.Error(err)
	}
	_ = unix.Close(fd)
	next.detach(t)
}

// TestKillWhileLettingGo: a process is killed during the detach of a device with a read in progress. The process ends,
// although the kernel may wait for the process's own answer to the read. The next process answers the read.
func TestKillWhileLettingGo(t *testing.T) {
	dir := runHolder(t)
	var resent atomic.Int64
	c := spawn(t, dir, &resent)
	path := c.await(t)
	abortIfStuck(t, path)
	fd := openDev(t, path, unix.O_RDWR|unix.O_DIRECT)
	defer func() { _ = unix.Close(fd) }()
	tell := func(c *child, word string) {
		t.Helper()
		if _, err := c.in.WriteString(word + "\n"); err != nil {
			t.Fatal(err)
		}
	}
	tell(c, "hold reads")
	within(t, "hold of reads", c.stuck)
	reads := make(chan error, 1)
	go func() {
		_, err := unix.Pread(fd, block.AlignedBuffer(page), 0)
		reads <- err
	}()
	within(t, "read", c.stuck)
	tell(c, "detach")
	within(t, "flush", c.flushing)
	<-time.After(300 * time.Millisecond) // time for the process to begin to wait
	c.kill(t)
	next := spawn(t, dir, &resent)
	if got := next.await(t); got != path {
		t.Fatalf("%s became %s", path, got)
	}
	if err := within(t, "answer to the read", reads); err != nil {
		t.Error(err)
	}
	_ = unix.Close(fd)
	fd = -1
	next.detach(t)
}

// abortIfStuck fails the I/O of a device after a failed test. Else processes that wait for the device, among them this
// process, could not end, and every process that opens loop devices would wait, too.
func abortIfStuck(t *testing.T, path string) {
	t.Helper()
	fd := openDev(t, path, unix.O_RDONLY)
	defer func() { _ = unix.Close(fd) }()
	info, err := unix.IoctlLoopGetStatus64(fd)
	if err != nil {
		t.Fatal(err)
	}
	control := t.TempDir()
	if err := unix.Mount("none", control, "fusectl", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(control, unix.MNT_DETACH) })
	t.Cleanup(func() {
		if t.Failed() {
			conn := strconv.Itoa(int(unix.Minor(info.Device)))
			err := os.WriteFile(filepath.Join(control, conn, "abort"), []byte("1"), 0)
			if t.Log("aborted: ", err); err == nil { // the device still exists, and no other process removes it
				t.Log("taken away: ", exec.Command("losetup", "-d", path).Run())
			}
		}
	})
}
