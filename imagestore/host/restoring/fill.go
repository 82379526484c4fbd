package restoring

import (
	"context"
	"io"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Fill is a block.Backup that fills the layer, for the importer. After a failure that may pass, and after damage, Fill
// opens the backup again and continues with the chunks that the layer lacks, until it has all.
type Fill struct {
	l     *Layer
	allow bool // leaves damaged chunks as holes

	// Pause calls wait while the layer is idle, without what others need meanwhile; nil: Fill calls wait itself.
	Pause func(ctx context.Context, wait func(context.Context)) error

	Damaged []int64 // of the restore

	// Guarded by Layer.mu.
	local    int64 // bytes from layers of the node's disks
	restored func() (done, total int64)
}

var _ block.Backup = (*Fill)(nil)

// Fill returns the work of the layer's restore. allowDamaged: damaged chunks become holes instead of an error.
func (l *Layer) Fill(allowDamaged bool) *Fill { return &Fill{l: l, allow: allowDamaged} }

// Size implements block.Backup. The backup was opened before.
func (f *Fill) Size() int64 {
	f.l.mu.Lock()
	defer f.l.mu.Unlock()
	switch {
	case f.l.plan != nil:
		return f.l.plan.content
	case f.l.current != nil:
		return f.l.current.Size()
	}
	return 0
}

// Checksum implements block.Backup. A layer with zeros in place of damaged chunks has other content than the backup.
func (f *Fill) Checksum() string {
	if len(f.Damaged) > 0 {
		return ""
	}
	f.l.mu.Lock()
	defer f.l.mu.Unlock()
	return f.l.checksum
}

// Restored implements block.Backup.
func (f *Fill) Restored() (done, total int64) {
	f.l.mu.Lock()
	restored, local := f.restored, f.local
	f.l.mu.Unlock()
	if restored == nil {
		return 0, 0
	}
	done, total = restored() // which counts the chunks that it skips
	return max(done, local), max(total, f.Size())
}

// Close implements block.Backup. The Layer keeps the backup open for readers.
func (f *Fill) Close() error { return nil }

// DamagedText names the damaged chunks of the restore.
func (f *Fill) DamagedText() string { return damageText(f.Damaged) }

// Restore implements block.Backup.
func (f *Fill) Restore(ctx context.Context, sink block.Sink) (err error) {
	l := f.l
	size := f.Size()
	s := &fillSink{Sink: sink, l: l, size: size}
	l.beginFill(s, size)
	defer func() { l.endFill(err == nil) }()
	if err := l.adopt(ctx, sink); err != nil {
		return err
	}
	l.takeReads(s)
	if err := f.copyLocal(ctx, s); err != nil {
		return err
	}
	moved := time.Now() // the last progress
	for {
		before := s.written()
		err := f.restoreOnce(ctx, s)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case s.failure() != nil || len(f.Damaged) == 0 && !mayPass(err):
			return err
		}
		if s.written() > before {
			moved = time.Now()
		}
		if len(f.Damaged) > 0 || time.Since(moved) > l.set.Stall {
			err = f.pause(ctx, err)
		} else {
			l.awaitAgain(ctx)
			err = nil
		}
		if err != nil {
			return err
		}
	}
}

// pause waits with an idle layer until the store may have what the restore lacks.
func (f *Fill) pause(ctx context.Context, why error) error {
	l := f.l
	l.setIdle(why)
	if f.Pause != nil {
		return f.Pause(ctx, l.awaitAgain)
	}
	l.awaitAgain(ctx)
	return nil
}

// restoreOnce restores the chunks that the layer lacks.
func (f *Fill) restoreOnce(ctx context.Context, s *fillSink) error {
	f.Damaged = nil
	o, err := f.l.use(ctx, true)
	if err != nil {
		return err
	}
	before := s.written()
	defer func() { restoredBytes.WithLabelValues("store").Add(float64(s.written() - before)) }()
	f.l.mu.Lock()
	f.restored = o.Restored
	f.l.mu.Unlock()
	var damaged []int64
	if b, ok := o.Backup.(block.IntactBackup); ok {
		f.l.mu.Lock()
		f.l.filled.reset()
		f.l.mu.Unlock()
		damaged, err = b.RestoreIntact(ctx, s, f.l.isFilled)
	} else {
		err = o.Restore(ctx, s)
	}
	if ctx.Err() != nil || s.failure() != nil {
		f.l.release(o, nil) // the backup is not the cause
	} else {
		f.l.release(o, err)
	}
	if err != nil {
		return err
	}
	return f.judge(damaged)
}

