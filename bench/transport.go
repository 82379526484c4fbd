package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// wireJobs run between an engine's side and a replica's side.
var wireJobs = []struct {
	name  string
	op    block.Op
	piece int64
	depth int
}{
	{"write-4k-qd1", block.OpWrite, 4 << 10, 1},
	{"write-4k-qd32", block.OpWrite, 4 << 10, 32},
	{"write-1m", block.OpWrite, 1 << 20, 8},
	{"read-1m", block.OpRead, 1 << 20, 8},
}

// transport measures the cost of TLS between nodes. This process has both ends of the protocol and a replica on the
// disk, over loopback, in turn with TLS and without. The program itself always uses TLS.
func (b *bench) transport(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(b.options.dir, "drover-wire.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	ids, err := identities(dir)
	if err != nil {
		return err
	}
	var ends []*wired
	defer func() {
		for _, w := range ends {
			err = errors.Join(err, w.close())
		}
	}()
	for _, name := range []string{"tls", "plain"} {
		w := &wired{name: name, size: b.sizeMiB << 20}
		ends = append(ends, w)
		with := ids
		if name == "plain" {
			with = nil
		}
		if err := w.openReplica(ctx, filepath.Join(dir, name), with); err != nil {
			return err
		}
		if _, _, err := w.sendRequests(block.OpWrite, 1<<20, 8, 0); err != nil { // reads of holes are too fast
			return err
		}
	}
	for _, j := range wireJobs {
		rate, cpu := map[string][]float64{}, map[string][]float64{}
		for range b.rounds {
			for _, w := range ends {
				before := ownCPU()
				n, took, err := w.sendRequests(j.op, j.piece, j.depth, time.Duration(b.seconds)*time.Second)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", j.name, w.name, err)
				}
				rate[w.name] = append(rate[w.name], float64(n)/took.Seconds())
				cpu[w.name] = append(cpu[w.name], (ownCPU()-before).Seconds()/float64(n)*1e6)
			}
		}
		for _, w := range ends {
			v, plain, unit := median(rate[w.name]), median(rate["plain"]), "iops"
			if j.piece > 4<<10 {
				v, plain, unit = v*float64(j.piece)/1e6, plain*float64(j.piece)/1e6, "MB/s"
			}
			b.addFigure("transport-"+j.name, w.name, v, unit, "plain", plain, "")
			b.addFigure("transport-"+j.name+"-cpu", w.name, median(cpu[w.name]), "us", "plain", median(cpu["plain"]),
				"processor time per I/O, both ends")
			if j.name == "write-1m" && w.name == "tls" {
				b.loopback = v
			}
		}
	}
	return nil
}

// identities creates the certificates of two nodes.
func identities(dir string) (map[string]*wire.Identity, error) {
	both, err := wire.NewAuthority()
	if err != nil {
		return nil, err
	}
	ca, err := wire.LoadAuthority(both)
	if err != nil {
		return nil, err
	}
	ids := map[string]*wire.Identity{}
	for _, node := range []string{"near", "far"} {
		own := filepath.Join(dir, "id-"+node)
		if err := os.MkdirAll(own, 0o700); err != nil {
			return nil, err
		}
		id, err := wire.OpenIdentity(own, node)
		if err != nil {
			return nil, err
		}
		request, err := id.Request()
		if err != nil {
			return nil, err
		}
		cert, _, err := ca.Sign(request, node, wire.CertificateLife)
		if err != nil {
			return nil, err
		}
		if err := id.Put(cert, ca.PEM()); err != nil {
			return nil, err
		}
		ids[node] = id
	}
	return ids, nil
}

// wired is a replica and both ends of a connection to the replica.
type wired struct {
	name   string
	size   int64
	near   *uring.Loop
	member *peer.Member
	ends   []func() error // in the order of creation
}

func (w *wired) loop() (*uring.Loop, error) {
	l, err := uring.New(128)
	if err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- l.Run() }()
	w.ends = append(w.ends, func() error {
		l.Close()
		return <-done
	})
	return l, nil
}

