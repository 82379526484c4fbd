package peer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Backend is a replica on a disk of this node: a member for an engine of this node, and served by a Server to other
// nodes.
type Backend struct {
	*stack.Replica
	// Node is the node of the engine with this member: Adopt records the node.
	Node string
	loop Loop

	mu  sync.Mutex
	cut *stack.Cut // prepared
	let func()     // ends the hold of I/O for a cut
	was string     // the layer of the last prepared cut
	end bool

	seen seen // the open snapshot
}

// NewBackend makes a Backend, which owns a replica that is open on loop.
func NewBackend(r *stack.Replica, loop Loop) *Backend { return &Backend{Replica: r, loop: loop} }

// Info implements Replica.
func (b *Backend) Info() Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.Meta()
	if b.end { // the files are closed
		return Info{Size: m.Size, Epoch: m.Epoch, Joined: m.Joined, Reverted: m.Reverted}
	}
	restarted, err := b.Restarted()
	return Info{Size: m.Size, Epoch: m.Epoch, Joined: m.Joined, Reverted: m.Reverted, Empty: b.Empty(),
		Restarted: restarted || err != nil}
}

// digestSize is how much of a SHA-256 stands for a block when two replicas are compared.
const digestSize = 16

// DigestSize is the size of one block's digest.
const DigestSize = digestSize

var zeroDigest = func() (d [digestSize]byte) {
	sum := sha256.Sum256(make([]byte, block.Size))
	copy(d[:], sum[:])
	return d
}()

// digestPiece is the longest range of one read from a snapshot.
const digestPiece = 1 << 20

// Digests reads [off, off+n) and returns a digest for each block of the range.
func (b *Backend) Digests(ctx context.Context, off, n int64) ([]byte, error) {
	if off < 0 || n <= 0 || (off|n)%block.Size != 0 || n > maxDigests {
		return nil, api.Errorf(api.Invalid, "digests of %d+%d", off, n)
	}
	return b.digestRange(off, n, func(off int64, buf []byte) (bool, error) {
		r := reader{Replica: b.Replica}
		err := b.untilFetched(ctx, func() error {
			return Do(ctx, b.loop, &r, &block.Request{Op: block.OpRead, Off: off, Len: int64(len(buf)), Buf: buf})
		})
		return r.blank, err
	})
}

// fetchTime bounds the wait of a call for blocks that the replica fetches: the engine asks another replica then, and
// takes no slow source for a hanging disk.
const fetchTime = 2 * time.Second

// untilFetched repeats a read while the replica fetches its blocks, up to fetchTime.
func (b *Backend) untilFetched(ctx context.Context, read func() error) error {
	late, tick := time.NewTimer(fetchTime), time.NewTicker(fetchTime/100)
	defer late.Stop()
	defer tick.Stop()
	for {
		err := read()
		if !errors.Is(err, stack.ErrNotFetched) {
			return err
		}
		select {
		case <-tick.C:
		case <-late.C:
			return err
		case <-ctx.Done():
			return err
		}
	}
}

// reader reads a range, except where the map has no data.
type reader struct {
	*stack.Replica
	blank bool
}

func (r *reader) Submit(q *block.Request) {
	if r.blank = r.Nothing(q.Off, q.Len); r.blank {
		q.Done(q)
		return
	}
	r.Replica.Submit(q)
}

// digestRange returns the digests of a range that read reads; read may report a blank range instead of reading.
func (b *Backend) digestRange(off, n int64, read func(off int64, buf []byte) (blank bool, err error)) ([]byte, error) {
	buf, back := b.Scratch()
	defer back() // no read is in progress, also after an error
	out := make([]byte, 0, n/block.Size*digestSize)
	for end := off + n; off < end; off += int64(len(buf)) {
		piece := buf[:min(end-off, int64(len(buf)))]
		blank, err := read(off, piece)
		if err != nil {
			return nil, err
		}
		for i := 0; i < len(piece); i += block.Size {
			blk := piece[i : i+block.Size]
			if blank || isZero(blk) {
				out = append(out, zeroDigest[:]...)
				continue
			}
			sum := sha256.Sum256(blk)
			out = append(out, sum[:digestSize]...)
		}
	}
	return out, nil
}

func isZero(b []byte) bool {
	return b[0] == 0 && bytes.Equal(b[:len(b)-1], b[1:])
}

// Do submits a request on the loop's thread and waits for the answer, also after the end of ctx: the buffer is in use.
func Do(ctx context.Context, loop Loop, to block.Submitter, r *block.Request) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	done := make(chan struct{})
	r.Done = func(*block.Request) { close(done) }
	if !loop.Post(func() { to.Submit(r) }) {
		return api.Errorf(api.Unavailable, "the I/O thread has ended")
	}
	<-done
	return r.Err
}

// limits returns the limits for the arguments of a call.
func (b *Backend) limits() limits { return limits{size: b.Meta().Size, region: b.RegionSize()} }

// Call implements Replica: Member makes these calls.
func (b *Backend) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	m := methods[name]
	if m == nil {
		return nil, api.Errorf(api.Unsupported, "the replica knows no call %.40q", name)
	}
	return m.serve(ctx, b, args)
}

// PrepareCut prepares a cut, unless ctx has ended: the engine then gave the cut up. PrepareCut aborts an earlier
// prepared cut.
func (b *Backend) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := ctx.Err(); err != nil { // the prepared cut is a later one
		return api.Errorf(api.Unavailable, "the engine has given the cut up: %w", err)
	}
	if err := b.endCutLocked(); err != nil {
		return err
	}
	c, err := b.Replica.PrepareCut(ctx, s)
	if err == nil {
		b.cut, b.was = c, s.Layer
	}
	return err
}

// Hold keeps I/O back until Release.
func (b *Backend) Hold(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.let != nil {
		return nil
	}
	let, err := b.Replica.Hold(ctx)
	b.let = let
	return err
}

// Release lets I/O continue.
func (b *Backend) Release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.let != nil {
		b.let()
		b.let = nil
	}
}

// DoCut commits the prepared cut of a layer.
func (b *Backend) DoCut(ctx context.Context, layer string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.cut == nil || b.was != layer {
		for _, l := range b.Meta().Layers {
			if l == layer {
				return nil // an earlier call did it
			}
		}
		return api.Errorf(api.NotFound, "no cut of layer %s is prepared", layer)
	}
	c := b.cut
	b.cut = nil
	return c.Do(ctx)
}

// AbortCut gives a prepared cut up. The error is stack.ErrFailed if the disk may have the cut all the same.
func (b *Backend) AbortCut(context.Context) error { return errors.Join(b.endCut(), b.Failed()) }

func (b *Backend) endCut() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.endCutLocked()
}

// endCutLocked is endCut for a caller with the lock.
func (b *Backend) endCutLocked() error {
	c := b.cut
	b.cut = nil
	if c == nil {
		return nil
	}
	return c.Abort()
}

// Adopt implements engine.Member.
func (b *Backend) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	return b.AdoptFor(ctx, b.Node, epoch, incarnation, members)
}

// AdoptFor implements Replica. A cut of a former session ends with it.
func (b *Backend) AdoptFor(ctx context.Context, node string, epoch, incarnation int64, members []string) error {
	b.Release()
	if err := b.endCut(); err != nil {
		return err
	}
	return b.Replica.AdoptFor(ctx, node, epoch, incarnation, members)
}

// Close ends the session.
func (b *Backend) Close() error {
	b.Release()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end = true
	return errors.Join(b.endCutLocked(), b.seen.close(), b.Replica.Close())
}