// judge decides whether the restore is complete. The layer may have a damaged chunk from a disk or a reader, or as a
// hole.
func (f *Fill) judge(damaged []int64) error {
	f.Damaged = slices.DeleteFunc(damaged, f.l.hasChunk)
	if len(f.Damaged) == 0 || f.allow {
		return nil
	}
	f.l.renewLater()
	return api.Errorf(api.Corrupt, "the store damaged or lost %s of the backup: %s; heal the backup, or restore the "+
		"backup again with --allow-damaged, which restores zeros there", api.CountText(len(f.Damaged), "chunk"),
		f.DamagedText())
}

func (l *Layer) isFilled(chunk int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.filled.has(chunk)
}

// hasChunk reports whether the layer in the making has a chunk, be it a hole.
func (l *Layer) hasChunk(chunk int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.filled.has(chunk) || l.plan != nil && !l.plan.isData(chunk)
}

// beginFill lets readers read what the restore has written.
func (l *Layer) beginFill(s *fillSink, size int64) {
	l.filling.Lock()
	defer l.filling.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.filled, l.whole = newFilledChunks(size), false
	l.part, _ = s.Sink.(io.ReaderAt)
}

// adopt takes the chunks over that an earlier restore has written. A layer without a plan has no digests to compare.
func (l *Layer) adopt(ctx context.Context, sink block.Sink) error {
	a, ok := sink.(block.ChunkAdopter)
	if !ok {
		return nil
	}
	l.mu.Lock()
	p := l.plan
	l.mu.Unlock()
	return a.AdoptChunks(ctx, func(c int64) (digest [32]byte, known bool) {
		if p == nil || !p.isData(c) {
			return digest, false
		}
		return p.digest(c), true
	}, func(c int64) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.filled.set(c)
	})
}

// takeReads lets readers' chunks be written, which AdoptChunks would take for those of an earlier restore.
func (l *Layer) takeReads(s *fillSink) {
	l.filling.Lock()
	defer l.filling.Unlock()
	l.sink = s
}

// endFill ends the reads of the layer in the making, before the importer seals or removes the layer.
func (l *Layer) endFill(whole bool) {
	l.filling.Lock()
	defer l.filling.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.part, l.sink, l.filled, l.whole, l.idle = nil, nil, filledChunks{}, whole, nil
}

// fillSink counts what a restore writes, and lets readers go first.
type fillSink struct {
	block.Sink
	l    *Layer
	size int64

	bytes int64 // guarded by Layer.mu
	err   error // of the sink; guarded by Layer.mu
}

var _ block.DigestSink = (*fillSink)(nil)

// WriteAt implements io.WriterAt.
func (s *fillSink) WriteAt(p []byte, off int64) (int, error) {
	s.l.set.yield()
	n, err := s.Sink.WriteAt(p, off)
	return n, s.note(n, off, err)
}

// ZeroAt implements block.Sink.
func (s *fillSink) ZeroAt(off, n int64) error { return s.keep(s.Sink.ZeroAt(off, n)) }

// Sync implements block.Sink. A writer whose Sync failed never syncs again: the restore needs another writer.
func (s *fillSink) Sync(ctx context.Context) error { return s.keep(s.Sink.Sync(ctx)) }

// keep keeps an error of the sink.
func (s *fillSink) keep(err error) error {
	if err != nil {
		s.l.mu.Lock()
		defer s.l.mu.Unlock()
		s.err = err
	}
	return err
}

// WriteChunk implements block.DigestSink. A chunk with another digest than readers got is an error of kind corrupt, and
// is not written.
func (s *fillSink) WriteChunk(p []byte, off int64, digest [32]byte) error {
	s.l.set.yield()
	if plan, err := s.l.currentPlan(); err == nil && !plan.accepts(off, int64(len(p)), digest) {
		return api.Errorf(api.Corrupt, "layer %s: the chunk at offset %d does not match its digest", s.l.uid, off)
	}
	return s.write(p, off, digest)
}

// write is WriteChunk for the chunk of a reader.
func (s *fillSink) write(p []byte, off int64, digest [32]byte) error {
	to, takes := s.Sink.(block.DigestSink)
	if !takes {
		n, err := s.Sink.WriteAt(p, off)
		return s.note(n, off, err)
	}
	return s.note(len(p), off, to.WriteChunk(p, off, digest))
}

// note counts n written bytes, or keeps the error of the sink, which note returns.
func (s *fillSink) note(n int, off int64, err error) error {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if err != nil {
		s.err = err
		return err
	}
	s.bytes += int64(n)
	s.l.idle = nil
	s.l.filled.add(s.size, off, int64(n))
	return nil
}

func (s *fillSink) written() int64 {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.bytes
}

func (s *fillSink) failure() error {
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	return s.err
}
