package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
	"drover.io/drover/replicas/stack/layer"
)

// A copy reads a layer chunk by chunk, several chunks at once. Each chunk is compared with its digest, and the whole
// layer with its root digest before the commit. Checkpoints let another process continue an interrupted copy.

// Options bound a copy. The zero value is usable.
type Options struct {
	Workers int // chunks at once; 0: two per processor
	// BytesPerSecond, if set, bounds the bytes of data that are read; the copy calls the function often. 0: no bound.
	BytesPerSecond func() int64
	// Progress, if set, is called with the bytes of data that are copied. Calls do not overlap, and done never falls.
	Progress        func(done, total int64)
	CheckpointEvery time.Duration // interval of checkpoints; 0: 5 s
}

// origin is the content of a new layer.
type origin struct {
	size  int64
	kinds *format.Index // values are block.Kind
	note  []byte        // tells the origin from all others; kept in checkpoints
	root  string        // the root digest; empty: unknown
	// read fills buf with a chunk, holes and zeros as zeros, and verifies the chunk as far as possible.
	read func(c int64, buf, scratch []byte) (format.ChunkSums, error)
}

// Copy copies a layer of another disk to disk d. A layer that d has already is no error.
func Copy(ctx context.Context, d, from *layer.Store, uid string, o Options) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("copy layer %s from disk %s to disk %s: %w", uid, from.Root, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return err
	}
	rec, err := from.Record(uid)
	if api.Is(err, api.NotFound) { // frozen: without digests so far
		if err := from.FinishNow(ctx, uid); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		rec, err = from.Record(uid)
	}
	if err != nil {
		return err
	}
	if have, err := d.Record(uid); !api.Is(err, api.NotFound) {
		if err == nil && have.Root != rec.Root {
			err = api.Errorf(api.Corrupt, "the two have different digests")
		}
		return err
	}
	l, err := from.OpenLayer(uid, from.Direct)
	if err != nil {
		return err
	}
	defer func() { _ = l.Close() }() // read only
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		return err
	}
	sums, err := from.FS.Open(from.Join(layer.Dir, uid, layer.SumsFile), os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer sums.Close()
	note, err := json.Marshal(map[string]string{"root": rec.Root})
	if err != nil {
		return err
	}
	read := func(c int64, buf, _ []byte) (format.ChunkSums, error) {
		if err := layer.ReadRuns(l.Data, kinds, c, buf, block.Data); err != nil {
			return format.ChunkSums{}, err
		}
		sum, err := layer.VerifyChunk(sums, c, buf)
		return format.ChunkSums{Digest: sum, CRCs: format.ChunkCRCs(buf)}, err
	}
	return makeLayer(ctx, d, uid, origin{rec.Size, kinds, note, rec.Root, read}, o)
}

