package device

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/device/loophelper"
)

// Device is a block device that this process serves.
type Device struct {
	host *Host
	loop *uring.Loop
	conn *conn
	file string // name of the one file

	mu   sync.Mutex // serialises the fields below, not I/O
	spec Spec
	dev  int // loop device; -1: none
	tree int // descriptor of the mount, -1 when closed
	down bool

	leaving *loophelper.Helper // of a Detach, until the helper has ended
}

// fileName carries the key and the host's mark, so that /sys names the owner of a loop device: on one kernel several
// nodes may have a device of the same volume, one of the nodes fenced.
func (h *Host) fileName(key string) string { return "drover-" + key + "." + h.mark }

// oldFileName is the name for devices of earlier versions.
func oldFileName(key string) string { return "drover-" + key }

func newDevice(h *Host, rec record, loop *uring.Loop, be block.Submitter, fuse, tree int) *Device {
	spec := rec.Spec
	d := &Device{host: h, loop: loop, spec: spec, file: rec.fileName(), dev: -1, tree: tree}
	d.conn = &conn{srv: h.serverOf(loop), fd: fuse, be: be, file: d.file, name: spec.Name, readOnly: spec.ReadOnly,
		size: spec.Size, idle: make(chan struct{})}
	return d
}

// startServing begins to serve; on an error nothing was begun.
func (d *Device) startServing(resume bool) error {
	var err error
	if lerr := d.loop.Do(func() { err = d.conn.startServing(resume) }); lerr != nil {
		return lerr
	}
	return err
}

// ensureLoopDevice makes the loop device and the link, or finds those of an earlier process.
func (d *Device) ensureLoopDevice(ctx context.Context, hint int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dev = findLoop(d.file, hint)
	if d.dev < 0 {
		if err := d.setUp(ctx, hint); err != nil {
			return err
		}
	}
	if d.dev != hint {
		if err := d.host.keepRecord(record{d.spec, d.dev, d.file}); err != nil {
			return err
		}
	}
	if size, err := loopSize(d.dev); err == nil && size < d.spec.Size {
		if err := d.setKernelSize(); err != nil {
			return err
		}
		if err := loophelper.Grow(ctx, d.dev, d.file); err != nil {
			return err
		}
	}
	return d.makeLink()
}

// setUp puts a loop device on the file, unless the file has one. A dead predecessor's helper may be doing the same;
// the helper ends once this process answers the kernel's requests.
func (d *Device) setUp(ctx context.Context, hint int) error {
	path := filepath.Join(d.host.runDir, "setup-"+d.spec.Key+".lock")
	lock, err := lockFile(ctx, path)
	if err != nil {
		return fmt.Errorf("lock of the device's set-up: %w", err)
	}
	defer func() {
		_ = os.Remove(path)
		_ = lock.Close()
	}()
	if d.dev = findLoop(d.file, hint); d.dev < 0 {
		// The call waits for the helper beyond ctx: nothing can undo a set-up in progress.
		d.dev, err = loophelper.SetUp(d.tree, int(lock.Fd()), d.file, d.spec.Name, d.spec.ReadOnly)
	}
	return err
}

// lockFile locks a file, and creates a missing file.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(pollStep)
	defer tick.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if errors.Is(err, unix.EWOULDBLOCK) {
			select {
			case <-tick.C:
				continue
			case <-ctx.Done():
				err = api.Errorf(api.Busy, "the helper of an earlier process holds it: %w", ctx.Err())
			}
		}
		_ = f.Close()
		return nil, err
	}
}

