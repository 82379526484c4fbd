package stack

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Layers are brought from another disk chunk by chunk, several at once. Each chunk is compared with its digest as it is
// read, and the whole with the root digest before it counts. What is there is recorded now and then, in order, so that
// another process goes on where this one ended.

// BringOptions say how. The zero value is usable.
type BringOptions struct {
	Workers int // chunks at once; 0: two per processor
	// BytesPerSecond, if set, bounds what is read of data; it is asked all the time, and 0 is no bound.
	BytesPerSecond func() int64
	// Progress, if set, is told how many bytes of data are there. Calls do not overlap, and done never falls.
	Progress  func(done, total int64)
	KeepEvery time.Duration // 0: 5 s
}

// origin is what is brought.
type origin struct {
	size  int64
	kinds *format.Index // values are block.Kind
	note  []byte        // tells it from everything else
	root  string        // its digest, if it is known
	// read fills a chunk of buf, holes and zeros as zeros, and verifies what it can.
	read func(c int64, buf, scratch []byte) (format.ChunkSums, error)
}

// Bring makes a layer of another disk a layer of this one. One that is here already is fine.
func (d *Disk) Bring(ctx context.Context, from *Disk, uid string, o BringOptions) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("bring layer %s from disk %s to disk %s: %w", uid, from.root, d.root, classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	rec, err := from.layerRecord(uid)
	if api.Is(err, api.NotFound) { // frozen: its digests are made first
		if err := from.finishNow(ctx, uid); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		rec, err = from.layerRecord(uid)
	}
	if err != nil {
		return err
	}
	if have, err := d.layerRecord(uid); !api.Is(err, api.NotFound) {
		if err == nil && have.Root != rec.Root {
			err = api.Errorf(api.Corrupt, "the two have different digests")
		}
		return err
	}
	l, err := from.openLayer(uid, from.direct)
	if err != nil {
		return err
	}
	defer func() { _ = l.close() }() // read only
	kinds, err := format.IndexOf(l.m)
	if err != nil {
		return err
	}
	sums, err := from.fs.Open(from.path(layersDir, uid, sumsFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer sums.Close()
	note, err := json.Marshal(map[string]string{"root": rec.Root})
	if err != nil {
		return err
	}
	read := func(c int64, buf, _ []byte) (format.ChunkSums, error) {
		if err := readRuns(l.data, kinds, c, buf, block.Data); err != nil {
			return format.ChunkSums{}, err
		}
		sum, err := verified(sums, c, buf)
		return format.ChunkSums{Digest: sum, CRCs: format.ChunkCRCs(buf)}, err
	}
	return d.take(ctx, uid, origin{rec.Size, kinds, note, rec.Root, read}, o)
}

// readRuns fills buf, all of chunk c, with the blocks that have a value in the index; the others become zeros.
func readRuns(h file.Handle, x *format.Index, c int64, buf []byte, value block.Kind) error {
	first := c * chunkBlks
	for b, end := first, first+int64(len(buf))>>blockBits; b < end; {
		v, n := x.Run(b, end)
		part := buf[(b-first)<<blockBits:][:n<<blockBits]
		if block.Kind(v) != value {
			clear(part)
		} else if k, err := h.ReadAt(part, b<<blockBits); k < len(part) {
			return fmt.Errorf("read %d bytes at %d: %w", len(part), b<<blockBits, err)
		}
		b += n
	}
	return nil
}

// verified is the digest of chunk c, which must be the one in sums.
func verified(sums file.Handle, c int64, buf []byte) (sum [sumSize]byte, err error) {
	sum = sha256.Sum256(buf)
	var want [sumSize]byte
	if _, err := sums.ReadAt(want[:], sumsHeader+c*sumSize); err != nil {
		return sum, err
	}
	if sum != want {
		return sum, api.Errorf(api.Corrupt, "the 2 MiB at %d do not match their digest", c*chunkSize)
	}
	return sum, nil
}

// take makes the layer.
func (d *Disk) take(ctx context.Context, uid string, from origin, o BringOptions) error {
	w, upTo, err := d.begin(ctx, uid, from)
	if err != nil {
		return err
	}
	w.want = from.root
	t := &taking{disk: d, w: w, from: from, o: o, done: map[int64]bool{}, mark: upTo / chunkSize}
	if o.Workers <= 0 {
		t.o.Workers = 2 * runtime.GOMAXPROCS(0)
	}
	if o.KeepEvery <= 0 {
		t.o.KeepEvery = 5 * time.Second
	}
	for b := int64(0); b < from.kinds.Blocks; {
		v, n := from.kinds.Run(b, from.kinds.Blocks)
		if block.Kind(v) == block.Data {
			t.total += n << blockBits
			t.bytes += max(min(b+n, upTo>>blockBits)-b, 0) << blockBits
		}
		b += n
	}
	err = t.room(t.total - t.bytes)
	if err == nil {
		err = t.run(ctx)
	}
	if err == nil {
		_, _, err = w.Seal(ctx)
	}
	if err == nil {
		return nil
	}
	if api.Is(err, api.Corrupt) {
		return errors.Join(err, w.Abort())
	}
	kerr := t.keep() // else a little is copied again
	return errors.Join(err, w.Leave(), ignore(kerr))
}

// ignore is for an error that comes of another one.
func ignore(error) error { return nil }

// begin goes on with what was kept of the layer, or starts it.
func (d *Disk) begin(ctx context.Context, uid string, from origin) (*layerWriter, int64, error) {
	k, upTo, note, err := d.Resume(ctx, uid)
	if err == nil {
		w := k.(*layerWriter)
		if w.size == from.size && string(note) == string(from.note) {
			return w, upTo, nil
		}
		err = errors.Join(api.Errorf(api.NotFound, "it is of something else"), w.Leave())
	}
	if !api.Is(err, api.NotFound) && !api.Is(err, api.Corrupt) {
		return nil, 0, err
	}
	k2, err := d.Create(ctx, uid, from.size)
	if err != nil {
		return nil, 0, err
	}
	return k2.(*layerWriter), 0, nil
}

// taking is a layer that is being made of an origin.
type taking struct {
	disk  *Disk
	w     *layerWriter
	from  origin
	o     BringOptions
	total int64

	mu    sync.Mutex
	bytes int64          // of data that are there
	done  map[int64]bool // chunks that are, behind mark
	queue []int64        // chunks given out, in order, those before mark taken off
	mark  int64          // all chunks before it are there
	kept  int64
	due   time.Time // of the next chunk, where there is a bound
}

func (t *taking) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int64)
	var wg sync.WaitGroup
	for range t.o.Workers {
		wg.Go(func() {
			buf, scratch := alignedBuffer(int(chunkSize)), alignedBuffer(int(chunkSize))
			for c := range work {
				if ctx.Err() != nil {
					continue
				}
				if err := t.chunk(ctx, c, buf, scratch); err != nil {
					cancel(err)
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for c := range t.from.kinds.Chunks() {
			if c < t.mark0() {
				continue
			}
			t.mu.Lock()
			t.queue = append(t.queue, c)
			t.mu.Unlock()
			select {
			case work <- c:
			case <-ctx.Done():
			}
			if ctx.Err() != nil {
				break
			}
		}
		close(work)
		wg.Wait()
	}()
	tick := time.NewTicker(t.o.KeepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return context.Cause(ctx)
		case <-tick.C:
			if err := errors.Join(t.keep(), t.room(0)); err != nil {
				cancel(err)
				<-ended
				return err
			}
		}
	}
}

func (t *taking) mark0() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mark
}

// chunk brings one chunk.
func (t *taking) chunk(ctx context.Context, c int64, buf, scratch []byte) error {
	k := t.from.kinds
	first := c * chunkBlks
	n := min(chunkBlks, k.Blocks-first)
	data := int64(0)
	for b := first; b < first+n; {
		v, m := k.Run(b, first+n)
		if block.Kind(v) == block.Data {
			data += m << blockBits
		}
		b += m
	}
	if err := t.pace(ctx, data); err != nil {
		return err
	}
	buf, scratch = buf[:n<<blockBits], scratch[:n<<blockBits]
	sums, err := t.from.read(c, buf, scratch)
	if err != nil {
		return err
	}
	if err := t.w.putChunk(c, k, buf, sums); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done[c] = true
	for len(t.queue) > 0 && t.done[t.queue[0]] {
		delete(t.done, t.queue[0])
		t.mark = t.queue[0] + 1
		t.queue = t.queue[1:]
	}
	t.bytes += data
	if t.o.Progress != nil {
		t.o.Progress(t.bytes, t.total)
	}
	return nil
}

// pace waits until n more bytes may be read.
func (t *taking) pace(ctx context.Context, n int64) error {
	if t.o.BytesPerSecond == nil {
		return nil
	}
	rate := t.o.BytesPerSecond()
	if rate <= 0 {
		return nil
	}
	t.mu.Lock()
	now := time.Now()
	if t.due.Before(now) {
		t.due = now
	}
	wait := t.due.Sub(now)
	t.due = t.due.Add(time.Duration(float64(n) / float64(rate) * float64(time.Second)))
	t.mu.Unlock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// keep records what is there.
func (t *taking) keep() error {
	t.mu.Lock()
	upTo := min(t.mark*chunkSize, t.from.size/chunkSize*chunkSize)
	was := t.kept
	t.mu.Unlock()
	if upTo <= was {
		return nil
	}
	if err := t.w.Keep(upTo, t.from.note); err != nil {
		return err
	}
	t.mu.Lock()
	t.kept = upTo
	t.mu.Unlock()
	return nil
}

// room leaves some of the disk to the volumes on it, for which a full one is worse than for a copy.
func (t *taking) room(need int64) error {
	capacity, available, _, err := t.disk.Statfs()
	if err != nil {
		return err
	}
	if rest := min(capacity/100, 1<<30); available-need < rest {
		return api.Errorf(api.Full, "%s are to be copied and %s are free, of which %s are left to others",
			api.SizeText(max(need, t.total-t.bytes)), api.SizeText(available), api.SizeText(rest))
	}
	return nil
}

// allocate takes room for the data of the window of chunks that c is in, before the first of them is written: to ext4
// several direct writes at once go on only where blocks are there already. It is no harm if it fails.
func (w *layerWriter) allocate(c int64, kinds *format.Index) {
	const window = 32 // chunks
	n := c / window
	w.mu.Lock()
	done := w.allocated[n]
	if w.allocated == nil {
		w.allocated = map[int64]bool{}
	}
	w.allocated[n] = true
	w.mu.Unlock()
	if done {
		return
	}
	for b, end := n*window*chunkBlks, min((n+1)*window*chunkBlks, kinds.Blocks); b < end; {
		v, m := kinds.Run(b, end)
		if block.Kind(v) == block.Data && m<<blockBits >= 64<<10 {
			_ = unix.Fallocate(int(w.data.Fd()), unix.FALLOC_FL_KEEP_SIZE, b<<blockBits, m<<blockBits)
		}
		b += m
	}
}

// putChunk writes a chunk whose kinds are known, with its digest and checksums. Nobody else writes to it.
func (w *layerWriter) putChunk(c int64, kinds *format.Index, buf []byte, sums format.ChunkSums) error {
	const small = 64 << 10 // less is better left to the page cache
	first := c * chunkBlks
	if _, err := w.check(c*chunkSize, int64(len(buf))); err != nil {
		return w.name(err)
	}
	w.allocate(c, kinds)
	cached := false
	for b, end := first, first+int64(len(buf))>>blockBits; b < end; {
		v, n := kinds.Run(b, end)
		if block.Kind(v) == block.Data {
			part := buf[(b-first)<<blockBits:][:n<<blockBits]
			h := w.direct
			if len(part) < small {
				h, cached = w.data, true
			}
			if _, err := h.WriteAt(part, b<<blockBits); err != nil {
				return w.name(err)
			}
			w.wrote(int64(len(part)))
		}
		w.mu.Lock()
		w.kinds.Set(b, b+n, v)
		w.mu.Unlock()
		b += n
	}
	if cached { // so that no sync has much to do: see emptier
		if err := w.data.Writeout(c*chunkSize, int64(len(buf))); err != nil {
			return w.name(err)
		}
	}
	if err := w.putSums(c, sums); err != nil {
		return w.name(err)
	}
	w.mu.Lock()
	w.known[c] = true
	w.mu.Unlock()
	return nil
}
