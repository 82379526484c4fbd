package block

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
)

// ChunkSize is the unit of work of Copy and of digests: Copy aligns chunks, so a sink that digests chunks sees a full
// chunk in one WriteAt wherever the source has no holes inside the chunk.
const ChunkSize = 2 << 20

// CopyOptions says how Copy works. The zero value is usable.
type CopyOptions struct {
	// Workers is how many chunks are in flight; 0 means 4.
	Workers int
	// Progress, if set, is told how many bytes of the source are dealt with, holes included. Calls do not overlap and
	// done never falls.
	Progress func(done, total int64)
	// Limit, if set, bounds the data read, in bytes per second.
	Limit int64
}

type piece struct {
	Extent
	holes int64 // bytes of holes before this piece, for the progress
}

// Copy writes the content of src to dst: Copy reads and writes data, makes zeros and leaves holes out. Copy returns
// the first error after all goroutines have ended, and never syncs: the owner of dst does.
func Copy(ctx context.Context, dst Sink, src Source, o CopyOptions) error {
	if o.Workers <= 0 {
		o.Workers = 4
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	total := src.Size()
	p := &progress{total: total, report: o.Progress}
	limit := NewThrottle(o.Limit)
	work := make(chan piece)
	var wg sync.WaitGroup
	for range o.Workers {
		wg.Go(func() {
			var buf []byte
			for w := range work {
				if ctx.Err() != nil {
					continue
				}
				if w.Kind == Data && buf == nil {
					buf = make([]byte, ChunkSize)
				}
				if err := copyPiece(ctx, dst, src, w.Extent, buf, limit); err != nil {
					cancel(err)
					continue
				}
				p.add(w.holes + w.Len)
			}
		})
	}
	tail, err := plan(ctx, src, total, work)
	close(work)
	wg.Wait()
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p.add(tail)
	return nil
}

// plan cuts the source into pieces of at most one aligned chunk, and returns the holes after the last piece.
func plan(ctx context.Context, src Source, total int64, work chan<- piece) (holes int64, err error) {
	for off := int64(0); off < total; {
		e, err := src.Next(off)
		if err != nil {
			return 0, fmt.Errorf("map of the source at %d: %w", off, err)
		}
		if e.Off != off || e.Len <= 0 || e.End() > total {
			return 0, fmt.Errorf("map of the source at %d: extent [%d, %d) is outside of [%d, %d)", off, e.Off, e.End(), off,
				total)
		}
		if e.Kind == Hole {
			holes += e.Len
			off = e.End()
			continue
		}
		n := e.Len
		if e.Kind == Data {
			n = min(n, ChunkSize-off%ChunkSize)
		}
		select {
		case work <- piece{Extent{off, n, e.Kind}, holes}:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
		off, holes = off+n, 0
	}
	return holes, nil
}

func copyPiece(ctx context.Context, dst Sink, src Source, e Extent, buf []byte, limit *Throttle) error {
	if e.Kind == Zero {
		if err := dst.ZeroAt(e.Off, e.Len); err != nil {
			return fmt.Errorf("write zeros at %d: %w", e.Off, err)
		}
		return nil
	}
	if err := limit.Wait(ctx, e.Len); err != nil {
		return err
	}
	b := buf[:e.Len]
	if n, err := src.ReadAt(b, e.Off); n < len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read at %d: %w", e.Off, err)
	} else if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read at %d: %w", e.Off, err)
	}
	if n, err := dst.WriteAt(b, e.Off); err != nil {
		return fmt.Errorf("write at %d: %w", e.Off, err)
	} else if n < len(b) {
		return fmt.Errorf("write at %d: %w", e.Off, io.ErrShortWrite)
	}
	return nil
}

type progress struct {
	mu          sync.Mutex
	done, total int64
	report      func(done, total int64)
}

func (p *progress) add(n int64) {
	if p.report == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	p.report(p.done, p.total)
}
