package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli"
)

// pidFile is the content of <state>/run/<role>.pid for data and hold. The process locks the file until the process
// ends: without the lock the pid means nothing.
type pidFile struct {
	Pid   int    `json:"pid"`
	Build string `json:"build"`         // identifies the running binary
	API   string `json:"api,omitempty"` // address of the API server
}

// buildID identifies this binary; a rebuilt binary of the same version differs.
func buildID() string {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/exe", &st); err != nil {
		return cli.Version
	}
	return fmt.Sprintf("%s %d:%d:%d.%d", cli.Version, st.Dev, st.Ino, st.Mtim.Sec, st.Mtim.Nsec)
}

func pidPath(stateDir, role string) string { return filepath.Join(stateDir, "run", role+".pid") }

// claimRole makes this process the only process of the role in the state folder. The lock lasts until the process ends.
// The caller keeps the file, because a garbage collection would close the file.
func claimRole(stateDir, role, apiServer string) (*os.File, error) {
	f, err := lockFile(pidPath(stateDir, role))
	if err != nil {
		return nil, api.Errorf(api.InUse, "a %s process already serves %s: %w", role, stateDir, err)
	}
	b, err := json.Marshal(pidFile{Pid: os.Getpid(), Build: buildID(), API: apiServer})
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err != nil {
		_ = f.Close()
		return nil, api.Errorf(api.Unavailable, "pid file of %s: %w", role, err)
	}
	return f, nil
}

// lockFile opens path and locks the file for this process, or fails at once if another process holds the lock.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// process is a living data or hold process: a child of this serve or of an earlier serve.
type process struct {
	pidFile
	fd  *os.File // pidfd
	cmd *exec.Cmd
}

const ( // together longer than a process needs from the lock to the content of the pid file on a busy machine
	findTries = 1000
	findPause = 10 * time.Millisecond
)

// findProcess returns the living process of a role, or nil.
func findProcess(stateDir, role string) (*process, error) {
	path := pidPath(stateDir, role)
	for try := range findTries {
		if try > 0 { // the process has just locked the file, or has just ended
			<-time.After(findPause)
		}
		f, err := lockFile(path)
		if err == nil {
			return nil, f.Close() // no process holds the lock
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, err
		}
		p := &process{}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		if json.Unmarshal(b, &p.pidFile) != nil || p.Pid <= 0 {
			continue
		}
		if p.fd, err = openPid(p.Pid); err != nil {
			continue
		}
		// Lock and pid are unchanged: the descriptor belongs to the lock's holder.
		again, err := os.ReadFile(path)
		if err == nil && string(again) == string(b) {
			if f, err := lockFile(path); err != nil {
				return p, nil
			} else if err := f.Close(); err != nil {
				return nil, err
			}
		}
		_ = p.fd.Close()
	}
	return nil, api.Errorf(api.Busy, "%s: its owner cannot be made out", path)
}

func openPid(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("pidfd of %d: %w", pid, err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil // a non-blocking descriptor waits in the runtime's poller
}

// wait returns when the process has ended, or when ctx ends.
func (p *process) wait(ctx context.Context) error {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = p.fd.SetReadDeadline(time.Unix(1, 0))
		close(woken)
	})
	defer func() {
		if !stop() {
			<-woken
			_ = p.fd.SetReadDeadline(time.Time{})
		}
	}()
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 && err == nil
	})
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("wait for process %d: %w", p.Pid, err)
	}
	return nil
}

// release closes the descriptor. If the process has ended, release reaps a child and returns the exit status.
func (p *process) release(gone bool) string {
	_ = p.fd.Close()
	switch {
	case p.cmd == nil:
		return "ended"
	case !gone:
		_ = p.cmd.Process.Release()
		return "left"
	}
	_ = p.cmd.Wait()
	return p.cmd.ProcessState.String()
}

func (p *process) signal(s syscall.Signal) error {
	return unix.PidfdSendSignal(int(p.fd.Fd()), s, nil, 0)
}

// stop ends the process: SIGTERM, then SIGKILL after grace.
func (p *process) stop(grace time.Duration) error {
	if err := p.signal(syscall.SIGTERM); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("stop process %d: %w", p.Pid, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if p.wait(ctx) == nil {
		return nil
	}
	if err := p.signal(syscall.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.Pid, err)
	}
	return p.wait(context.Background())
}

// child keeps a role running in a separate process. The owner of child calls superviseProcess.
type child struct {
	role      string
	output    string // file in the log folder for standard output and error
	stateDir  string
	args      []string
	apiServer string
	log       *slog.Logger
	// renew replaces a process of another binary or of another API server. Only for a role whose successor resumes the
	// work.
	renew bool
	// True replaces the process of an earlier serve, once.
	anew bool
	// inPath marks the process that carries I/O.
	inPath bool
	// keep runs at the end: true leaves the process alive for the next serve.
	keep func() bool
	// superviseProcess sets adopted when superviseProcess adopts a process of an earlier serve.
	adopted *atomic.Bool
}

