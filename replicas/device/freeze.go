package device

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device/loophelper"
)

// A process of its own, the freezer, freezes the file system of a device, since a freeze waits for I/O that the data
// process serves. The freezer also thaws the file system, on demand or when the data process is gone. In case the
// freezer is killed too, a record names the file system; the freezer and its children keep the record locked while
// any of them lives: the next data process thaws the recorded file systems.
//
// A freeze does not outlive the kernel: a record need not be synced, and names its boot.

//go:embed freeze.sh
var freezeScript string

const (
	freezePrefix = "freeze-" // of a record's name
	thawWait     = 10 * time.Second
	thawEvery    = 100 * time.Millisecond
)

// Exit codes of freeze.sh.
const (
	exitNoFolder = 2 // the shell's code
	exitNotMount = 3 // the folder is no longer the mount
	exitNotThaw  = 6
)

// frozenRecord is the content of a record: a file system that is going to be frozen.
type frozenRecord struct {
	Boot string `json:"boot"`
	Key  string `json:"key"`
	Loop int    `json:"loop"`
}

// Frozen is a frozen file system. Thaw must be called.
type Frozen struct {
	d     *Device
	path  string // of the record
	pid   int
	tell  *os.File
	lines chan string
	ended chan error
	done  chan struct{} // the record is gone, or another freeze's
}

// Freeze freezes the file system of a device that is mounted here: all written data is on the device, and writers
// wait. Nil: not mounted. If ctx ends before, the file system is thawed as soon as the kernel can.
func (d *Device) Freeze(ctx context.Context) (*Frozen, error) {
	mounts, err := mountsOn(d.dev)
	if err != nil || len(mounts) == 0 || loopFile(d.dev) != d.file { // the number can be another device's by now
		return nil, err
	}
	lock, path, err := d.host.recordFreeze(ctx, frozenRecord{bootID(), d.spec.Key, d.dev})
	if err != nil {
		return nil, fmt.Errorf("freeze %s: %w", d.Path(), err)
	}
	defer func() { _ = lock.Close() }()
	for _, m := range mounts { // all of one file system
		f := &Frozen{d: d, path: path, done: make(chan struct{})}
		if err = f.startFreeze(lock, "freeze", m); err != nil {
			break
		}
		if err = f.awaitFrozen(ctx); err == nil {
			return f, nil
		}
		if c := exitCode(err); c != exitNotMount && c != exitNoFolder {
			f.startThaw()
			return nil, fmt.Errorf("freeze %s at %s: %w", d.Path(), m.Mountpoint, err)
		}
		_ = f.tell.Close()
	}
	return nil, errors.Join(err, os.Remove(path))
}