func (w *wired) close() (err error) {
	for i := len(w.ends) - 1; i >= 0; i-- {
		err = errors.Join(err, w.ends[i]())
	}
	return err
}

// openReplica creates the replica and connects to the replica, without identities by plain TCP.
func (w *wired) openReplica(ctx context.Context, dir string, ids map[string]*wire.Identity) error {
	disk, err := stack.Add(ctx, dir)
	if err != nil {
		return err
	}
	w.ends = append(w.ends, disk.Close)
	far, err := w.loop()
	if err != nil {
		return err
	}
	if w.near, err = w.loop(); err != nil {
		return err
	}
	spec := stack.Spec{UID: string(api.NewUID()), Volume: "wire", VolumeUID: string(api.NewUID()), Size: w.size}
	if err := disk.CreateReplica(ctx, spec); err != nil {
		return err
	}
	o := peer.ServerOptions{Node: "far", Log: slog.New(slog.DiscardHandler),
		Open: func(ctx context.Context, uid, _ string) (peer.Replica, peer.Loop, error) {
			r, err := disk.OpenReplica(ctx, uid, far)
			if err != nil {
				return nil, nil, err
			}
			return peer.NewBackend(r, far), far, nil
		}}
	d := &peer.Dialer{Node: "near"}
	if ids != nil {
		o.TLS, o.NodeOf = ids["far"].Server(peer.Protocol), wire.NodeOf
		o.Allow = func(context.Context, string, string, string, int64) error { return nil }
		d.TLS = func(node string) (*tls.Config, error) { return ids["near"].Client(node, peer.Protocol) }
	}
	server, err := peer.NewServer(o)
	if err != nil {
		return err
	}
	ln, err := wire.Listen("127.0.0.1:0")
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	w.ends = append(w.ends, func() error {
		err := ln.Close()
		server.Close()
		if serr := <-served; !errors.Is(serr, net.ErrClosed) {
			err = errors.Join(err, serr)
		}
		return err
	})
	d.Address = func(context.Context, string) (string, error) { return ln.Addr().String(), nil }
	w.ends = append(w.ends, func() error { d.Close(); return nil })
	w.member = d.Member(peer.Options{Node: "far", Replica: spec.UID, Volume: spec.VolumeUID, Loop: w.near})
	w.ends = append(w.ends, w.member.Close)
	return w.member.Adopt(ctx, 1, 1, []string{spec.UID})
}

// sendRequests keeps requests in progress for a time, and returns their count; without a time sendRequests sends a
// request for each piece of the volume. Large pieces are sequential, small pieces random.
func (w *wired) sendRequests(op block.Op, piece int64, depth int, d time.Duration) (n int64, took time.Duration,
	err error) {
	mem, err := unix.Mmap(-1, 0, depth*int(piece), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = unix.Munmap(mem) }()
	for i := range mem {
		mem[i] = byte(i/7) | 1
	}
	done, began := make(chan struct{}), time.Now()
	begun, left := int64(0), depth // like n and err the loop's until done is closed
	var next func(slot int)
	next = func(slot int) {
		if err != nil || d > 0 && time.Since(began) > d || d == 0 && begun == w.size/piece {
			if left--; left == 0 {
				close(done)
			}
			return
		}
		at := begun % (w.size / piece)
		if piece < 1<<20 {
			at = rand.Int64N(w.size/piece/int64(depth))*int64(depth) + int64(slot) // each slot has its own blocks
		}
		begun++
		w.member.Submit(&block.Request{Op: op, Off: at * piece, Len: piece, Buf: mem[int64(slot)*piece:][:piece],
			Done: func(r *block.Request) {
				if r.Err != nil && err == nil {
					err = r.Err
				}
				n++
				next(slot)
			}})
	}
	if !w.near.Post(func() {
		for slot := range depth {
			next(slot)
		}
	}) {
		return 0, 0, errors.New("the I/O thread has ended")
	}
	<-done
	return n, time.Since(began), err
}

// ownCPU returns the CPU time of this process.
func ownCPU() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
