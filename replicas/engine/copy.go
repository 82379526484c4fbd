package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// copier compares regions by digests and copies the blocks that differ. While the guest is idle, the copier works at
// several pieces at once and reads from all serving members; under guest I/O the copier works at one piece, and pauses
// for as long as the piece took.
type copier struct {
	e      *Engine
	to     []Mirror // destinations; the source is any present member
	equal  []Mirror // or members to resync: the first readable one is the source
	join   *join    // the guest writes in parallel; nil: the guest does not
	snap   string   // the snapshot to copy; empty: the source's present content
	polite bool     // the guest is to go first, although nothing is locked
	o      JoinOptions

	mu    sync.Mutex // guards the fields below
	p     Progress
	told  time.Time
	began time.Time
	did   int64           // bytes since then
	read  map[Mirror]bool // members whose snapshot was read
	delay map[Mirror]*delay
	local Mirror        // the member on this machine, if readable
	bare  atomic.Bool   // the last piece was blank at the destination: the next may be
	alone chan struct{} // its owner works beside the guest
}

const (
	comparePiece = 1 << 20
	politePiece  = 256 << 10 // copied at a time beside guest I/O, which waits meanwhile
	copyWorkers  = 8
	localSoon    = 25 * time.Millisecond // the longest time for a piece to be read on this machine alone
)

// span of bytes.
type span struct{ off, n int64 }

// copyRegions makes some regions equal.
func (c *copier) copyRegions(ctx context.Context, regions []int64, region, size int64) (Progress, error) {
	c.began, c.alone, c.read, c.delay = time.Now(), make(chan struct{}, 1), map[Mirror]bool{}, map[Mirror]*delay{}
	for _, g := range regions {
		c.p.Total += max(0, min(size, (g+1)*region)-g*region)
	}
	work, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	pieces := make(chan span)
	var all sync.WaitGroup
	for range copyWorkers {
		all.Go(func() {
			buf := block.AlignedBuffer(comparePiece)
			for p := range pieces {
				if err := c.copyInTurn(work, p, &buf); err != nil {
					fail(err)
					return
				}
			}
		})
	}
feed:
	for _, g := range regions {
		for off := g * region; off < min(size, (g+1)*region); off += comparePiece {
			select {
			case pieces <- span{off, min(comparePiece, min(size, (g+1)*region)-off)}:
			case <-work.Done():
				break feed
			}
		}
	}
	close(pieces)
	all.Wait()
	for m := range c.read {
		if err := endSnapshot(ctx, m.(Cutter)); err != nil && work.Err() == nil {
			fail(err)
		}
	}
	return c.p, context.Cause(work)
}

// snapEndTime bounds how long endSnapshot waits for a member.
const snapEndTime = 3 * time.Second

// endSnapshot closes the snapshot that a member has open for the engine, also after the end of ctx: until then the
// member merges no layer of the snapshot.
func endSnapshot(ctx context.Context, m Cutter) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), snapEndTime)
	defer cancel()
	return m.SnapEnd(ctx)
}

