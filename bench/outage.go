package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// kills kills the data process of the engine's node under small writes, with a replica and with three replicas, and
// measures the time until the end of the next write.
func (b *bench) kills(ctx context.Context, _ []*other) error {
	here := b.in.node
	for _, s := range []struct {
		name   string
		nodes  []string
		beside bool // Drover merges and removes another volume's layers meanwhile
	}{{"1-local", []string{here}, false}, {"3-replicas", []string{here, "far-1", "far-2"}, false},
		{"1-local-beside-merges", []string{here}, true}} {
		name := "r-killed-" + s.name
		dev, err := b.attachReplicated(ctx, name, s.nodes, b.sizeMiB<<20)
		if err != nil {
			return err
		}
		var waits []float64
		for range max(b.rounds, 5) {
			merges := s.beside && len(waits)%2 == 0 // otherwise Drover removes merged layers
			if s.beside {
				if err := b.makeLeftovers(ctx, !merges); err != nil {
					return err
				}
			}
			pid, err := b.in.pid("data")
			if err != nil {
				return err
			}
			worst, err := b.longestWrite(ctx, dev, func() error {
				if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
					return err
				}
				return sleep(ctx, 3*time.Second)
			})
			if err != nil {
				return err
			}
			if waits = append(waits, worst); worst > 2 {
				fmt.Fprintf(os.Stderr, "a write took %.1f s after a kill; the data process told:\n%s\n", worst,
					b.in.roleLog("data"))
			}
			if merges {
				if err := b.in.deleteVolume(ctx, "r-fragments"); err != nil {
					return err
				}
			}
		}
		b.addFigure("killed-to-next-io", s.name, median(waits), "s", "", 0,
			fmt.Sprintf("kill -9 of the data process; longest of %d: %.2f s", len(waits), percentile(waits, 100)))
		if err := b.in.deleteVolume(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// makeLeftovers creates a volume with several snapshots of scattered single blocks, and deletes the snapshots, so that
// Drover merges the layers. With all, makeLeftovers also deletes the volume.
func (b *bench) makeLeftovers(ctx context.Context, all bool) error {
	const name, cuts = "r-fragments", 6
	dev, err := b.attachReplicated(ctx, name, []string{b.in.node}, b.sizeMiB<<20)
	if err != nil {
		return err
	}
	if err := b.fillSubject(ctx, dev); err != nil {
		return err
	}
	for i := range cuts {
		if _, err := b.fio(ctx, job{"fragments", "randwrite", "4k", "iops", 32}, dev); err != nil {
			return err
		}
		if err := b.createSnapshot(ctx, name, fmt.Sprintf("fragments-%d", i)); err != nil {
			return err
		}
	}
	for i := range cuts {
		if err := b.deleteSnapshot(ctx, fmt.Sprintf("fragments-%d", i)); err != nil {
			return err
		}
	}
	if err := sleep(ctx, 3*time.Second); err != nil { // digests come first
		return err
	}
	if all {
		return b.in.deleteVolume(ctx, name)
	}
	return nil
}

// longestWrite runs do while pulse writes block after block, and returns the duration of the longest write in seconds.
func (b *bench) longestWrite(ctx context.Context, dev string, do func() error) (float64, error) {
	p := &pulse{}
	stop, err := p.startWrites(dev)
	if err != nil {
		return 0, err
	}
	if err := sleep(ctx, 300*time.Millisecond); err != nil {
		return 0, errors.Join(err, stop())
	}
	p.reset()
	err = errors.Join(do(), stop())
	return p.worst().Seconds(), err
}

// outage stops a replica's node under small writes, and starts the node again.
func (b *bench) outage(ctx context.Context, others []*other) error {
	const volume = "r-outage"
	o := others[0]
	dev, err := b.attachReplicated(ctx, volume, []string{b.in.node, others[0].name, others[1].name}, b.sizeMiB<<20)
	if err != nil {
		return err
	}
	if err := b.fillSubject(ctx, dev); err != nil {
		return err
	}
	pid, err := o.pid("data")
	if err != nil {
		return err
	}
	worst, err := b.longestWrite(ctx, dev, func() error {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return err
		}
		return sleep(ctx, 3*time.Second)
	})
	if err != nil {
		return err
	}
	b.addFigure("replica-killed-longest-write", "3-replicas", worst, "s", "", 0,
		"kill -9 of its process, which is started again")
	worst, err = b.longestWrite(ctx, dev, func() error {
		if err := o.stopNode(); err != nil {
			return err
		}
		if err := b.awaitMembers(ctx, volume, 2); err != nil {
			return err
		}
		return sleep(ctx, time.Second)
	})
	if err != nil {
		return err
	}
	b.addFigure("replica-lost-longest-write", "3-replicas", worst, "s", "", 0,
		"its node is stopped for good: until it is dropped")
	// Meanwhile writes change a hundredth of the blocks.
	changed := b.sizeMiB << 20 / 100 / 4096 * 4096
	if _, err := runTool(ctx, "fio", "--name=delta", "--filename="+dev, "--rw=randwrite", "--bs=4k", "--iodepth=16",
		"--direct=1", "--ioengine=libaio", "--size="+strconv.FormatInt(b.sizeMiB, 10)+"m",
		"--io_size="+strconv.FormatInt(changed, 10), "--end_fsync=1"); err != nil {
		return err
	}
	before, err := b.in.metric(ctx, "drover_volume_rebuild_bytes_total", volume, "sent")
	if err != nil {
		return err
	}
	w := b.watchRebuild(ctx, volume)
	began := time.Now()
	if err := o.startNode(ctx, b.in); err != nil {
		return errors.Join(err, w.stopWatching())
	}
	err = b.awaitMembers(ctx, volume, 3)
	took := time.Since(began)
	if err := errors.Join(err, w.stopWatching()); err != nil {
		return err
	}
	sent := before
	for end := time.Now().Add(5 * time.Second); sent == before && time.Now().Before(end); { // the counter lags
		if sent, err = b.in.metric(ctx, "drover_volume_rebuild_bytes_total", volume, "sent"); err != nil {
			return err
		}
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	b.addFigure("rebuild-delta", "3-replicas", took.Seconds(), "s", "", 0, fmt.Sprintf("from the start of "+
		"the node's processes; %.1f s from the first contact; 1 %% of %d MiB was written at random",
		w.secondsUntil(began.Add(took)), b.sizeMiB))
	b.addFigure("rebuild-delta-bytes", "3-replicas", (sent-before)/(1<<20), "MiB", "written data",
		float64(changed)/(1<<20), "that travelled")
	return nil
}

// pulse writes block after block and records the longest write.
type pulse struct{ longest atomic.Int64 }

func (p *pulse) reset()               { p.longest.Store(0) }
func (p *pulse) worst() time.Duration { return time.Duration(p.longest.Load()) }

// startWrites starts the writes; the returned function ends the writes.
func (p *pulse) startWrites(dev string) (func() error, error) {
	fd, err := unix.Open(dev, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	buf, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	buf[0] = 1 // a write of zeros would only be recorded
	quit, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for n := int64(0); ; n++ {
			select {
			case <-quit:
				ended <- nil
				return
			default:
			}
			began := time.Now()
			if _, err := unix.Pwrite(fd, buf, n%1024*4096); err != nil {
				ended <- err
				return
			}
			if took := int64(time.Since(began)); took > p.longest.Load() {
				p.longest.Store(took)
			}
		}
	}()
	return func() error {
		close(quit)
		return errors.Join(<-ended, unix.Munmap(buf), unix.Close(fd))
	}, nil
}
