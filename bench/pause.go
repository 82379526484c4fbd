package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	pauseWriters = 32
	pauseCuts    = 100
)

// spell is the time of a write.
type spell struct {
	began time.Time
	took  time.Duration
}

func (s spell) end() time.Time { return s.began.Add(s.took) }

// window is a period with or without a cut.
type window struct{ from, to time.Time }

// pause cuts a volume under 32 writers. Every other window, of the same length, has no cut: the difference between the
// windows is the cost of a cut. pause reports two figures of each window: the longest write in progress during the
// window, and the longest time without the end of a write, which is the pause.
func (b *bench) pause(ctx context.Context, figures, name, dev string, size int64) error {
	f, err := os.OpenFile(dev, os.O_RDWR|syscall.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	stop := make(chan struct{})
	writes := make([][]spell, pauseWriters)
	errs := make([]error, pauseWriters+1)
	var wg sync.WaitGroup
	for w := range pauseWriters {
		wg.Go(func() { writes[w], errs[w] = writeUntil(stop, f, int64(w), size) })
	}
	var syncs []float64
	wg.Go(func() { syncs, errs[pauseWriters] = syncUntil(stop, filepath.Join(b.dir, "sync")) })
	var cuts, without []window
	for i := range pauseCuts {
		from := time.Now()
		if err = b.createSnapshot(ctx, name, fmt.Sprintf("pause-%d", i)); err != nil {
			break
		}
		cut := window{from, time.Now()}
		time.Sleep(50 * time.Millisecond) // keeps the effects of a cut out of the next window
		from = time.Now()
		time.Sleep(cut.to.Sub(cut.from))
		cuts, without = append(cuts, cut), append(without, window{from, time.Now()})
	}
	close(stop)
	wg.Wait()
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	all := slices.Concat(writes...)
	slices.SortFunc(all, func(a, b spell) int { return a.end().Compare(b.end()) })
	longest, gap := inWindows(all, cuts)
	usual, usualGap := inWindows(all, without)
	for _, p := range []float64{50, 99} {
		figure := fmt.Sprintf("%s-p%.0f", figures, p)
		b.addFigure(figure, "no write ends", percentile(gap, p), "ms", "fsync", percentile(syncs, p),
			fmt.Sprintf("32 writers, %d cuts; beside it syncs of a file on the disk meanwhile", pauseCuts))
		b.addFigure(figure, "the same, no cut", percentile(usualGap, p), "ms", "", 0,
			"in windows of the same length, in turn")
		b.addFigure(figure, "added by a cut", percentile(gap, p)-percentile(usualGap, p), "ms", "fsync", percentile(syncs, p),
			"the first less the second: the pause itself")
		b.addFigure(figure, "longest write", percentile(longest, p), "ms", "no cut", percentile(usual, p),
			"of those in progress from the request to the snapshot")
	}
	for i := range cuts {
		if err := b.deleteSnapshot(ctx, fmt.Sprintf("pause-%d", i)); err != nil {
			return err
		}
	}
	return nil
}

// cuts measures pauses of a volume with two replicas, which holds writes until both replicas have sealed.
func (b *bench) cuts(ctx context.Context, _ []*other) error {
	const name = "r-cuts"
	size := b.sizeMiB << 20
	dev, err := b.attachReplicated(ctx, name, []string{b.in.node, "far-1"}, size)
	if err != nil {
		return err
	}
	if err := b.fillSubject(ctx, dev); err != nil {
		return err
	}
	return b.pause(ctx, "snapshot-pause-2-replicas", name, dev, size)
}

// writeUntil writes blocks all over f, one after the other.
func writeUntil(stop <-chan struct{}, f *os.File, w, size int64) (mine []spell, err error) {
	buf, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil, err
	}
	defer func() { _ = syscall.Munmap(buf) }()
	for i := range buf {
		buf[i] = byte(w + 1)
	}
	for n := int64(0); ; n++ {
		select {
		case <-stop:
			return mine, nil
		default:
		}
		began := time.Now()
		if _, err := f.WriteAt(buf, (n*pauseWriters+w)*977%(size>>12)<<12); err != nil {
			return mine, err
		}
		mine = append(mine, spell{began, time.Since(began)})
	}
}

// syncUntil times syncs of a small file under the same load, in ms. Syncs are rare, because each sync commits the
// journal of the disk, and writes wait for the commit.
func syncUntil(stop <-chan struct{}, name string) (took []float64, err error) {
	s, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for n := int64(0); ; n++ {
		select {
		case <-stop:
			return took, nil
		case <-tick.C:
		}
		began := time.Now()
		if _, err := s.WriteAt([]byte{byte(n)}, n); err != nil {
			return took, err
		}
		if err := s.Sync(); err != nil {
			return took, err
		}
		took = append(took, time.Since(began).Seconds()*1e3)
	}
}

// inWindows returns for each window the longest write in progress during the window, and the longest time without the
// end of a write, in ms. The caller orders the writes by their ends.
func inWindows(all []spell, in []window) (longest, gap []float64) {
	for _, w := range in {
		var worst, still time.Duration
		last := w.from
		for _, s := range all {
			if s.end().Before(w.from) {
				continue
			}
			if s.began.Before(w.to) {
				worst = max(worst, s.took)
			}
			if last.Before(w.to) {
				still = max(still, s.end().Sub(last))
				last = s.end()
			}
		}
		longest, gap = append(longest, worst.Seconds()*1e3), append(gap, still.Seconds()*1e3)
	}
	return longest, gap
}