// copyInTurn copies one piece in its turn.
func (c *copier) copyInTurn(ctx context.Context, p span, buf *[]byte) error {
	at := int64(comparePiece)
	if c.join != nil || c.polite {
		guest, err := c.hasGuestIO(ctx)
		if err != nil {
			return err
		}
		if guest {
			at = politePiece
			select {
			case c.alone <- struct{}{}:
				defer func() { <-c.alone }()
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
	began := time.Now()
	if err := c.copyPiece(ctx, p, at, buf); err != nil {
		return err
	}
	c.mu.Lock()
	c.p.Done += p.n
	c.did += p.n
	c.mu.Unlock()
	return c.yieldToGuest(ctx, time.Since(began))
}

func (c *copier) hasGuestIO(ctx context.Context) (is bool, err error) {
	err = c.e.runOnLoop(ctx, func() { is = c.e.inflight > c.e.ranges.locks })
	return is, err
}

// yieldToGuest lets the guest go first, keeps to the rate, and reports the progress.
func (c *copier) yieldToGuest(ctx context.Context, took time.Duration) error {
	c.mu.Lock()
	if c.o.OnProgress != nil && time.Since(c.told) > time.Second {
		c.told = time.Now()
		c.o.OnProgress(c.p)
	}
	did := c.did
	c.mu.Unlock()
	var wait time.Duration
	if c.join != nil || c.polite {
		guest, err := c.hasGuestIO(ctx)
		if err != nil {
			return err
		}
		if guest {
			wait = took // half of the time is the guest's
		}
	}
	if r := c.o.BytesPerSecond; r > 0 {
		wait = max(wait, time.Duration(float64(did)/float64(r)*float64(time.Second))-time.Since(c.began))
	}
	if wait <= 0 {
		return ctx.Err()
	}
	return pause(ctx, wait)
}

// errSource marks an error of the member that is read: another member may succeed.
var errSource = errors.New("the replica that it is copied from")

// copyPiece copies a piece, at bytes at a time, from one of the members with the piece. While members fetch the piece's
// blocks from another source, copyPiece waits and holds no lock.
func (c *copier) copyPiece(ctx context.Context, p span, at int64, buf *[]byte) error {
	if c.equal != nil {
		return untilFetched(ctx, resyncTime, func() error { return c.resyncPiece(ctx, p, at, buf) })
	}
	return untilFetched(ctx, 0, func() error { return c.fromOne(ctx, p, at, buf) })
}

func (c *copier) fromOne(ctx context.Context, p span, at int64, buf *[]byte) error {
	src, err := c.listSources(ctx)
	if err != nil {
		return err
	}
	for i := range src {
		if i > 0 {
			*buf = block.AlignedBuffer(comparePiece) // a hanging disk may still read into the other buffer
		}
		m, done := c.putSoonestFirst(src[i:])
		err = c.compareAndCopy(ctx, m, c.to, p, at, *buf)
		done()
		if !errors.Is(err, errSource) || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// resyncPiece resyncs a piece of all members in equal.
func (c *copier) resyncPiece(ctx context.Context, p span, at int64, buf *[]byte) (err error) {
	for i, m := range c.equal {
		if i > 0 {
			*buf = block.AlignedBuffer(comparePiece)
		}
		others := slices.DeleteFunc(slices.Clone(c.equal), func(o Mirror) bool { return o == m })
		err = c.compareAndCopy(ctx, m, others, p, at, *buf)
		if !errors.Is(err, errSource) || !isDamage(err) || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// delay measures the reads from a member.
type delay struct {
	pieces int     // in progress
	perKiB float64 // nanoseconds, lately
}

// putSoonestFirst puts the member first with the shortest expected wait for a piece, and counts the piece until done. A
// read from another machine costs the processors of both machines and the network, which guests need, so
// putSoonestFirst prefers the member on this machine while the member answers soon enough.
func (c *copier) putSoonestFirst(src []Mirror) (m Mirror, done func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	best, least := 0, 0.0
	for i, m := range src {
		if c.delay[m] == nil {
			c.delay[m] = &delay{}
		}
		d := c.delay[m]
		if m == c.local && d.perKiB*(comparePiece>>10) < float64(localSoon) {
			best = i
			break
		}
		if t := float64(d.pieces+1) * d.perKiB; i == 0 || t < least {
			best, least = i, t
		}
	}
	src[0], src[best] = src[best], src[0]
	d := c.delay[src[0]]
	d.pieces++
	return src[0], func() {
		c.mu.Lock()
		d.pieces--
		c.mu.Unlock()
	}
}

// noteReadTime takes note of a read from a member.
func (c *copier) noteReadTime(m Mirror, n int64, t time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d := c.delay[m]; d != nil {
		now := float64(t) / float64(n>>10)
		if d.perKiB == 0 {
			d.perKiB = now
		}
		d.perKiB += (now - d.perKiB) / 16
	}
}

// listSources lists the members that may be read now.
func (c *copier) listSources(ctx context.Context) (list []Mirror, err error) {
	var near Mirror
	err = c.e.runOnLoop(ctx, func() {
		for i, m := range c.e.cfg.Members {
			if r, ok := m.Member.(Mirror); ok && (c.e.members &^ c.e.suspect &^ c.e.weak &^ c.e.lost).has(i) {
				if list = append(list, r); m.Local {
					near = r
				}
			}
		}
	})
	c.mu.Lock()
	c.local = near
	c.mu.Unlock()
	if err == nil && len(list) == 0 {
		err = api.Errorf(api.Unavailable, "the engine has no member to copy from now")
	}
	if c.snap != "" {
		c.mu.Lock()
		for _, m := range list {
			c.read[m] = true
		}
		c.mu.Unlock()
	}
	return list, err
}

type digests struct {
	sums []byte
	err  error
}

// askDigests has a member digest a range. The member answers in bounded time, also if the caller has left.
func askDigests(ctx context.Context, m Mirror, snap string, p span) chan digests {
	ch := make(chan digests, 1)
	go func() {
		var a digests
		if snap != "" {
			a.sums, a.err = m.(Cutter).SnapDigests(ctx, snap, p.off, p.n)
		} else {
			a.sums, a.err = m.Digests(ctx, p.off, p.n)
		}
		ch <- a
	}()
	return ch
}

// compareAndCopy compares a range and copies the blocks that differ.
func (c *copier) compareAndCopy(ctx context.Context, src Mirror, to []Mirror, p span, at int64, buf []byte) error {
	have := make([]chan digests, len(to))
	for i, m := range to {
		have[i] = askDigests(ctx, m, "", p)
	}
	var want chan digests
	guess := len(to) == 1 && c.bare.Load()
	if !guess {
		want = askDigests(ctx, src, c.snap, p)
	}
	var a digests
	if want != nil {
		if a = <-want; a.err != nil {
			return fmt.Errorf("%w: %w", errSource, a.err)
		}
	}
	for i, m := range to {
		b := <-have[i]
		if isDamage(b.err) { // all blocks are written again
			b.sums, b.err = make([]byte, p.n/block.Size*digestSize), nil
		}
		if b.err != nil {
			return b.err
		}
		if blank := isBlank(b.sums); guess && blank {
			return c.copyBlocks(ctx, src, m, p, at, buf, nil)
		} else if c.bare.Store(blank); guess {
			if a = <-askDigests(ctx, src, c.snap, p); a.err != nil {
				return fmt.Errorf("%w: %w", errSource, a.err)
			}
		}
		if len(b.sums) != len(a.sums) || int64(len(a.sums)) != p.n/block.Size*digestSize {
			return api.Errorf(api.Corrupt, "digests of %d+%d: %d and %d bytes", p.off, p.n, len(a.sums), len(b.sums))
		}
		if bytes.Equal(a.sums, b.sums) {
			continue
		}
		differs := func(k int64) bool {
			return !bytes.Equal(a.sums[k*digestSize:(k+1)*digestSize], b.sums[k*digestSize:(k+1)*digestSize])
		}
		if err := c.copyBlocks(ctx, src, m, p, at, buf, differs); err != nil {
			return err
		}
	}
	return nil
}

// copyBlocks copies the blocks of a range that differ; nil: all blocks that are not blank. The guest does not write to
// the range meanwhile.
func (c *copier) copyBlocks(ctx context.Context, src, to Mirror, p span, step int64, buf []byte,
	differs func(int64) bool) error {
	for at := int64(0); at < p.n; at += step {
		a, b := at/block.Size, min(at+step, p.n)/block.Size // in blocks of the piece
		if differs != nil {
			for a < b && !differs(a) {
				a++
			}
			for a < b && !differs(b-1) {
				b--
			}
			if a == b {
				continue
			}
		}
		which := func(k int64) bool { return differs(a + k) }
		if differs == nil {
			which = nil
		}
		if err := c.copyRange(ctx, src, to, span{p.off + a*block.Size, (b - a) * block.Size}, buf, which); err != nil {
			return err
		}
	}
	return nil
}

// copyRange reads a range at once and writes the blocks to copy.
func (c *copier) copyRange(ctx context.Context, src, to Mirror, p span, buf []byte, which func(int64) bool) error {
	if c.join != nil {
		release, err := c.e.lockRange(ctx, p.off, p.n)
		if err != nil {
			return err
		}
		defer release()
	}
	buf = buf[:p.n]
	if err := c.readFrom(ctx, src, buf, p.off); err != nil {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	if c.join != nil { // a member dropped in the meantime may lack later writes
		member := false
		if err := c.e.runOnLoop(ctx, func() {
			for i, m := range c.e.cfg.Members {
				member = member || c.e.members.has(i) && m.Member == Member(src)
			}
		}); err != nil {
			return err
		}
		if !member {
			return fmt.Errorf("%w: %w", errSource, api.Errorf(api.Unavailable, "the replica was dropped"))
		}
	}
	var list []*block.Request
	var spans []block.Span
	sent := int64(0)
	for k := int64(0); k < p.n/block.Size; {
		zero := isZero(buf[k*block.Size:][:block.Size])
		if which != nil && !which(k) || which == nil && zero {
			k++
			continue
		}
		end := k + 1
		for end < p.n/block.Size && (which == nil || which(end)) && isZero(buf[end*block.Size:][:block.Size]) == zero {
			end++
		}
		if off, n := k*block.Size, (end-k)*block.Size; zero {
			list = append(list, &block.Request{Op: block.OpZero, Off: p.off + off, Len: n})
		} else {
			spans = append(spans, block.Span{Off: off, Len: n})
			sent += n
		}
		k = end
	}
	if len(spans) > 0 {
		list = append(list, writeOf(p.off, buf, spans))
	}
	if len(list) == 0 {
		return nil
	}
	c.mu.Lock()
	c.p.Sent += sent
	c.mu.Unlock()
	return doAll(ctx, c.e.cfg.Loop, to, list)
}

// writeOf makes one write of pieces of a buffer.
func writeOf(off int64, buf []byte, spans []block.Span) *block.Request {
	first, last := spans[0].Off, spans[len(spans)-1]
	w := &block.Request{Op: block.OpWrite, Off: off + first, Buf: buf[first : last.Off+last.Len]}
	w.Len = int64(len(w.Buf))
	if len(spans) > 1 {
		for i := range spans {
			spans[i].Off -= first
		}
		w.Spans = spans
	}
	return w
}

func (c *copier) readFrom(ctx context.Context, src Mirror, buf []byte, off int64) (err error) {
	began := time.Now()
	defer func() {
		if err == nil {
			c.noteReadTime(src, int64(len(buf)), time.Since(began))
		}
	}()
	if c.snap != "" {
		return src.(Cutter).SnapRead(ctx, c.snap, off, buf)
	}
	return submitAndWait(ctx, c.e.cfg.Loop, src,
		&block.Request{Op: block.OpRead, Off: off, Len: int64(len(buf)), Buf: buf})
}

func isZero(b []byte) bool { return b[0] == 0 && bytes.Equal(b[:len(b)-1], b[1:]) }

// isBlank reports whether digests belong to blocks of zeros.
func isBlank(sums []byte) bool {
	for i := 0; i+digestSize <= len(sums); i += digestSize {
		if !bytes.Equal(sums[i:i+digestSize], zeroSum[:digestSize]) {
			return false
		}
	}
	return len(sums) > 0
}

// submitAndWait submits a request on the loop's thread and waits for the answer, also after the end of ctx: the buffer
// is in use.
func submitAndWait(ctx context.Context, loop Loop, to block.Submitter, r *block.Request) error {
	return doAll(ctx, loop, to, []*block.Request{r})
}

// doAll submits requests together, waits for all answers, and returns one of the errors.
func doAll(ctx context.Context, loop Loop, to block.Submitter, list []*block.Request) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	left, done := len(list), make(chan struct{}) // left is the loop's
	for _, r := range list {
		r.Done = func(*block.Request) {
			if left--; left == 0 {
				close(done)
			}
		}
	}
	if !loop.Post(func() {
		for _, r := range list {
			to.Submit(r)
		}
	}) {
		return api.Errorf(api.Unavailable, "the volume's I/O thread has ended")
	}
	<-done
	for _, r := range list {
		if r.Err != nil {
			return r.Err
		}
	}
	return nil
}
