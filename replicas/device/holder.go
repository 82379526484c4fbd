package device

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// The holder's protocol: seqpackets with one JSON ask or answer each; descriptors travel beside the JSON.
const (
	askHello  = "hello"  // a new incarnation begins
	askPut    = "put"    // keep fds and blob under key; without fds only the blob is replaced
	askGet    = "get"    // blob and fds of key
	askList   = "list"   // keys
	askDelete = "delete" // forget key; unknown keys are no error

	maxPacket = 96 << 10
	maxBlob   = 48 << 10
	maxFds    = 4
)

type ask struct {
	Op    string `json:"op"`
	Key   string `json:"key,omitempty"`
	Blob  []byte `json:"blob,omitempty"`
	After string `json:"after,omitempty"` // list: keys greater than this
	Least int64  `json:"least,omitempty"` // hello: a number that an earlier holder gave
}

type answer struct {
	Err         string   `json:"err,omitempty"`
	Kind        api.Kind `json:"kind,omitempty"`
	Incarnation int64    `json:"incarnation,omitempty"`
	Keys        []string `json:"keys,omitempty"`
	More        bool     `json:"more,omitempty"`
	Blob        []byte   `json:"blob,omitempty"`
}

// held is the holder's data under a key.
type held struct {
	fds  []int
	blob []byte
}

// holder keeps descriptors. The holder does not know their meaning, and so never has to change.
type holder struct {
	mu          sync.Mutex
	incarnation int64
	kept        map[string]held
	conns       map[*net.UnixConn]bool
}

// RunHolder is the whole job of the holder's process: on a socket that only root may use the holder keeps
// descriptors, with a blob beside them, until a client deletes the key, no matter which clients come and go.
// RunHolder returns when ctx ends, and closes all descriptors: the devices fail. A second holder on the same socket
// is refused with kind exists.
func RunHolder(ctx context.Context, socket string) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	lock, err := os.OpenFile(socket+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return api.Errorf(api.Exists, "holder: another holder serves %s", socket)
	}
	_ = os.Remove(socket) // of a dead holder: the lock is ours
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		return fmt.Errorf("holder: %w", err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		_ = l.Close()
		return fmt.Errorf("holder: %w", err)
	}
	// Starts above every number of earlier holders, as far as the clock can tell.
	h := &holder{incarnation: time.Now().UnixMilli() << 10, kept: map[string]held{}, conns: map[*net.UnixConn]bool{}}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var wg sync.WaitGroup
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			_ = l.Close()
			h.closeAll(&wg)
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("holder: accept: %w", err)
		}
		if err := onlyRoot(c); err != nil {
			_ = c.Close()
			continue
		}
		h.mu.Lock()
		h.conns[c] = true
		h.mu.Unlock()
		wg.Add(1)
		go func() {
			defer wg.Done()
			h.serveClient(c)
		}()
	}
}

func (h *holder) closeAll(wg *sync.WaitGroup) {
	h.mu.Lock()
	for c := range h.conns {
		_ = c.Close()
	}
	h.mu.Unlock()
	wg.Wait()
	for _, k := range h.kept {
		closeFds(k.fds)
	}
}

func onlyRoot(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	err = raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, cerr); err != nil {
		return err
	}
	if cred.Uid != 0 {
		return api.Errorf(api.Denied, "uid %d is not root", cred.Uid)
	}
	return nil
}

func (h *holder) serveClient(c *net.UnixConn) {
	defer func() {
		h.mu.Lock()
		delete(h.conns, c)
		h.mu.Unlock()
		_ = c.Close()
	}()
	buf := make([]byte, 4096) // grown by receiveMessage for the rare large packet
	for {
		var a ask
		fds, err := receiveMessage(c, &buf, &a)
		if err != nil {
			closeFds(fds)
			return
		}
		out, send := h.handleAsk(a, fds)
		err = sendMessage(c, out, send)
		closeFds(send)
		if err != nil {
			return
		}
	}
}

