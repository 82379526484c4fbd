package cluster

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"drover.io/drover/api"
)

// Machine is a machine of a cluster: a process with a network, mounts and process ids of its own.
type Machine struct {
	Name, IP string
	Dir      string // state, logs, disks
	Disks    []*MachineDisk

	c    *Cluster
	host byte
	log  *os.File

	mu    sync.Mutex
	init  *exec.Cmd // nil: the machine is off
	args  []string  // of the last Serve
	serve *serving
}

// serving is a run of drover.
type serving struct {
	cmd  *exec.Cmd // nsenter, the parent of drover
	done chan struct{}
	err  error // valid after done
}

// machine creates a machine and turns the machine on.
func (c *Cluster) machine(name string, host byte) (*Machine, error) {
	a := c.address(host)
	m := &Machine{Name: name, IP: fmt.Sprintf("%d.%d.%d.%d", a[0], a[1], a[2], a[3]), Dir: filepath.Join(c.Dir, name),
		c: c, host: host}
	if err := os.MkdirAll(m.Dir, 0o700); err != nil {
		return nil, err
	}
	var err error
	if m.log, err = os.OpenFile(filepath.Join(m.Dir, "serve.log"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600); err != nil {
		return nil, err
	}
	return m, m.PowerOn()
}

// PowerOn starts the machine without drover.
func (m *Machine) PowerOn() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.init != nil {
		return nil
	}
	b := birth{IP: m.c.address(m.host), Mask: [4]byte{255, 255, 255, 0}, Boot: filepath.Join(m.Dir, "boot_id")}
	if err := os.WriteFile(b.Boot, []byte(string(api.NewUID())+"\n"), 0o600); err != nil {
		return err
	}
	for _, d := range m.Disks {
		if d.image != "" {
			b.Mounts = append(b.Mounts, diskMount{d.image, d.Path})
		}
	}
	var cmd *exec.Cmd
	var card int
	var err error
	done := make(chan struct{})
	m.c.births <- func() {
		defer close(done)
		cmd, card, err = spawn(b, m.log)
	}
	<-done
	if err != nil {
		return fmt.Errorf("machine %s: %w\n%s", m.Name, err, m.LogTail())
	}
	m.init = cmd
	m.c.Net.plug(m.Name, card)
	return os.WriteFile(filepath.Join(m.Dir, "init.pid"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600)
}

// PowerOff ends all processes of the machine at once. The page cache survives; for the loss of the page cache see the
// lossy back end of block/file.
func (m *Machine) PowerOff() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.init == nil {
		return nil
	}
	m.noteVolumes()
	err := m.init.Process.Kill()
	_ = m.init.Wait() // a killed init returns no useful error
	m.init = nil
	m.c.Net.unplug(m.Name)
	if m.serve != nil {
		<-m.serve.done
		m.serve = nil
	}
	return err
}

// CutPower is PowerOff with a loss of unsynced data: disks with their own file system lose the unwritten part of the
// journal.
func (m *Machine) CutPower() error {
	if m.init == nil {
		return nil
	}
	var errs []error
	if len(m.Pids("data")) > 0 {
		errs = append(errs, m.Freeze("data", "hold")) // no process may see the disks fail before its own end
	}
	for _, d := range m.Disks {
		if d.image != "" {
			errs = append(errs, d.loseUnsynced())
		}
	}
	return errors.Join(append(errs, m.PowerOff())...)
}

// noteVolumes records the volumes whose loop devices may stay behind.
func (m *Machine) noteVolumes() {
	f, err := os.OpenFile(filepath.Join(m.c.Dir, "volumes"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	for _, d := range m.Disks {
		stacks, _ := filepath.Glob(m.View(filepath.Join(d.Path, "replicas", "*", "stack.json")))
		for _, s := range stacks {
			for _, uid := range volumeUIDs(s) {
				fmt.Fprintln(f, uid)
			}
		}
	}
}

// View returns the owner's path of a path of the machine, through the machine's mounts.
func (m *Machine) View(path string) string {
	if m.init == nil {
		return path
	}
	return filepath.Join("/proc", strconv.Itoa(m.init.Process.Pid), "root", path)
}

// Command returns a command to run on the machine.
func (m *Machine) Command(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--target", strconv.Itoa(m.init.Process.Pid), "--net",
		"--mount", "--pid", "--"}, argv...)...)
}

// Run runs a command on the machine and returns the output.
func (m *Machine) Run(ctx context.Context, argv ...string) (string, error) {
	out, err := m.Command(ctx, argv...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s on %s: %w: %s", strings.Join(argv, " "), m.Name, err, out)
	}
	return string(out), nil
}