func (d *Device) makeLink() error {
	if err := os.MkdirAll(linkDir, 0o755); err != nil {
		return fmt.Errorf("link the device: %w", err)
	}
	path := filepath.Join(linkDir, d.spec.Name)
	for name, to := range readLinks() { // a loop device has one link: other links name earlier devices of the number
		if to == loopPath(d.dev) && name != d.spec.Name {
			_ = os.Remove(filepath.Join(linkDir, name))
		}
	}
	if to, err := os.Readlink(path); err == nil && (to == loopPath(d.dev) || d.isForeignLoop(to)) {
		return nil
	}
	tmp := filepath.Join(linkDir, "."+d.spec.Key)
	_ = os.Remove(tmp)
	if err := os.Symlink(loopPath(d.dev), tmp); err != nil {
		return fmt.Errorf("link the device: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("link the device: %w", err)
	}
	return nil
}

// isForeignLoop reports whether a loop device is another volume's on another host of this machine: the link then stays.
func (d *Device) isForeignLoop(path string) bool {
	key, mark, ok := loopOwner(path)
	return ok && key != d.spec.Key && mark != d.host.mark
}

// loopOwner names the owner of a loop device: the key of the volume and the mark of the host. Not ok: not a Drover
// device.
func loopOwner(path string) (key, mark string, ok bool) {
	n, err := strconv.Atoi(strings.TrimPrefix(path, "/dev/loop"))
	if err != nil {
		return "", "", false
	}
	name, ok := strings.CutPrefix(loopFile(n), "drover-")
	if ok {
		key, mark, ok = strings.Cut(name, ".")
	}
	return key, mark, ok
}

// readLinks returns the names in linkDir, and their targets.
func readLinks() map[string]string {
	all := map[string]string{}
	list, _ := os.ReadDir(linkDir) // linkDir appears with the first device
	for _, e := range list {
		if to, err := os.Readlink(filepath.Join(linkDir, e.Name())); err == nil {
			all[e.Name()] = to
		}
	}
	return all
}

// dropStaleLinks removes links to devices that no longer belong to a volume: a write through such a link would reach
// the present owner of the number.
func dropStaleLinks() {
	for name, to := range readLinks() {
		if _, _, ok := loopOwner(to); !ok {
			_ = os.Remove(filepath.Join(linkDir, name))
		}
	}
}

func (d *Device) removeLink(dev int) {
	path := filepath.Join(linkDir, d.spec.Name)
	if to, err := os.Readlink(path); err == nil && to == loopPath(dev) {
		_ = os.Remove(path)
	}
}

// Path is the device: /dev/loopN.
func (d *Device) Path() string { return loopPath(d.dev) }

// Link is the path under which the device can be found by the volume's name.
func (d *Device) Link() string { return filepath.Join(linkDir, d.spec.Name) }

// Spec is the present form of the device.
func (d *Device) Spec() Spec {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.spec
}

// Resent is the number of requests, left unanswered by earlier processes, that the kernel repeated to this process.
func (d *Device) Resent() (n int64) {
	_ = d.loop.Do(func() { n = d.conn.resent })
	return n
}

func (d *Device) updateSpec(change func(*Spec)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return api.Errorf(api.NotFound, "device %s is detached", d.spec.Name)
	}
	spec := d.spec
	change(&spec)
	if err := spec.validate(); err != nil {
		return err
	}
	if err := d.host.keepRecord(record{spec, d.dev, d.file}); err != nil {
		return fmt.Errorf("device %s: %w", spec.Name, err)
	}
	d.spec = spec
	return nil
}

// Resize grows the device, also while in use. The backend must have grown before.
func (d *Device) Resize(ctx context.Context, size int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var old int64
	err := d.updateSpec(func(s *Spec) { old, s.Size = s.Size, max(s.Size, size) })
	if err == nil && size < old {
		err = api.Errorf(api.OutOfRange, "device %s has %d bytes and cannot shrink to %d", d.spec.Name, old, size)
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	if d.down {
		d.mu.Unlock()
		return api.Errorf(api.NotFound, "device %s is detached", d.spec.Name)
	}
	err = d.setKernelSize()
	d.mu.Unlock()
	if err == nil { // without the lock: Grow may wait for I/O, and Abort must not
		err = loophelper.Grow(ctx, d.dev, d.file)
	}
	if err != nil {
		return fmt.Errorf("resize device %s: %w", d.spec.Name, err)
	}
	return nil
}

// setKernelSize tells the kernel's file system the size; the loop device looks there.
func (d *Device) setKernelSize() error {
	size := d.spec.Size
	if err := d.loop.Do(func() { d.conn.size = size }); err != nil {
		return err
	}
	fd, err := loophelper.OpenFile(d.tree, d.file, false) // for writing, also of a read-only device: the size is ours
	if err != nil {
		return err
	}
	err = unix.Ftruncate(fd, size)
	_ = unix.Close(fd)
	if err != nil {
		return fmt.Errorf("tell the kernel the size %d: %w", size, err)
	}
	return nil
}

// Detach flushes the device and removes the device. A device in use stays unchanged: kind in use. Detach logs a
// failed flush, and removes the device all the same.
func (d *Device) Detach(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return nil
	}
	if err := d.detachLocked(ctx); err != nil {
		return fmt.Errorf("detach device %s: %w", d.spec.Name, err)
	}
	return nil
}