// handleAsk carries out a. handleAsk owns fds; the caller closes the returned descriptors: copies, because another
// client may delete the key before the answer is sent, and the kernel may give their numbers away.
func (h *holder) handleAsk(a ask, fds []int) (answer, []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if a.Op != askPut {
		closeFds(fds)
	}
	switch a.Op {
	case askHello:
		h.incarnation = max(h.incarnation, a.Least) + 1
		return answer{Incarnation: h.incarnation}, nil
	case askPut:
		k, ok := h.kept[a.Key]
		if len(fds) == 0 && !ok {
			return refuseAsk(api.NotFound, "the holder keeps nothing under %q", a.Key), nil
		}
		if len(fds) > 0 {
			closeFds(k.fds)
			k.fds = fds
		}
		k.blob = a.Blob
		h.kept[a.Key] = k
		return answer{}, nil
	case askGet:
		k, ok := h.kept[a.Key]
		if !ok {
			return refuseAsk(api.NotFound, "the holder keeps nothing under %q", a.Key), nil
		}
		fds, err := duplicateFds(k.fds)
		if err != nil {
			return refuseAsk(api.Unavailable, "descriptors kept under %q: %v", a.Key, err), nil
		}
		return answer{Blob: k.blob}, fds
	case askList:
		return h.listKeys(a.After), nil
	case askDelete:
		closeFds(h.kept[a.Key].fds)
		delete(h.kept, a.Key)
		return answer{}, nil
	}
	return refuseAsk(api.Invalid, "the holder does not know %q", a.Op), nil
}

// listKeys is a page of keys.
func (h *holder) listKeys(after string) answer {
	var out answer
	for k := range h.kept {
		if k > after {
			out.Keys = append(out.Keys, k)
		}
	}
	sort.Strings(out.Keys)
	if len(out.Keys) > 200 {
		out.Keys, out.More = out.Keys[:200], true
	}
	return out
}

func refuseAsk(k api.Kind, format string, args ...any) answer {
	return answer{Err: fmt.Sprintf(format, args...), Kind: k}
}

func closeFds(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// duplicateFds returns copies of descriptors, for the caller to close.
func duplicateFds(fds []int) (out []int, err error) {
	for _, fd := range fds {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			closeFds(out)
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

func sendMessage(c *net.UnixConn, v any, fds []int) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(b) > maxPacket {
		return api.Errorf(api.OutOfRange, "a message of %d bytes to or from the holder; at most %d", len(b), maxPacket)
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(b, oob, nil)
	return err
}

// receiveMessage reads one packet into v; buf grows as packets need.
func receiveMessage(c *net.UnixConn, buf *[]byte, v any) (fds []int, err error) {
	n, err := packetSize(c)
	if err != nil {
		return nil, err
	}
	if n > len(*buf) {
		*buf = make([]byte, n)
	}
	oob := make([]byte, unix.CmsgSpace(4*maxFds))
	n, on, flags, _, err := c.ReadMsgUnix(*buf, oob)
	if err != nil {
		return nil, err
	}
	if msgs, err := unix.ParseSocketControlMessage(oob[:on]); err == nil {
		for i := range msgs {
			if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				fds = append(fds, got...)
			}
		}
	}
	if n == 0 {
		return fds, net.ErrClosed
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return fds, api.Errorf(api.Invalid, "a message to or from the holder was cut")
	}
	return fds, json.Unmarshal((*buf)[:n], v)
}

// packetSize waits for a packet and returns the size without taking the packet.
func packetSize(c *net.UnixConn) (n int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		n, _, rerr = unix.Recvfrom(int(fd), nil, unix.MSG_PEEK|unix.MSG_TRUNC|unix.MSG_DONTWAIT)
		return rerr != unix.EAGAIN
	})
	if err == nil {
		err = rerr
	}
	return n, err
}