// Serve runs `drover serve` on the machine and returns when serve is ready. Without arguments Serve repeats the last
// arguments.
func (m *Machine) Serve(ctx context.Context, args ...string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(args) > 0 {
		m.args = args
	}
	argv := append([]string{m.c.opts.Binary, "serve", "--node-name", m.Name, "--state-dir", filepath.Join(m.Dir, "state"),
		"--upload-listen", m.IP + ":0", "--metrics-listen", m.IP + ":9100"}, m.args...)
	cmd := m.Command(context.Background(), append(argv, m.c.opts.Args...)...)
	cmd.Stderr = m.log
	cmd.Env = append(os.Environ(), "GOGC=300") // memory for processor time: several clusters share the machine
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("serve on %s: %w", m.Name, err)
	}
	s := &serving{cmd: cmd, done: make(chan struct{})}
	m.serve = s
	ready := make(chan struct{})
	m.c.wg.Add(1)
	go func() { // ends with the process
		defer m.c.wg.Done()
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if strings.HasPrefix(lines.Text(), "ready ") {
				close(ready)
			}
		}
		s.err = cmd.Wait()
		close(s.done)
	}()
	select {
	case <-ready:
		return nil
	case <-s.done:
		return fmt.Errorf("serve on %s ended: %w\n%s", m.Name, s.err, m.LogTail())
	case <-ctx.Done():
		return fmt.Errorf("serve on %s: %w\n%s", m.Name, ctx.Err(), m.LogTail())
	case <-time.After(readyTime):
		return fmt.Errorf("serve on %s is not ready\n%s", m.Name, m.LogTail())
	}
}

// LogTail returns the end of the log of the machine's drover.
func (m *Machine) LogTail() string {
	b, _ := os.ReadFile(m.log.Name())
	data, _ := os.ReadFile(filepath.Join(m.Dir, "state", "log", "data.log"))
	crash, _ := os.ReadFile(filepath.Join(m.Dir, "state", "log", "data.err"))
	data = append(data, crash...)
	tail := func(b []byte) []byte { return b[max(0, len(b)-4000):] }
	return fmt.Sprintf("-- %s serve:\n%s\n-- %s data:\n%s", m.Name, tail(b), m.Name, tail(data))
}

// Pids returns the machine's processes of a role: serve, data, hold, or all for "".
func (m *Machine) Pids(role string) (pids []int) {
	if m.init == nil {
		return nil
	}
	mine, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", m.init.Process.Pid))
	if err != nil {
		return nil
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == m.init.Process.Pid {
			continue
		}
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		if err != nil || ns != mine {
			continue
		}
		cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		args := bytes.Split(cmd, []byte{0})
		if role == "" || len(args) > 1 && string(args[1]) == role {
			pids = append(pids, pid)
		}
	}
	return pids
}

var errNobody = errors.New("no process has the roles")

// Signal sends a signal to the machine's processes of the roles; without roles to all processes.
func (m *Machine) Signal(s syscall.Signal, roles ...string) error {
	if len(roles) == 0 {
		roles = []string{""}
	}
	var pids []int
	for _, r := range roles {
		pids = append(pids, m.Pids(r)...)
	}
	if len(pids) == 0 {
		return fmt.Errorf("%s: %w %v", m.Name, errNobody, roles)
	}
	slices.Sort(pids)
	var errs []error
	for _, pid := range slices.Compact(pids) {
		if err := syscall.Kill(pid, s); err != nil && !errors.Is(err, syscall.ESRCH) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Kill sends SIGKILL to roles; none: to all.
func (m *Machine) Kill(roles ...string) error { return m.Signal(syscall.SIGKILL, roles...) }

// Freeze sends SIGSTOP to roles; none: to all.
func (m *Machine) Freeze(roles ...string) error { return m.Signal(syscall.SIGSTOP, roles...) }

// Thaw continues frozen processes.
func (m *Machine) Thaw(roles ...string) error { return m.Signal(syscall.SIGCONT, roles...) }

// Stop ends serve with SIGTERM and waits for the end.
func (m *Machine) Stop() error {
	m.mu.Lock()
	s := m.serve
	m.mu.Unlock()
	if s == nil {
		return nil
	}
	if err := m.Signal(syscall.SIGTERM, "serve"); err != nil {
		return err
	}
	select {
	case <-s.done:
	case <-time.After(readyTime):
		return fmt.Errorf("serve on %s does not stop\n%s", m.Name, m.LogTail())
	}
	tail := m.LogTail()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.serve = nil
	if s.err != nil && strings.Contains(tail, "grace period") {
		return nil // parts of serve exceed the grace period on a busy computer
	}
	return s.err
}

// serving returns the current or last run of serve; nil after Stop and Gone.
func (m *Machine) serving() *serving {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.serve
}

// Gone waits for the end of serve, after a Kill.
func (m *Machine) Gone() {
	m.mu.Lock()
	s := m.serve
	m.serve = nil
	m.mu.Unlock()
	if s != nil {
		<-s.done
	}
}
