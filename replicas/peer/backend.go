package peer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"sync"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// Backend is a replica on a disk of this node, as an engine of this node has it for a member, and a Server serves it.
type Backend struct {
	*stack.Replica
	loop Loop

	mu  sync.Mutex
	cut *stack.Cut // prepared
	let func()     // lets I/O go on that is held for a cut
	was string     // the layer of the cut that was prepared last
	end bool

	seen seen // the snapshot that is read
}

// NewBackend is for a replica that is open on loop. It owns the replica.
func NewBackend(r *stack.Replica, loop Loop) *Backend { return &Backend{Replica: r, loop: loop} }

// Info implements Replica.
func (b *Backend) Info() Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.Meta()
	if b.end { // its files are closed
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

// digestPiece is the most that is asked of a snapshot at once.
const digestPiece = 1 << 20

// Digests reads [off, off+n) and returns a digest for each block of it.
func (b *Backend) Digests(ctx context.Context, off, n int64) ([]byte, error) {
	if off < 0 || n <= 0 || (off|n)%block.Size != 0 || n > 64<<20 {
		return nil, api.Errorf(api.Invalid, "digests of %d+%d", off, n)
	}
	return b.digests(off, n, func(off int64, buf []byte) (bool, error) {
		r := reader{Replica: b.Replica}
		err := Do(ctx, b.loop, &r, &block.Request{Op: block.OpRead, Off: off, Len: int64(len(buf)), Buf: buf})
		return r.blank, err
	})
}

// reader reads a range unless the map says that nothing is there.
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

// digests are those of what read reads; it need not where it says that all is zero.
func (b *Backend) digests(off, n int64, read func(off int64, buf []byte) (blank bool, err error)) ([]byte, error) {
	buf, back := b.Scratch()
	defer back() // nothing reads into it any more, whatever went wrong
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

// Do submits a request on the loop's thread and waits for it, whatever becomes of ctx: the buffer is in use.
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

// Arguments of calls.
type (
	sizeArgs  struct{ Size int64 }
	onArgs    struct{ On bool }
	cleanArgs struct {
		Token, Epoch int64
		Regions      []int64
	}
	regionsArgs struct{ Regions []int64 }
	rangeArgs   struct{ Off, N int64 }
	uidArgs     struct{ UID string }
	repairArgs  struct {
		Layer string
		Off   int64
		Right []byte // none: nobody has it
	}
)

// Call implements Replica: the calls that Member makes.
func (b *Backend) Call(ctx context.Context, name string, args []byte) ([]byte, error) {
	switch name {
	case "expand":
		a, err := decode[sizeArgs](args)
		if err != nil {
			return nil, err
		}
		return nil, b.Expand(ctx, a.Size)
	case "track":
		a, err := decode[onArgs](args)
		if err != nil {
			return nil, err
		}
		return nil, b.Track(ctx, a.On)
	case "intend":
		a, err := decode[regionsArgs](args)
		if err != nil {
			return nil, err
		}
		return nil, b.Intend(ctx, a.Regions)
	case "mark", "clean":
		a, err := decode[cleanArgs](args)
		if err != nil {
			return nil, err
		}
		if name == "mark" {
			return nil, b.Mark(ctx, a.Token)
		}
		return nil, b.Clean(ctx, a.Token, a.Epoch, a.Regions)
	case "intents":
		t, err := b.Intents(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(t)
	case "digests":
		a, err := decode[rangeArgs](args)
		if err != nil {
			return nil, err
		}
		return b.Digests(ctx, a.Off, a.N)
	case "note":
		return nil, b.Note(args)
	case "meta":
		return json.Marshal(b.Meta())
	case "drop-snapshot":
		a, err := decode[uidArgs](args)
		if err != nil {
			return nil, err
		}
		return nil, b.Forget(ctx, a.UID)
	case "prepare-cut":
		s, err := decode[stack.Snapshot](args)
		if err != nil {
			return nil, err
		}
		return nil, b.PrepareCut(ctx, s)
	case "hold":
		return nil, b.Hold(ctx)
	case "do-cut":
		a, err := decode[uidArgs](args)
		if err != nil {
			return nil, err
		}
		return nil, b.DoCut(ctx, a.UID)
	case "abort-cut":
		return nil, b.AbortCut(ctx)
	case "seal":
		list, err := decode[[]stack.Snapshot](args)
		if err != nil {
			return nil, err
		}
		return nil, b.Seal(ctx, list...)
	case "sizes":
		sizes, err := b.Sizes(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(sizes)
	case "changed":
		a, err := decode[changedArgs](args)
		if err != nil {
			return nil, err
		}
		list, err := b.Changed(ctx, a.From, a.To, a.Base, a.Piece)
		if err != nil {
			return nil, err
		}
		return json.Marshal(runsOf(list, maxRuns))
	case "snap-digests":
		a, err := decode[snapArgs](args)
		if err != nil {
			return nil, err
		}
		return b.SnapDigests(ctx, a.UID, a.Off, a.N)
	case "snap-read":
		a, err := decode[snapArgs](args)
		if err != nil {
			return nil, err
		}
		if a.N <= 0 || a.N > digestPiece {
			return nil, api.Errorf(api.Invalid, "%d bytes to read", a.N)
		}
		buf := make([]byte, a.N)
		return buf, b.SnapRead(ctx, a.UID, a.Off, buf)
	case "snap-end":
		return nil, b.SnapEnd(ctx)
	case "broken":
		list, err := b.Broken(ctx)
		if err != nil {
			return nil, err
		}
		return json.Marshal(list)
	case "repair":
		a, err := decode[repairArgs](args)
		if err != nil {
			return nil, err
		}
		return nil, b.Repair(ctx, a.Layer, a.Off, a.Right)
	case "release":
		b.Release()
		return nil, nil
	}
	return nil, api.Errorf(api.Unsupported, "a replica knows no call %q", name)
}

func decode[T any](b []byte) (T, error) {
	var t T
	if err := json.Unmarshal(b, &t); err != nil {
		return t, api.Errorf(api.Invalid, "arguments of a call: %w", err)
	}
	return t, nil
}

// PrepareCut prepares a cut. One that was prepared before is given up.
func (b *Backend) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.abort(); err != nil {
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

// Release lets I/O go on.
func (b *Backend) Release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.let != nil {
		b.let()
		b.let = nil
	}
}

// DoCut commits the cut that was prepared for a layer.
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

// AbortCut gives a cut up that was prepared. Where the disk may have it all the same, the error is stack.ErrFailed.
func (b *Backend) AbortCut(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return errors.Join(b.abort(), b.Failed())
}

func (b *Backend) abort() error {
	c := b.cut
	b.cut = nil
	if c == nil {
		return nil
	}
	return c.Abort()
}

// Adopt implements Replica. A cut of a former session ends with it.
func (b *Backend) Adopt(ctx context.Context, epoch, incarnation int64, members []string) error {
	b.Release()
	b.mu.Lock()
	err := b.abort()
	b.mu.Unlock()
	if err != nil {
		return err
	}
	return b.Replica.Adopt(ctx, epoch, incarnation, members)
}

// Close ends the session.
func (b *Backend) Close() error {
	b.Release()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end = true
	return errors.Join(b.abort(), b.seen.close(), b.Replica.Close())
}

// Expand implements engine.Member.
func (m *Member) Expand(ctx context.Context, size int64) error {
	_, err := m.Call(ctx, "expand", sizeArgs{size}, true)
	return err
}

// Track is that of stack.Replica. It is said again whenever the replica may have been opened anew.
func (m *Member) Track(ctx context.Context, on bool) error {
	m.mu.Lock()
	m.track = on
	m.mu.Unlock()
	_, err := m.Call(ctx, "track", onArgs{on}, true)
	return err
}

// Intend is that of stack.Replica.
func (m *Member) Intend(ctx context.Context, regions []int64) error {
	_, err := m.Call(ctx, "intend", regionsArgs{regions}, true)
	return err
}

// Mark is that of stack.Replica.
func (m *Member) Mark(ctx context.Context, token int64) error {
	_, err := m.Call(ctx, "mark", cleanArgs{Token: token}, false)
	return err
}

// Clean is that of stack.Replica. It is not repeated: later it could take away too much.
func (m *Member) Clean(ctx context.Context, token, epoch int64, regions []int64) error {
	_, err := m.Call(ctx, "clean", cleanArgs{token, epoch, regions}, false)
	return err
}

// Intents is that of stack.Replica.
func (m *Member) Intents(ctx context.Context) (stack.Intents, error) {
	b, err := m.Call(ctx, "intents", struct{}{}, true)
	if err != nil {
		return stack.Intents{}, err
	}
	return decode[stack.Intents](b)
}

// Digests is that of Backend.
func (m *Member) Digests(ctx context.Context, off, n int64) ([]byte, error) {
	b, err := m.Call(ctx, "digests", rangeArgs{off, n}, true)
	if err == nil && int64(len(b)) != n/block.Size*digestSize {
		err = m.name(api.Errorf(api.Corrupt, "%d bytes of digests for %d bytes", len(b), n))
	}
	return b, err
}

// Note is that of stack.Replica.
func (m *Member) Note(ctx context.Context, object json.RawMessage) error {
	_, err := m.Call(ctx, "note", object, true)
	return err
}

// PrepareCut is that of Backend.
func (m *Member) PrepareCut(ctx context.Context, s stack.Snapshot) error {
	_, err := m.Call(ctx, "prepare-cut", s, false)
	return err
}

// Hold is that of Backend.
func (m *Member) Hold(ctx context.Context) error {
	_, err := m.Call(ctx, "hold", struct{}{}, false)
	return err
}

// DoCut is that of Backend.
func (m *Member) DoCut(ctx context.Context, layer string) error {
	_, err := m.Call(ctx, "do-cut", uidArgs{layer}, true)
	return err
}

// AbortCut is that of Backend.
func (m *Member) AbortCut(ctx context.Context) error {
	_, err := m.Call(ctx, "abort-cut", struct{}{}, false)
	return err
}

// Release is that of Backend.
func (m *Member) Release(ctx context.Context) error {
	_, err := m.Call(ctx, "release", struct{}{}, false)
	return err
}