// makeLayer makes a layer of an origin.
func makeLayer(ctx context.Context, d *layer.Store, uid string, from origin, o Options) error {
	w, upTo, err := resumeCopy(ctx, d, uid, from)
	if err != nil {
		return err
	}
	w.Want = from.root
	t := &copyJob{disk: d, w: w, from: from, o: o, done: map[int64]bool{}, mark: upTo / chunkSize}
	if o.Workers <= 0 {
		t.o.Workers = 2 * runtime.GOMAXPROCS(0)
	}
	if o.CheckpointEvery <= 0 {
		t.o.CheckpointEvery = 5 * time.Second
	}
	for b := int64(0); b < from.kinds.Blocks; {
		v, n := from.kinds.Run(b, from.kinds.Blocks)
		if block.Kind(v) == block.Data {
			t.total += n << blockBits
			t.bytes += max(min(b+n, upTo>>blockBits)-b, 0) << blockBits
		}
		b += n
	}
	err = t.checkSpace(t.total - t.bytes)
	if err == nil {
		err = t.copyChunks(ctx)
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
	_ = t.writeCheckpoint() // after an error the next copy only copies a little more
	return errors.Join(err, w.Leave())
}

// resumeCopy continues the layer from its checkpoint, or begins the layer.
func resumeCopy(ctx context.Context, d *layer.Store, uid string, from origin) (*layer.Writer, int64, error) {
	k, upTo, note, err := d.Resume(ctx, uid)
	if err == nil {
		w := k.(*layer.Writer)
		if w.Size == from.size && string(note) == string(from.note) {
			return w, upTo, nil
		}
		err = errors.Join(api.Errorf(api.NotFound, "the checkpoint is of another origin"), w.Leave())
	}
	if !api.Is(err, api.NotFound) && !api.Is(err, api.Corrupt) {
		return nil, 0, err
	}
	k2, err := d.Create(ctx, uid, from.size)
	if err != nil {
		return nil, 0, err
	}
	return k2.(*layer.Writer), 0, nil
}

// copyJob is a layer in the making.
type copyJob struct {
	disk  *layer.Store
	w     *layer.Writer
	from  origin
	o     Options
	total int64

	mu           sync.Mutex
	bytes        int64          // copied bytes of data
	done         map[int64]bool // copied chunks behind mark
	queue        []int64        // chunks given to workers, in order, from mark on
	mark         int64          // all chunks before mark are copied
	checkpointed int64
	due          time.Time // start of the next chunk under a bound
}

func (t *copyJob) copyChunks(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	work := make(chan int64)
	var wg sync.WaitGroup
	for range t.o.Workers {
		wg.Go(func() {
			buf, scratch := block.AlignedBuffer(int(chunkSize)), block.AlignedBuffer(int(chunkSize))
			for c := range work {
				if ctx.Err() != nil {
					continue
				}
				if err := t.copyChunk(ctx, c, buf, scratch); err != nil {
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
	tick := time.NewTicker(t.o.CheckpointEvery)
	defer tick.Stop()
	for {
		select {
		case <-ended:
			return context.Cause(ctx)
		case <-tick.C:
			if err := errors.Join(t.writeCheckpoint(), t.checkSpace(0)); err != nil {
				cancel(err)
				<-ended
				return err
			}
		}
	}
}

func (t *copyJob) mark0() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mark
}

// copyChunk copies one chunk.
func (t *copyJob) copyChunk(ctx context.Context, c int64, buf, scratch []byte) error {
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
	if err := t.throttle(ctx, data); err != nil {
		return err
	}
	buf, scratch = buf[:n<<blockBits], scratch[:n<<blockBits]
	sums, err := t.from.read(c, buf, scratch)
	if err != nil {
		return err
	}
	if err := t.w.PutChunk(c, k, buf, sums); err != nil {
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

// throttle waits until n more bytes may be read.
func (t *copyJob) throttle(ctx context.Context, n int64) error {
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

// writeCheckpoint writes a checkpoint.
func (t *copyJob) writeCheckpoint() error {
	t.mu.Lock()
	upTo := min(t.mark*chunkSize, t.from.size/chunkSize*chunkSize)
	was := t.checkpointed
	t.mu.Unlock()
	if upTo <= was {
		return nil
	}
	if err := t.w.Checkpoint(upTo, t.from.note); err != nil {
		return err
	}
	t.mu.Lock()
	t.checkpointed = upTo
	t.mu.Unlock()
	return nil
}

// checkSpace keeps free space for the volumes of the disk, because a full disk harms a volume more than a copy.
func (t *copyJob) checkSpace(need int64) error {
	capacity, available, _, err := t.disk.Statfs()
	if err != nil {
		return err
	}
	if rest := min(capacity/100, 1<<30); available-need < rest {
		t.mu.Lock()
		need = max(need, t.total-t.bytes)
		t.mu.Unlock()
		return api.Errorf(api.Full, "%s are to be copied and %s are free, of which %s are left to others",
			api.SizeText(need), api.SizeText(available), api.SizeText(rest))
	}
	return nil
}