// superviseProcess restarts a process that dies within young of the start: a few times at once, then with growing
// pauses. The pause after a kill stays short, because the process did not fail and I/O waits for the successor.
const (
	young     = time.Second
	atOnce    = 5
	minPause  = 100 * time.Millisecond
	maxPause  = 5 * time.Second
	stopGrace = 20 * time.Second
)

func (c *child) superviseProcess(ctx context.Context) error {
	early := 0
	for {
		p, err := findProcess(c.stateDir, c.role)
		if err != nil {
			return fmt.Errorf("%s process: %w", c.role, err)
		}
		if p != nil && c.renew && (c.anew || p.Build != buildID() || c.apiServer != "" && p.API != c.apiServer) {
			c.log.Info("replacing the process of an earlier start", "role", c.role, "pid", p.Pid)
			if err := p.stop(stopGrace); err != nil {
				return fmt.Errorf("%s process: %w", c.role, err)
			}
			p.release(true)
			p = nil
		}
		c.anew = false
		if p != nil {
			c.adopted.Store(true)
			c.log.Info("adopted", "role", c.role, "pid", p.Pid)
		} else if p, err = c.startProcess(); err != nil {
			return err
		}
		began := time.Now()
		if err := p.wait(ctx); err != nil {
			if ctx.Err() == nil {
				p.release(false)
				return err
			}
			return c.endProcess(p)
		}
		fate := p.release(true)
		c.log.Warn("process died and is started again", "role", c.role, "pid", p.Pid, "fate", fate)
		if time.Since(began) > young {
			early = 0
		} else if early++; early > atOnce {
			pause := min(minPause<<(min(early-atOnce, 10)-1), maxPause)
			if fate == "signal: killed" {
				pause = minPause
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return nil
			}
		}
		if ctx.Err() != nil {
			return nil
		}
	}
}

func (c *child) endProcess(p *process) error {
	if c.keep != nil && c.keep() {
		c.log.Info("left alive: volumes are attached", "role", c.role, "pid", p.Pid)
		p.release(false)
		return nil
	}
	err := p.stop(stopGrace)
	p.release(err == nil)
	return err
}

// startProcess runs the role in a session of its own, so that the role outlives this process.
func (c *child) startProcess() (*process, error) {
	out, err := openLog(filepath.Join(c.stateDir, "log", c.output))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	// The running binary, even if an update replaced or removed the file meanwhile.
	cmd := exec.Command("/proc/self/exe", append([]string{c.role}, c.args...)...)
	cmd.Args[0] = "drover"
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = out, out
	var pidfd int
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, PidFD: &pidfd}
	if err := c.spawn(cmd); err != nil {
		return nil, api.Errorf(api.Unavailable, "start %s: %w", c.role, err)
	}
	_ = unix.SetNonblock(pidfd, true)
	c.log.Info("started", "role", c.role, "pid", cmd.Process.Pid)
	return &process{pidFile: pidFile{Pid: cmd.Process.Pid}, cmd: cmd,
		fd: os.NewFile(uintptr(pidfd), "pidfd")}, nil
}

// dataNice is the scheduling priority of the data process, because all I/O waits for the data process.
const dataNice = -10

// spawn starts cmd. Priority and the mark of an I/O flusher belong to a thread, and children inherit both. With the
// mark, the kernel never reclaims memory for the process through the devices that the process serves.
func (c *child) spawn(cmd *exec.Cmd) (err error) {
	// No garbage collection before the process has resumed: collections take a third of the time to the first I/O.
	cmd.Env = append(os.Environ(), "GOGC=off")
	if !c.inPath {
		return cmd.Start()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setpriority(unix.PRIO_PROCESS, 0, dataNice); err != nil {
		c.log.Debug("no right to raise the data process's priority", "err", err)
	} else {
		defer func() { err = errors.Join(err, unix.Setpriority(unix.PRIO_PROCESS, 0, 0)) }()
	}
	if err := unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0); err != nil {
		c.log.Debug("no right to mark the data process as I/O flusher", "err", err)
	} else {
		defer func() { err = errors.Join(err, unix.Prctl(unix.PR_SET_IO_FLUSHER, 0, 0, 0, 0)) }()
	}
	return cmd.Start()
}

const maxLog = 16 << 20

// openLog opens the file of a child's standard output and error for appending, and first renames a long file. The child
// holds the file itself, because the child outlives this process. The file takes the runtime's output when a process
// dies, and the little output of hold; the data process rotates a log of its own (logFile).
func openLog(path string) (*os.File, error) {
	if st, err := os.Stat(path); err == nil && st.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, api.Errorf(api.Unavailable, "log: %w", err)
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "log: %w", err)
	}
	if _, err := f.Seek(0, io.SeekEnd); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
