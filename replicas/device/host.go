package device

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

// linkDir holds a link per device, named like the volume.
const linkDir = "/dev/drover"

// Spec describes a device to make.
type Spec struct {
	Key      string // names the device for ever: the volume's UID
	Name     string // the volume's name: /dev/drover/<name>
	Size     int64
	ReadOnly bool
	Blob     []byte // for the process that resumes the device, up to 32 KiB
}

// record is the holder's form of a Spec.
type record struct {
	Spec
	Loop int    `json:"loop"` // loopUnknown: not set up yet
	File string `json:"file,omitempty"`
}

func (r record) fileName() string {
	if r.File == "" {
		return oldFileName(r.Key)
	}
	return r.File
}

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$`)

func (s Spec) validate() error {
	switch {
	case !keyPattern.MatchString(s.Key):
		return api.Errorf(api.Invalid, "%q cannot be a device's key", s.Key)
	case !keyPattern.MatchString(s.Name):
		return api.Errorf(api.Invalid, "%q cannot be a device's name", s.Name)
	case s.Size <= 0 || s.Size%512 != 0:
		return api.Errorf(api.OutOfRange, "device %s: size %d is no multiple of 512", s.Name, s.Size)
	case len(s.Blob) > 32<<10:
		return api.Errorf(api.OutOfRange, "device %s: its record has %d bytes, more than 32 KiB", s.Name, len(s.Blob))
	}
	return nil
}

// Host owns the devices of a process. One process at a time has the Host.
type Host struct {
	hold        *client
	lock        *os.File
	incarnation int64
	log         *slog.Logger
	mark        string // in the names of this host's devices
	runDir      string
	closing     chan struct{}
	closed      sync.Once
	thaws       sync.WaitGroup // thaws of file systems, until closing

	mu      sync.Mutex // over the fields below, for moments only
	devices map[string]*Device
	waiting map[string]Spec // held from a predecessor, not resumed yet
	taken   map[string]bool // being attached or resumed
	servers map[*uring.Loop]*server

	keeping sync.Mutex        // over the data for the holder, and over said; before mu
	said    map[string][]byte // by SetBlob, of devices that are held and not resumed yet: newer than any Spec
}

// Open connects to the holder at <runDir>/hold.sock and takes <runDir>/data.lock. Open waits until the lock's
// previous owner is really gone, with all threads, or until ctx ends.
func Open(ctx context.Context, runDir string) (*Host, error) {
	lock, err := takeLock(ctx, filepath.Join(runDir, "data.lock"))
	if err != nil {
		return nil, err
	}
	h := &Host{lock: lock, runDir: runDir, closing: make(chan struct{}), log: slog.Default(),
		devices: map[string]*Device{}, waiting: map[string]Spec{}, taken: map[string]bool{},
		servers: map[*uring.Loop]*server{}, said: map[string][]byte{}}
	if h.mark, err = openMark(filepath.Join(runDir, "mark")); err != nil {
		_ = lock.Close()
		return nil, err
	}
	if err := h.connectHolder(ctx, filepath.Join(runDir, "hold.sock")); err != nil {
		if h.hold != nil {
			_ = h.hold.close()
		}
		_ = lock.Close()
		return nil, err
	}
	dropStaleLinks()
	// The last process to be killed when memory is short: other processes wait for the data process's I/O to free
	// memory.
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0); err != nil {
		h.log.Info("oom_score_adj stays as it is", "err", err)
	}
	return h, nil
}

// openMark reads or makes the mark that tells this host's devices from other hosts' devices. The caller has the lock.
func openMark(path string) (string, error) {
	b, err := os.ReadFile(path)
	if mark := strings.TrimSpace(string(b)); err == nil && len(mark) == 8 {
		return mark, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("mark of this host: %w", err)
	}
	raw := make([]byte, 4)
	_, _ = rand.Read(raw) // never fails
	mark := hex.EncodeToString(raw)
	if err := os.WriteFile(path, []byte(mark+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("mark of this host: %w", err)
	}
	return mark, nil
}

func (h *Host) connectHolder(ctx context.Context, socket string) (err error) {
	if h.hold, err = dialHolder(ctx, socket); err != nil {
		return err
	}
	if h.incarnation, err = h.hold.beginIncarnation(); err != nil {
		return err
	}
	keys, err := h.hold.listKeys()
	if err != nil {
		return err
	}
	for _, k := range keys {
		rec, fds, err := h.fetchRecord(k)
		closeFds(fds)
		if err != nil {
			return err
		}
		h.waiting[k] = rec.Spec
	}
	return h.hold.watchHolder(h.log)
}

func (h *Host) fetchRecord(key string) (rec record, fds []int, err error) {
	blob, fds, err := h.hold.getRecord(key)
	if err != nil {
		return record{}, nil, err
	}
	if err := json.Unmarshal(blob, &rec); err != nil || rec.Key != key {
		closeFds(fds)
		return record{}, nil, api.Errorf(api.Corrupt, "the record of device %s makes no sense: %v", key, err)
	}
	return rec, fds, nil
}

// takeLock waits for the lock's owner to end. The kernel drops the lock with the last descriptor; the pidfd then
// tells when every thread of the owner is gone too.
func takeLock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the data process: %w", err)
	}
	for {
		old := lockOwner(f)
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && old != os.Getpid() {
			err = awaitExit(ctx, old, true)
		} else if errors.Is(err, unix.EWOULDBLOCK) {
			if err = awaitExit(ctx, old, false); err == nil {
				continue
			}
		}
		if err == nil {
			_ = f.Truncate(0)
			_, err = f.WriteAt([]byte(ownerLine(os.Getpid())), 0)
		}
		if err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("lock of the data process: %w", err)
		}
		return f, nil
	}
}

// ownerLine is a process's id and start time, so that a reused id is not taken for the old process.
func ownerLine(pid int) string { return fmt.Sprintf("%d %s\n", pid, startTime(pid)) }

func startTime(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 20 {
		return ""
	}
	return f[19]
}

// lockOwner is the process that last had the lock; 0: gone or unknown.
func lockOwner(f *os.File) int {
	b := make([]byte, 64)
	n, _ := f.ReadAt(b, 0)
	pid, start, ok := strings.Cut(strings.TrimSpace(string(b[:n])), " ")
	id, err := strconv.Atoi(pid)
	if !ok || err != nil || id <= 0 || startTime(id) != start {
		return 0
	}
	return id
}

// awaitExit waits for the process to end: wholly if the process has dropped the lock already, else for a moment at
// most, since the lock may change hands without.
func awaitExit(ctx context.Context, pid int, all bool) error {
	fd := -1
	if pid > 0 {
		var err error
		if fd, err = unix.PidfdOpen(pid, 0); err == nil {
			defer func() { _ = unix.Close(fd) }()
		}
	}
	if fd < 0 && all {
		return ctx.Err()
	}
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} // a negative descriptor only waits
	for {
		n, err := unix.Poll(fds, 20)
		if err != nil && err != unix.EINTR {
			return err
		}
		if ctx.Err() != nil {
			return api.Errorf(api.Busy, "process %d still serves the devices: %w", pid, ctx.Err())
		}
		if n > 0 || !all {
			return nil
		}
	}
}

// Incarnation is this process's number: higher than the number of every earlier process under the same holder.
func (h *Host) Incarnation() int64 { return h.incarnation }

// Held lists the devices that a dead predecessor left and that are not resumed yet.
func (h *Host) Held() []Spec {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]Spec, 0, len(h.waiting))
	for _, s := range h.waiting {
		out = append(out, s)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Key < out[j].Key })
	return out
}

// Devices lists the devices that this process serves.
func (h *Host) Devices() []*Device {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := make([]*Device, 0, len(h.devices))
	for _, d := range h.devices {
		out = append(out, d)
	}
	sort.Slice(out, func(i, j int) bool { return out[i].spec.Key < out[j].spec.Key })
	return out
}

// reserveKey keeps other calls from working on key.
func (h *Host) reserveKey(key string, resume bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, waits := h.waiting[key]
	switch {
	case h.taken[key]:
		return api.Errorf(api.Busy, "device %s is being attached", key)
	case h.devices[key] != nil:
		return api.Errorf(api.Exists, "device %s is attached", key)
	case waits && !resume:
		return api.Errorf(api.Exists, "device %s is held from an earlier process: resume it", key)
	case !waits && resume:
		return api.Errorf(api.NotFound, "no device %s is held", key)
	}
	h.taken[key] = true
	return nil
}

// releaseKey ends a reservation; d is the device now served, if any, and gone says that the holder no longer has the
// device.
func (h *Host) releaseKey(key string, d *Device, gone bool) {
	h.keeping.Lock()
	defer h.keeping.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	if blob, is := h.said[key]; is && d != nil {
		d.spec.Blob = blob // no other goroutine knows the device yet
	}
	if d != nil || gone {
		delete(h.said, key)
	}
	delete(h.taken, key)
	if d != nil {
		h.devices[key] = d
	}
	if d != nil || gone {
		delete(h.waiting, key)
	}
}

// serverOf returns the server of a loop, and makes a missing one.
func (h *Host) serverOf(loop *uring.Loop) *server {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.servers[loop]
	if s == nil {
		s = newServer(loop, h.log)
		h.servers[loop] = s
		loop.Post(func() {
			// Allocating memory must not wait for I/O that this thread would have to do.
			if err := unix.Prctl(unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0); err != nil {
				h.log.Info("the I/O thread is no I/O flusher", "err", err)
			}
		})
	}
	return s
}

// Attach makes a device for be, which is then called on loop's thread. loop must be running.
func (h *Host) Attach(ctx context.Context, spec Spec, loop *uring.Loop, be block.Submitter) (*Device, error) {
	if err := spec.validate(); err != nil {
		return nil, err
	}
	if err := h.reserveKey(spec.Key, false); err != nil {
		return nil, err
	}
	d, err := h.attachDevice(ctx, spec, loop, be)
	h.releaseKey(spec.Key, d, false)
	if err != nil {
		return nil, fmt.Errorf("attach device %s: %w", spec.Name, err)
	}
	return d, nil
}

func (h *Host) attachDevice(ctx context.Context, spec Spec, loop *uring.Loop, be block.Submitter) (*Device, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	fuse, tree, _, err := mountFuse()
	if err != nil {
		return nil, err
	}
	rec := record{spec, loopUnknown, h.fileName(spec.Key)}
	d := newDevice(h, rec, loop, be, fuse, tree)
	if err := h.keepRecord(rec, fuse, tree); err != nil {
		closeFds([]int{fuse, tree})
		return nil, errors.Join(err, h.hold.deleteRecord(spec.Key)) // the holder may have the descriptors
	}
	if err := d.startServing(false); err != nil {
		closeFds([]int{fuse, tree})
		return nil, errors.Join(err, h.hold.deleteRecord(spec.Key))
	}
	if err := d.ensureLoopDevice(ctx, loopFresh); err != nil {
		return nil, errors.Join(err, d.abandon())
	}
	return d, nil
}

// Resume serves a held device again: this process now does the requests that a predecessor left unanswered. spec.Size
// may be larger than before. If the kernel cannot repeat requests, Resume takes the device down and returns an error
// of kind unsupported.
func (h *Host) Resume(ctx context.Context, spec Spec, loop *uring.Loop, be block.Submitter) (*Device, error) {
	if err := spec.validate(); err != nil {
		return nil, err
	}
	if err := h.reserveKey(spec.Key, true); err != nil {
		return nil, err
	}
	d, gone, err := h.resumeDevice(ctx, spec, loop, be)
	h.releaseKey(spec.Key, d, gone)
	if err != nil {
		return nil, fmt.Errorf("resume device %s: %w", spec.Name, err)
	}
	return d, nil
}

func (h *Host) resumeDevice(ctx context.Context, spec Spec, loop *uring.Loop, be block.Submitter) (
	_ *Device, gone bool, _ error) {
	if err := ctx.Err(); err != nil {
		return nil, false, err
	}
	rec, fds, err := h.fetchRecord(spec.Key)
	if err != nil {
		return nil, false, err
	}
	if len(fds) != 2 {
		closeFds(fds)
		return nil, false, api.Errorf(api.Corrupt, "the holder keeps %d descriptors, not 2", len(fds))
	}
	if spec.Size < rec.Size {
		closeFds(fds)
		return nil, false, api.Errorf(api.OutOfRange, "the device has %d bytes and cannot shrink to %d", rec.Size, spec.Size)
	}
	d := newDevice(h, record{spec, rec.Loop, rec.File}, loop, be, fds[0], fds[1])
	if err := ResendSupported(); err != nil {
		closeFds(fds)
		return nil, true, errors.Join(err, d.takeDown(rec.Loop))
	}
	blob, err := json.Marshal(rec)
	if err == nil {
		err = h.hold.rememberRecord(spec.Key, blob, fds...)
	}
	if err == nil {
		err = d.startServing(true)
	}
	if err != nil {
		h.hold.closeCopies(spec.Key)
		closeFds(fds)
		return nil, false, err
	}
	if err := d.ensureLoopDevice(ctx, rec.Loop); err != nil {
		h.hold.closeCopies(spec.Key)
		return nil, false, errors.Join(err, d.leaveToHolder(ctx)) // stays held: the next Resume tries again
	}
	return d, false, nil
}

func (h *Host) keepRecord(rec record, fds ...int) error {
	h.keeping.Lock()
	defer h.keeping.Unlock()
	if said, is := h.said[rec.Key]; is {
		rec.Blob = said
	}
	blob, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	return h.hold.putRecord(rec.Key, blob, fds...)
}

// SetBlob replaces the blob for a later process, also of a device that is held and not resumed yet.
func (h *Host) SetBlob(key string, blob []byte) error {
	if is, err := h.setHeld(key, blob); is {
		return err
	}
	h.mu.Lock()
	d := h.devices[key]
	h.mu.Unlock()
	if d == nil {
		return api.Errorf(api.NotFound, "no device %s is attached", key)
	}
	return d.updateSpec(func(s *Spec) { s.Blob = blob })
}

// setHeld is SetBlob for a device that waits to be resumed, and reports whether the device is waiting.
func (h *Host) setHeld(key string, blob []byte) (is bool, err error) {
	h.keeping.Lock()
	defer h.keeping.Unlock()
	h.mu.Lock()
	spec, is := h.waiting[key]
	h.mu.Unlock()
	if !is {
		return false, nil
	}
	spec.Blob = blob
	if err := spec.validate(); err != nil {
		return true, err
	}
	rec, fds, err := h.fetchRecord(key)
	closeFds(fds)
	if err != nil {
		return true, err
	}
	rec.Blob = blob
	raw, err := json.Marshal(rec)
	if err == nil {
		err = h.hold.putRecord(key, raw)
	}
	if err != nil {
		return true, fmt.Errorf("device %s: %w", spec.Name, err)
	}
	h.said[key] = blob
	h.mu.Lock()
	h.waiting[key] = spec
	h.mu.Unlock()
	return true, nil
}

// Discard takes down a held device without serving the device, and fails all I/O. For devices that no process can
// serve any more.
func (h *Host) Discard(key string) error {
	if err := h.reserveKey(key, true); err != nil {
		return err
	}
	rec, fds, err := h.fetchRecord(key)
	closeFds(fds)
	if err == nil {
		d := &Device{host: h, spec: rec.Spec, file: rec.fileName()}
		err = d.takeDown(rec.Loop)
	}
	h.releaseKey(key, nil, err == nil)
	return err
}

// Close stops serving and leaves the devices to the next process; their I/O waits. The loops must still run. If a
// backend does not complete its requests, this process keeps the lock until its exit, so that no other process serves
// the same requests at the same time.
func (h *Host) Close() error {
	h.closed.Do(func() { close(h.closing) })
	h.thaws.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var errs []error
	for _, d := range h.Devices() {
		if err := d.leaveToHolder(ctx); err != nil {
			errs = append(errs, fmt.Errorf("device %s: %w", d.spec.Name, err))
		}
		h.forgetDevice(d)
	}
	h.mu.Lock()
	for _, s := range h.servers {
		s.aside.Wait()
	}
	h.mu.Unlock()
	errs = append(errs, h.hold.close())
	if ctx.Err() == nil {
		errs = append(errs, h.lock.Close())
	}
	return errors.Join(errs...)
}

func (h *Host) forgetDevice(d *Device) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.devices, d.spec.Key)
}
