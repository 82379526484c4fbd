package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// rebuilds adds a third replica to attached volumes with two replicas: with dense content, with every second block of 4
// KiB, and with 100 empty snapshots. As baselines cp and rsync copy the same content within the disk.
func (b *bench) rebuilds(ctx context.Context, others []*other) error {
	errs := []error{b.copies(ctx)}
	for _, kind := range []string{"dense", "fragmented"} {
		errs = append(errs, b.fullRebuild(ctx, others, kind))
	}
	return errors.Join(append(errs, b.manySnapshots(ctx, others))...)
}

// copies measures a durable copy of a file of the volume's size.
func (b *bench) copies(ctx context.Context) error {
	from, to := filepath.Join(b.dir, "copy-from"), filepath.Join(b.dir, "copy-to")
	defer func() { _ = os.Remove(from) }()
	if err := b.fillSubject(ctx, from); err != nil {
		return err
	}
	commands := map[string]string{"cp": "cp --sparse=never --reflink=never " + from + " " + to + " && sync " + to}
	if _, err := exec.LookPath("rsync"); err == nil {
		commands["rsync"] = "rsync -W --inplace " + from + " " + to + " && sync " + to
	}
	for _, name := range []string{"cp", "rsync"} {
		var took []float64
		for range b.rounds {
			if commands[name] == "" {
				break
			}
			if err := dropPageCache(from); err != nil {
				return err
			}
			began := time.Now()
			if _, err := runTool(ctx, "sh", "-c", commands[name]); err != nil {
				return err
			}
			took = append(took, float64(b.sizeMiB<<20)/1e6/time.Since(began).Seconds())
			if err := os.Remove(to); err != nil {
				return err
			}
		}
		if len(took) == 0 {
			continue
		}
		b.addFigure("rebuild-full-dense", name, median(took), "MB/s", "", 0,
			"a file of that size, read from the disk and written to it")
		if name == "cp" {
			b.copied = median(took)
		}
	}
	return nil
}

// fullRebuild adds a third replica to a volume, several times.
func (b *bench) fullRebuild(ctx context.Context, others []*other, kind string) error {
	name := "r-full-" + kind
	two, three := []string{b.in.node, others[0].name}, []string{b.in.node, others[0].name, others[1].name}
	dev, err := b.attachReplicated(ctx, name, two, b.sizeMiB<<20)
	if err != nil {
		return err
	}
	bytes := b.sizeMiB << 20
	if kind == "dense" {
		err = b.fillSubject(ctx, dev)
	} else {
		bytes /= 2
		err = b.fragment(ctx, dev)
	}
	if err != nil {
		return err
	}
	var rates, all []float64
	for range b.rounds {
		copying, took, err := b.measureThird(ctx, name, two, three)
		if err != nil {
			return err
		}
		rates, all = append(rates, float64(bytes)/1e6/copying), append(all, took)
	}
	note := fmt.Sprintf("of data, from its first contact; %.1f s with the time until it begins; three replicas on "+
		"one disk", median(all))
	if kind == "dense" {
		limit, what := b.copied, "cp"
		if b.loopback > 0 && b.loopback < limit {
			limit, what = b.loopback, "loopback"
		}
		b.addFigure("rebuild-full-"+kind, "drover", median(rates), "MB/s", what, limit, note)
	} else {
		limit, err := b.fragments(ctx)
		if err != nil {
			return err
		}
		what := "plain-file"
		if limit > 200 {
			limit, what = 200, "200 MB/s"
		}
		b.addFigure("rebuild-full-"+kind, "drover", median(rates), "MB/s", what, limit, note)
	}
	return b.in.deleteVolume(ctx, name)
}

// fragments measures how fast the disk takes every second block of 4 KiB of a new file, and how fast cp copies the
// file.
func (b *bench) fragments(ctx context.Context) (float64, error) {
	file := filepath.Join(b.dir, "fragments")
	var rates, copies []float64
	for range b.rounds {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			return 0, err
		}
		if err := os.Truncate(file, b.sizeMiB<<20); err != nil {
			return 0, err
		}
		began := time.Now()
		if err := b.fragment(ctx, file); err != nil {
			return 0, err
		}
		rates = append(rates, float64(b.sizeMiB<<20/2)/1e6/time.Since(began).Seconds())
		if err := dropPageCache(file); err != nil {
			return 0, err
		}
		to := file + "-copy"
		began = time.Now()
		if _, err := runTool(ctx, "sh", "-c", "cp --sparse=auto --reflink=never "+file+" "+to+" && sync "+to); err != nil {
			return 0, err
		}
		copies = append(copies, float64(b.sizeMiB<<20/2)/1e6/time.Since(began).Seconds())
		if err := errors.Join(os.Remove(file), os.Remove(to)); err != nil {
			return 0, err
		}
	}
	b.addFigure("rebuild-full-fragmented", "cp", median(copies), "MB/s", "", 0,
		"such a file, read from the disk and written to it")
	b.addFigure("rebuild-full-fragmented", "plain-file", median(rates), "MB/s", "", 0,
		"a new file on the disk, written so by fio")
	return median(rates), nil
}