// recordFreeze makes the record, and waits for the end of an earlier freeze.
func (h *Host) recordFreeze(ctx context.Context, rec frozenRecord) (lock *os.File, path string, err error) {
	path = filepath.Join(h.runDir, freezePrefix+rec.Key)
	b, err := json.Marshal(rec)
	if err != nil {
		return nil, "", err
	}
	f, err := os.CreateTemp(h.runDir, ".freeze-")
	if err != nil {
		return nil, "", err
	}
	defer func() {
		_ = os.Remove(f.Name())
		if err != nil {
			_ = f.Close()
		}
	}()
	if _, err := f.Write(b); err != nil {
		return nil, "", err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, "", err
	}
	tick := time.NewTicker(thawEvery)
	defer tick.Stop()
	for {
		if err := os.Link(f.Name(), path); !errors.Is(err, fs.ErrExist) {
			return f, path, err
		}
		select {
		case <-ctx.Done():
			return nil, "", api.Errorf(api.Busy, "an earlier freeze of the file system has not ended: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// startFreeze runs freeze.sh with the lock.
func (f *Frozen) startFreeze(lock *os.File, deed string, m *mountinfo.Info) error {
	in, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	out, say, err := os.Pipe()
	if err != nil {
		return errors.Join(err, in.Close(), tell.Close())
	}
	cmd := exec.Command("sh", "-c", freezeScript, "freeze", deed, m.Mountpoint, strconv.Itoa(m.ID))
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.Stdin, cmd.Stdout, cmd.ExtraFiles = in, say, []*os.File{lock}
	var said bytes.Buffer
	cmd.Stderr = &said
	err = cmd.Start()
	_, _ = in.Close(), say.Close()
	if err != nil {
		_, _ = tell.Close(), out.Close()
		return err
	}
	f.pid, f.tell, f.lines, f.ended = cmd.Process.Pid, tell, make(chan string, 4), make(chan error, 1)
	go func() { // ends with the process, which the kernel ends with the process's I/O
		for sc := bufio.NewScanner(out); sc.Scan(); {
			select {
			case f.lines <- sc.Text():
			default:
			}
		}
		_ = out.Close()
		if err := cmd.Wait(); err != nil {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
			f.ended <- err
			return
		}
		f.ended <- nil
	}()
	return nil
}

// awaitFrozen waits until the file system is frozen. The freezer first writes out dirty data, while other programs
// still write.
func (f *Frozen) awaitFrozen(ctx context.Context) error {
	for {
		select {
		case line := <-f.lines:
			if line == "frozen" {
				return nil
			}
			if _, err := io.WriteString(f.tell, "go\n"); err != nil {
				return err
			}
		case err := <-f.ended:
			f.ended <- err // for startThaw
			if err == nil {
				err = errors.New("the file system was thawed at once")
			}
			return err
		case <-ctx.Done():
			return api.Errorf(api.Busy, "the freeze takes too long: %w", ctx.Err())
		}
	}
}

// startThaw has the file system thawed and the record removed, however long the thaw takes.
func (f *Frozen) startThaw() {
	_ = f.tell.Close()
	h := f.d.host
	h.thaws.Go(func() {
		defer close(f.done)
		var err error
		select {
		case err = <-f.ended:
		case <-h.closing:
			return // the next process thaws
		}
		var exit *exec.ExitError
		if err == nil || errors.As(err, &exit) && exit.ExitCode() > 0 && exit.ExitCode() != exitNotThaw {
			if err := os.Remove(f.path); err != nil {
				h.log.Error("the record of a freeze stays", "path", f.path, "err", err)
			}
			return
		}
		h.log.Error("a file system is not thawed yet", "device", f.d.Path(), "err", err)
		h.thawUntilDone(f.path)
	})
}

// Thaw lets writers continue. An error says that the thaw takes long; the thaw is done nevertheless.
func (f *Frozen) Thaw() error {
	f.startThaw()
	late := time.NewTimer(thawWait)
	defer late.Stop()
	select {
	case <-f.done:
		return nil
	case <-late.C:
		return api.Errorf(api.Busy, "device %s: the kernel has not thawed the file system after %v; the data process waits",
			f.d.Path(), thawWait)
	}
}

// ThawLeft thaws, in the background, file systems that earlier processes may have left frozen. The caller serves the
// devices first.
func (h *Host) ThawLeft() {
	left, _ := filepath.Glob(filepath.Join(h.runDir, freezePrefix+"*"))
	for _, path := range left {
		h.thaws.Go(func() { h.thawUntilDone(path) })
	}
	half, _ := filepath.Glob(filepath.Join(h.runDir, ".freeze-*"))
	for _, path := range half { // never linked, or a second name of a record above
		_ = os.Remove(path)
	}
}

// thawUntilDone thaws the file system of a record and removes the record, with repeats until done or until the host
// closes.
func (h *Host) thawUntilDone(path string) {
	tick := time.NewTicker(thawEvery)
	defer tick.Stop()
	told, wait := "", thawEvery
	for {
		err := h.thawRecorded(path)
		if err == nil {
			return
		}
		if told != err.Error() {
			told = err.Error()
			h.log.Warn("a file system that may be frozen is not thawed yet", "record", path, "err", err)
		}
		if exitCode(err) > 0 { // fsfreeze failed: not at once again
			wait = min(2*wait, 10*time.Second)
			tick.Reset(wait)
		}
		select {
		case <-h.closing:
			return
		case <-tick.C:
		}
	}
}

// thawRecorded makes one try of thawUntilDone. Once the record's lock is free, no process freezes any more.
func (h *Host) thawRecorded(path string) error {
	lock, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another process works on the freeze: %w", err)
	}
	b, err := io.ReadAll(lock)
	if err != nil {
		return err
	}
	var rec frozenRecord
	if err := json.Unmarshal(b, &rec); err != nil {
		return errors.Join(api.Errorf(api.Corrupt, "the record makes no sense: %w", err), os.Remove(path))
	}
	file := loopFile(rec.Loop)
	if rec.Boot != bootID() || file != h.fileName(rec.Key) && file != oldFileName(rec.Key) {
		return os.Remove(path) // there is no such device any more
	}
	mounts, err := mountsOn(rec.Loop)
	if err != nil {
		return err
	}
	if len(mounts) == 0 {
		ctx, cancel := context.WithTimeout(context.Background(), thawWait)
		defer cancel()
		if err := claimLoop(ctx, rec.Loop, file); err != nil && !errors.Is(err, loophelper.ErrGone) {
			return err // unmounted while frozen: the file system stays frozen until a mount and a thaw
		}
		return os.Remove(path)
	}
	for _, m := range mounts {
		f := &Frozen{}
		if err = f.startFreeze(lock, "thaw", m); err != nil {
			return err
		}
		select {
		case err = <-f.ended:
		case <-h.closing:
			_ = f.tell.Close()
			return nil // the child has the lock, and the next process the record
		}
		_ = f.tell.Close()
		if err == nil || strings.Contains(err.Error(), "Invalid argument") { // not frozen
			h.log.Info("a file system that may have been frozen is thawed", "device", loopPath(rec.Loop), "path", m.Mountpoint,
				"wasFrozen", err == nil)
			return os.Remove(path)
		}
	}
	return err
}

func exitCode(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return -1
}

func bootID() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b))
}

// mountsOn are the mounts of a loop device in this process's view. btrfs has device numbers of its own; the mount's
// source tells.
func mountsOn(n int) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return (m.Major != loophelper.Major || m.Minor != n) && !isLoop(m.Source, n), false
	})
}

func isLoop(source string, n int) bool {
	if strings.HasPrefix(source, linkDir+"/") {
		source, _ = os.Readlink(source)
	}
	return source == loopPath(n)
}
