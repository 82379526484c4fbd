package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// snapshots measures the cost of snapshots: the pause of writers at queue depth 32, beside syncs of the disk in the
// same seconds; the creation and deletion of 1,000 snapshots (-snaps); and reads over chains of 1, 100 and 1,000
// layers.
func (b *bench) snapshots(ctx context.Context) error {
	const name = "snap-bench"
	size := b.sizeMiB << 20
	dev, err := b.in.attachNew(ctx, name, "", size)
	if err != nil {
		return err
	}
	if err := b.fillSubject(ctx, dev); err != nil {
		return err
	}
	var errs []error
	if b.isWanted("snapshots", "pause") {
		errs = append(errs, b.pause(ctx, "snapshot-pause", name, dev, size))
	}
	if b.isWanted("snapshots", "chains") {
		errs = append(errs, b.chains(ctx, name, dev, size))
	}
	return errors.Join(append(errs, b.in.deleteVolume(ctx, name))...)
}

// createSnapshot creates a snapshot and waits until the snapshot is ready.
func (b *bench) createSnapshot(ctx context.Context, volume, name string) error {
	var v api.Volume
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: volume}, &v); err != nil {
		return err
	}
	if err := b.in.client.Create(ctx, api.NewSnapshot(&v, name)); err != nil {
		return err
	}
	_, err := await.Until(ctx, b.in.client, name, func(s *api.Snapshot) (bool, error) { return s.Status.ReadyToUse, nil })
	return err
}

func (b *bench) deleteSnapshot(ctx context.Context, name string) error {
	s := &api.Snapshot{}
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: name}, s); err != nil {
		return err
	}
	if err := b.in.client.Delete(ctx, s); err != nil {
		return err
	}
	return await.Gone(ctx, b.in.client, s, nil)
}

func percentile(v []float64, p float64) float64 {
	if len(v) == 0 {
		return 0
	}
	v = slices.Sorted(slices.Values(v))
	return v[min(len(v)-1, int(float64(len(v))*p/100))]
}

// chains reads over growing chains of layers, each with its own blocks, in turn with a volume of a single layer, then
// deletes the snapshots.
func (b *bench) chains(ctx context.Context, name, dev string, size int64) error {
	const other = "one-layer"
	short, err := b.in.attachNew(ctx, other, "", size)
	if err != nil {
		return err
	}
	if err := errors.Join(b.fillSubject(ctx, short), b.createSnapshot(ctx, other, "only")); err != nil {
		return err
	}
	f, err := os.OpenFile(dev, os.O_RDWR|syscall.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	buf, err := syscall.Mmap(-1, 0, 1<<16, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return err
	}
	defer func() { _ = syscall.Munmap(buf) }()
	many := fmt.Sprintf("snapshots-%d", b.snaps)
	made, hundred := time.Duration(0), time.Duration(0)
	for i := 1; i <= b.snaps; i++ {
		for k := range int64(4) { // at another offset each time
			buf[0] = byte(i)
			if _, err := f.WriteAt(buf, (int64(i)*4+k)*7919%(size>>16)<<16); err != nil {
				return err
			}
		}
		began := time.Now()
		if err := b.createSnapshot(ctx, name, fmt.Sprintf("chain-%d", i)); err != nil {
			return err
		}
		made += time.Since(began)
		if i%100 == 0 {
			fmt.Fprintf(os.Stderr, "%d snapshots: %.0f ms each\n", i, (made-hundred).Seconds()*10)
			hundred = made
		}
		if i != 1 && i != 100 && i != b.snaps {
			continue
		}
		if err := b.in.awaitIdle(ctx); err != nil { // the digests of the layers follow in the background
			return err
		}
		took := map[string][]float64{}
		for range b.rounds {
			for _, d := range []string{short, dev} {
				v, err := b.fio(ctx, job{"randread-4k-qd32", "randread", "4k", "iops", 32}, d)
				if err != nil {
					return err
				}
				took[d] = append(took[d], v)
			}
		}
		b.addFigure("read-over-chain", fmt.Sprintf("%d layers", i), median(took[dev]), "IOPS", "1 layer", median(took[short]),
			"4 KiB random, queue depth 32, in turn")
	}
	if err := f.Close(); err != nil { // an open device is in use
		return err
	}
	began := time.Now()
	if err := b.in.detach(ctx, name); err != nil {
		return err
	}
	if _, err := b.in.attach(ctx, name); err != nil {
		return err
	}
	b.addFigure(many, "detach and attach", time.Since(began).Seconds(), "s", "", 0, "")
	b.addFigure(many, "create", made.Seconds(), "s", "", 0, "one after the other, each until it is ready")
	began = time.Now()
	last := began
	for i := 1; i <= b.snaps; i++ {
		if err := b.deleteSnapshot(ctx, fmt.Sprintf("chain-%d", i)); err != nil {
			return err
		}
		if i%100 == 0 {
			fmt.Fprintf(os.Stderr, "%d deleted: %.0f ms each\n", i, time.Since(last).Seconds()*10)
			last = time.Now()
		}
	}
	b.addFigure(many, "delete", time.Since(began).Seconds(), "s", "", 0, "one after the other; merges continue behind")
	if err := b.deleteSnapshot(ctx, "only"); err != nil {
		return err
	}
	if err := b.in.awaitIdle(ctx); err != nil { // keeps the merges out of the next figures
		return err
	}
	return errors.Join(b.in.detach(ctx, other), b.in.deleteVolume(ctx, other))
}