// fragment writes every second block of 4 KiB.
func (b *bench) fragment(ctx context.Context, path string) error {
	size := strconv.FormatInt(b.sizeMiB, 10) + "m"
	_, err := runTool(ctx, "fio", "--name=fill", "--filename="+path, "--rw=write:4k", "--bs=4k", "--iodepth=32",
		"--direct=1", "--ioengine=libaio", "--size="+size, "--io_size="+strconv.FormatInt(b.sizeMiB<<20/2, 10),
		"--end_fsync=1")
	return err
}

// measureThird adds a third replica to a volume and removes the replica again. measureThird returns the seconds since
// the engine reported the rebuild, and since the change of the spec.
func (b *bench) measureThird(ctx context.Context, name string, two, three []string) (copying, took float64, err error) {
	w := b.watchRebuild(ctx, name)
	began := time.Now()
	err = b.setNodes(ctx, name, three...)
	if err == nil {
		err = b.awaitMembers(ctx, name, 3)
	}
	done := time.Now()
	if err := errors.Join(err, w.stopWatching()); err != nil {
		return 0, 0, err
	}
	if err := b.setNodes(ctx, name, two...); err != nil {
		return 0, 0, err
	}
	if err := b.awaitMembers(ctx, name, 2); err != nil {
		return 0, 0, err
	}
	if err := b.replicasLeft(ctx, name, 2); err != nil {
		return 0, 0, err
	}
	return w.secondsUntil(done), done.Sub(began).Seconds(), nil
}

// replicasLeft waits until a volume has at most n replicas, so that the replica of a former round is deleted.
func (b *bench) replicasLeft(ctx context.Context, volume string, n int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		var list api.ReplicaList
		if err := b.in.client.List(ctx, &list, client.MatchingLabels{api.LabelVolume: api.LabelValue(volume)}); err != nil {
			return err
		}
		if len(list.Items) <= n {
			return nil
		}
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("volume %s keeps %d replicas: %w", volume, len(list.Items), err)
		}
	}
}

// emptySnapshots is the number of empty snapshots.
const emptySnapshots = 100

// manySnapshots compares rebuilds of two equal volumes. The second has 100 empty snapshots.
func (b *bench) manySnapshots(ctx context.Context, others []*other) error {
	two, three := []string{b.in.node, others[0].name}, []string{b.in.node, others[0].name, others[1].name}
	names := []string{"r-none", "r-hundred"}
	for _, name := range names {
		dev, err := b.attachReplicated(ctx, name, two, 64<<20)
		if err != nil {
			return err
		}
		if err := fillDevice(dev, 16<<20, 16<<20); err != nil {
			return err
		}
	}
	for i := range emptySnapshots {
		if err := b.createSnapshot(ctx, names[1], fmt.Sprintf("empty-%d", i)); err != nil {
			return err
		}
	}
	took := map[string][]float64{}
	for range b.rounds {
		for _, name := range names {
			_, t, err := b.measureThird(ctx, name, two, three)
			if err != nil {
				return err
			}
			took[name] = append(took[name], t)
		}
	}
	with, without := median(took[names[1]]), median(took[names[0]])
	b.addFigure("rebuild-100-empty-snapshots", "added", with-without, "s", "", 0,
		fmt.Sprintf("%.2f s from the wish with them, %.2f s without, 16 MiB of data", with, without))
	var list api.SnapshotList
	if err := b.in.client.List(ctx, &list); err != nil {
		return err
	}
	for _, s := range list.Items {
		if s.Spec.Volume != names[1] || !strings.HasPrefix(s.Name, "empty-") {
			continue
		}
		if err := b.deleteSnapshot(ctx, s.Name); err != nil {
			return err
		}
	}
	return nil
}

// watch records the first report of a rebuild.
type watch struct {
	began  time.Time
	first  atomic.Int64 // Unix nanoseconds
	cancel context.CancelFunc
	done   chan struct{}
}

func (b *bench) watchRebuild(ctx context.Context, volume string) *watch {
	ctx, cancel := context.WithCancel(ctx)
	w := &watch{began: time.Now(), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		a, err := await.Until(ctx, b.in.client, volume, func(a *api.Attachment) (bool, error) {
			return len(a.Status.Rebuilds) > 0, nil
		})
		if err == nil && a != nil {
			w.first.Store(time.Now().UnixNano())
		}
	}()
	return w
}

// stopWatching stops watching.
func (w *watch) stopWatching() error {
	w.cancel()
	<-w.done
	w.first.CompareAndSwap(0, w.began.UnixNano()) // the rebuild ended before the Attachment reported it
	return nil
}

// secondsUntil returns the seconds since the first report.
func (w *watch) secondsUntil(until time.Time) float64 {
	return until.Sub(time.Unix(0, w.first.Load())).Seconds()
}