func (d *Device) detachLocked(ctx context.Context) error {
	err := d.letGo(ctx)
	if err == nil {
		err = awaitGone(ctx, d.dev, d.file)
	}
	if err != nil && !errors.Is(err, loophelper.ErrGone) { // else an earlier Detach got so far
		return err
	}
	d.removeLink(d.dev)
	if err := d.host.hold.deleteRecord(d.spec.Key); err != nil {
		return err
	}
	d.closeTree() // the last descriptor of the mount: the kernel ends the connection
	if err := d.awaitClosed(ctx); err != nil {
		return err
	}
	d.down = true
	d.host.forgetDevice(d)
	return nil
}

// letGo flushes the loop device and takes the loop device off the file.
func (d *Device) letGo(ctx context.Context) error {
	if d.leaving != nil { // an earlier Detach was given up, and may hold the device yet
		_ = d.leaving.Wait(ctx)
		flush, _ := d.leaving.Flushed(ctx)
		d.logLastFlush(flush)
	}
	if ctx.Err() != nil {
		return api.Errorf(api.Busy, "the device's last flush is in progress: %w", ctx.Err())
	}
	h, err := loophelper.Clear(d.dev, d.file)
	if err != nil {
		return err
	}
	d.leaving = h
	defer h.GiveUp()
	flush, err := h.Flushed(ctx)
	d.logLastFlush(flush)
	if err == nil {
		err = h.Finish(ctx)
	}
	if err != nil && ctx.Err() != nil {
		return api.Errorf(api.Busy, "the device is not flushed, or not released yet: %w", ctx.Err())
	}
	return inUse(d.dev, err)
}

// logLastFlush logs a failed last flush. An error does not keep the device: each flush would fail again, since only a
// new attach opens the backend again.
func (d *Device) logLastFlush(err error) {
	if err != nil {
		d.host.log.Error("the last flush of a device failed: writes since the flush before may be lost",
			"device", d.spec.Name, "path", loopPath(d.dev), "err", err)
	}
}

func (d *Device) closeTree() {
	if d.tree >= 0 {
		_ = unix.Close(d.tree)
		d.tree = -1
	}
}

// awaitClosed returns when every request is answered and the connection is closed.
func (d *Device) awaitClosed(ctx context.Context) error {
	err := d.loop.Do(d.conn.stopServing)
	if errors.Is(err, uring.ErrClosed) {
		return nil // the loop ended with nothing in progress
	}
	select {
	case <-d.conn.idle:
		return nil
	case <-ctx.Done():
		return api.Errorf(api.Busy, "requests are still in progress: %w", ctx.Err())
	}
}

// leaveToHolder stops serving and leaves the device to the holder.
func (d *Device) leaveToHolder(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return nil
	}
	d.down = true
	d.closeTree()
	return d.awaitClosed(ctx)
}

// Abort fails all I/O of the device, waiting and future, and lets the loop device go with the last user. Abort is for
// a device whose backend is fenced or lost. The backend still owns the requests in progress until it completes them;
// the results are discarded.
func (d *Device) Abort() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return nil
	}
	if err := d.abandonLocked(); err != nil {
		return fmt.Errorf("abort device %s: %w", d.spec.Name, err)
	}
	return nil
}

func (d *Device) abandon() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.abandonLocked()
}

func (d *Device) abandonLocked() error {
	closed := make(chan struct{})
	err := d.loop.Do(func() { d.conn.closeNow(closed) })
	if err == nil {
		<-closed
	}
	err = d.takeDown(d.dev)
	d.closeTree()
	d.down = true
	d.host.forgetDevice(d)
	return err
}

// takeDown removes the holder's descriptors, so that the kernel fails all requests in progress, and then the loop
// device. This process must have closed its own descriptors before.
func (d *Device) takeDown(hint int) error {
	err := d.host.hold.deleteRecord(d.spec.Key)
	if n := findLoop(d.file, hint); n >= 0 {
		d.removeLink(n)
		dropLoop(n, d.file)
	}
	return err
}
