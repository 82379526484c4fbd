package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

const (
	backupVolume = "backed-up"
	memoryBudget = 256 // MiB for all backups and restores of a node
)

// backups measures backups into a folder of the same disk. Each figure has a reference in the same run.
func (b *bench) backups(ctx context.Context) (err error) {
	size := b.sizeMiB << 20
	rounds := 1
	if b.long {
		size, rounds = 2<<30, b.rounds
	}
	folder := filepath.Join(b.dir, "backups")
	if err := os.Mkdir(folder, 0o700); err != nil {
		return err
	}
	if err := b.in.createTarget(ctx, "file://"+folder); err != nil {
		return err
	}
	dev, err := b.firstBackups(ctx, size, rounds, folder)
	if err != nil {
		return err
	}
	for _, part := range []struct {
		name    string
		measure func() error
	}{
		{"incremental", func() error { return b.incremental(ctx, dev, size, folder) }},
		{"restore", func() error { return b.restores(ctx, size, rounds) }},
		{"shared", func() error { return b.secondOfImage(ctx, size, folder) }},
		{"day", func() error { return b.day(ctx) }},
		{"guest", func() error { return b.guestDuringBackup(ctx, dev) }},
		{"sweep", func() error { return b.sweep(ctx, folder) }},
	} {
		if !b.isWanted("backups", part.name) {
			continue
		}
		if err := part.measure(); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return errors.Join(b.in.removeTarget(ctx), b.in.deleteVolume(ctx, backupVolume), os.RemoveAll(folder))
}

// createTarget makes the default backup target and waits until it is available.
func (in *instance) createTarget(ctx context.Context, url string) error {
	t := &api.BackupTarget{Spec: api.BackupTargetSpec{BackupTargetURL: url}}
	t.Name = api.DefaultBackupTarget
	if err := in.client.Create(ctx, t); err != nil {
		return err
	}
	_, err := await.Until(ctx, in.client, t.Name, func(t *api.BackupTarget) (bool, error) {
		return t.Status.Available, nil
	})
	return err
}

// removeTarget deletes the default backup target and the objects of its backups.
func (in *instance) removeTarget(ctx context.Context) error {
	t := &api.BackupTarget{}
	t.Name = api.DefaultBackupTarget
	if err := in.client.Delete(ctx, t); err != nil {
		return err
	}
	var list api.BackupList
	if err := in.client.List(ctx, &list); err != nil {
		return err
	}
	for i := range list.Items {
		if err := in.deleteBackup(ctx, list.Items[i].Name); err != nil {
			return err
		}
	}
	return nil
}

func (in *instance) deleteBackup(ctx context.Context, name string) error {
	b := &api.Backup{}
	if err := in.client.Get(ctx, client.ObjectKey{Name: name}, b); err != nil {
		return err
	}
	if err := in.client.Delete(ctx, b); err != nil {
		return err
	}
	return await.Gone(ctx, in.client, b, nil)
}

// backUp makes a backup of a volume, with a new snapshot, in the default target.
func (in *instance) backUp(ctx context.Context, name, volume, mode string) (*api.Backup, error) {
	return in.backUpTo(ctx, api.DefaultBackupTarget, name, volume, mode)
}

func (in *instance) backUpTo(ctx context.Context, target, name, volume, mode string) (*api.Backup, error) {
	if err := in.requestBackup(ctx, target, name, volume, mode); err != nil {
		return nil, err
	}
	return in.awaitBackup(ctx, name)
}

func (in *instance) requestBackup(ctx context.Context, target, name, volume, mode string) error {
	o := &api.Backup{Spec: api.BackupSpec{BackupTargetName: target, Volume: volume, BackupMode: mode}}
	o.Name = name
	return in.client.Create(ctx, o)
}

func (in *instance) awaitBackup(ctx context.Context, name string) (*api.Backup, error) {
	return await.Until(ctx, in.client, name, func(b *api.Backup) (bool, error) {
		if b.Status.State == api.BackupError {
			return true, fmt.Errorf("backup %s: %s", name, b.Status.Message)
		}
		return b.Status.State == api.BackupCompleted, nil
	})
}

// nodeCost is the cost of some work of an instance.
type nodeCost struct {
	seconds, cpu float64
	peak         int64 // resident KiB of the process with the node role
}

// measure runs work of the process with the node role.
func (in *instance) measure(do func() error) (s nodeCost, err error) {
	pid := []int{in.cmd.Process.Pid}
	before, err := ticks(pid)
	if err != nil {
		return s, err
	}
	stop, peak := make(chan struct{}), make(chan int64)
	go func() {
		var most int64
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			if rss, _, err := resident(pid); err == nil {
				most = max(most, rss)
			}
			select {
			case <-tick.C:
			case <-stop:
				tick.Stop()
				peak <- most
				return
			}
		}
	}()
	began := time.Now()
	err = do()
	s.seconds = time.Since(began).Seconds()
	close(stop)
	s.peak = <-peak
	after, terr := ticks(pid)
	s.cpu = float64(after-before) / 100
	return s, errors.Join(err, terr)
}

// firstBackups measures first backups of volumes with random bytes, and returns the device of the last one.
func (b *bench) firstBackups(ctx context.Context, size int64, rounds int, folder string) (dev string, err error) {
	var copied, hashed, restic, ours, cpu []float64
	var peak int64
	for i := range rounds {
		raw := filepath.Join(b.dir, "backup.raw")
		if err := randomFile(raw, size, false); err != nil {
			return "", err
		}
		c, h, err := b.copyAndHash(ctx, raw)
		if err != nil {
			return "", err
		}
		copied, hashed = append(copied, c), append(hashed, h)
		if _, err := exec.LookPath("restic"); err == nil {
			r, err := b.resticBackup(ctx, raw)
			if err != nil {
				return "", err
			}
			restic = append(restic, r)
		}
		if err := os.Remove(raw); err != nil {
			return "", err
		}
		if i > 0 {
			if err := b.in.deleteVolume(ctx, backupVolume); err != nil {
				return "", err
			}
		}
		if dev, err = b.in.attachNew(ctx, backupVolume, "", size); err != nil {
			return "", err
		}
		if err := fillDevice(dev, size, size); err != nil {
			return "", err
		}
		unix.Sync()
		s, err := b.in.measure(func() error {
			_, err := b.in.backUp(ctx, fmt.Sprintf("first-%d", i), backupVolume, "")
			return err
		})
		if err != nil {
			return "", err
		}
		ours, cpu, peak = append(ours, s.seconds), append(cpu, s.cpu), max(peak, s.peak)
	}
	const name, references = "backup-first", "cp, sync, SHA-256"
	what := fmt.Sprintf("%d MiB of random bytes", size>>20)
	b.addFigure(name, "cp, sync", median(copied), "s", "", 0, what+", with --sparse=always")
	b.addFigure(name, references, median(copied)+median(hashed), "s", "", 0, "and one SHA-256 pass over the file")
	if len(restic) > 0 {
		b.addFigure(name, "restic", median(restic), "s", references, median(copied)+median(hashed), "")
	} else {
		b.addFigure(name, "restic", 0, "s", "", 0, "not installed")
	}
	b.addFigure(name, "drover", median(ours), "s", references, median(copied)+median(hashed),
		"from the request on, durable")
	b.addFigure("backup-first-2-gib", "drover", median(ours)*float64(2<<30)/float64(size), "s", "", 0,
		"at the rate of "+what)
	if len(restic) > 0 {
		b.addFigure("backup-first-to-restic", "drover", median(ours), "s", "restic", median(restic), "")
	}
	b.addFigure("backup-first-rate", "drover", float64(size)/1e6/median(ours), "MB/s", "cp, sync",
		float64(size)/1e6/median(copied), "")
	b.addFigure("backup-first-cpu", "drover", median(cpu), "s", "", 0, "processor time of the node's process")
	b.addFigure("backup-rss", "first backup", float64(peak)/1024, "MiB", "", 0,
		fmt.Sprintf("the node's process; %d MiB are for backups and restores", memoryBudget))
	return dev, nil
}

// copyAndHash times a copy of a file to the disk, and a SHA-256 of the file.
func (b *bench) copyAndHash(ctx context.Context, raw string) (copied, hashed float64, err error) {
	out := raw + ".copy"
	if err := dropPageCache(raw); err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if _, err := runTool(ctx, "sh", "-c", "cp --sparse=always "+raw+" "+out+" && sync "+out); err != nil {
		return 0, 0, err
	}
	copied = time.Since(began).Seconds()
	if err := errors.Join(os.Remove(out), dropPageCache(raw)); err != nil {
		return 0, 0, err
	}
	f, err := os.Open(raw)
	if err != nil {
		return 0, 0, err
	}
	defer f.Close()
	began = time.Now()
	_, err = io.CopyBuffer(struct{ io.Writer }{sha256.New()}, struct{ io.Reader }{f}, make([]byte, 1<<20))
	return copied, time.Since(began).Seconds(), err
}

// resticBackup times restic's backup of a file into a new repository.
func (b *bench) resticBackup(ctx context.Context, raw string) (float64, error) {
	folder := filepath.Join(b.dir, "restic")
	restic := "RESTIC_PASSWORD=bench restic --no-cache --quiet --repo " + folder
	if _, err := runTool(ctx, "sh", "-c", restic+" init"); err != nil {
		return 0, err
	}
	if err := dropPageCache(raw); err != nil {
		return 0, err
	}
	began := time.Now()
	if _, err := runTool(ctx, "sh", "-c", restic+" backup "+raw); err != nil {
		return 0, err
	}
	return time.Since(began).Seconds(), os.RemoveAll(folder)
}

// objects counts the objects below a folder, and their bytes.
func objects(folder string) (count, bytes int64, err error) {
	err = filepath.Walk(folder, func(_ string, st os.FileInfo, err error) error {
		if err == nil && st.Mode().IsRegular() {
			count, bytes = count+1, bytes+st.Size()
		}
		return err
	})
	return count, bytes, err
}

// changePart changes 1 % of a volume, in whole chunks, and returns how many bytes these are.
func changePart(dev string, size int64) (changed int64, err error) {
	const chunk = 2 << 20
	n := max(size/chunk/100, 1)
	f, err := os.OpenFile(dev, os.O_WRONLY, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	buf := make([]byte, chunk)
	for i := range n {
		fillRandom(buf)
		if _, err := f.WriteAt(buf, i*(size/chunk/n)*chunk); err != nil {
			return 0, err
		}
	}
	return n * chunk, f.Sync()
}

// incremental measures a backup after a change of 1 % of a volume, in whole chunks.
func (b *bench) incremental(ctx context.Context, dev string, size int64, folder string) error {
	changed, err := changePart(dev, size)
	if err != nil {
		return err
	}
	before, bytesBefore, err := objects(folder)
	if err != nil {
		return err
	}
	s, err := b.in.measure(func() error {
		_, err := b.in.backUp(ctx, "incremental", backupVolume, "")
		return err
	})
	if err != nil {
		return err
	}
	after, bytesAfter, err := objects(folder)
	if err != nil {
		return err
	}
	b.addFigure("backup-incremental", "1 % changed", s.seconds, "s", "", 0, "from the request on, durable")
	b.addFigure("backup-incremental-bytes", "1 % changed", float64(bytesAfter-bytesBefore)/1e6, "MB", "changed",
		float64(changed)/1e6, "growth of the store")
	b.addFigure("backup-incremental-objects", "1 % changed", float64(after-before), "objects", "", 0,
		"one PUT each in a bucket")
	s, err = b.in.measure(func() error {
		_, err := b.in.backUp(ctx, "unchanged", backupVolume, "")
		return err
	})
	b.addFigure("backup-incremental", "unchanged", s.seconds, "s", "", 0, "")
	return err
}

// fillRandom fills memory with bytes that do not compress.
func fillRandom(p []byte) {
	var seed [32]byte
	for i := range seed {
		seed[i] = byte(rand.Uint32())
	}
	_, _ = rand.NewChaCha8(seed).Read(p) // never fails
}

// restores measures the restore of the first backup into an image.
func (b *bench) restores(ctx context.Context, size int64, rounds int) error {
	first := &api.Backup{}
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: "first-0"}, first); err != nil {
		return err
	}
	raw := filepath.Join(b.dir, "restore.raw")
	if err := randomFile(raw, size, false); err != nil {
		return err
	}
	var copied, ours, cpu []float64
	var peak int64
	for i := range rounds {
		c, _, err := b.copyAndHash(ctx, raw)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("restored-%d", i)
		s, err := b.in.measure(func() error {
			return b.in.importFrom(ctx, name, api.SourceRestore,
				map[string]string{api.RestoreBackupURL: first.Status.URL})
		})
		if err != nil {
			return err
		}
		copied, ours, cpu, peak = append(copied, c), append(ours, s.seconds), append(cpu, s.cpu), max(peak, s.peak)
		if err := b.in.deleteImage(ctx, name); err != nil {
			return err
		}
	}
	mb := float64(size) / 1e6
	b.addFigure("backup-restore", "cp, sync", mb/median(copied), "MB/s", "", 0, "a file of random bytes of this size")
	b.addFigure("backup-restore", "drover", mb/median(ours), "MB/s", "cp, sync", mb/median(copied),
		"into an image, verified, with digests; durable")
	b.addFigure("backup-restore-cpu", "drover", median(cpu), "s", "", 0, "processor time of the node's process")
	b.addFigure("backup-rss", "restore", float64(peak)/1024, "MiB", "", 0, "")
	return os.Remove(raw)
}

// secondOfImage measures what the second of two volumes of one image adds to the store.
func (b *bench) secondOfImage(ctx context.Context, size int64, folder string) error {
	const image = "backed-up-image"
	size /= 2
	raw := filepath.Join(b.dir, "image.raw")
	if err := randomFile(raw, size, false); err != nil {
		return err
	}
	if err := errors.Join(b.in.importFile(ctx, image, raw), os.Remove(raw)); err != nil {
		return err
	}
	for i, subject := range []string{"first volume of an image", "second volume of the image"} {
		name := fmt.Sprintf("%s-%d", image, i)
		if _, err := b.in.attachNew(ctx, name, image, size); err != nil {
			return err
		}
		_, before, err := objects(folder)
		if err != nil {
			return err
		}
		if _, err := b.in.backUp(ctx, name, name, ""); err != nil {
			return err
		}
		_, after, err := objects(folder)
		if err != nil {
			return err
		}
		b.addFigure("backup-shared-bytes", subject, float64(after-before)/1e6, "MB", "image", float64(size)/1e6, "")
		if err := b.in.deleteVolume(ctx, name); err != nil {
			return err
		}
	}
	return b.in.deleteImage(ctx, image)
}

// guestDuringBackup measures a guest's I/O without backups, while full backups follow each other, and while the
// snapshots of as many backups follow each other: each backup takes one, and the guest pays for it.
func (b *bench) guestDuringBackup(ctx context.Context, dev string) error {
	n := 0
	backUp := func(context.Context) error {
		n++
		_, err := b.in.backUp(ctx, fmt.Sprintf("guest-%d", n), backupVolume, api.BackupFull)
		return err
	}
	for _, j := range []job{jobs[0], jobs[4]} { // reads one at a time, writes at depth 32
		var without, snapshots, during []float64
		for range b.rounds {
			v, err := b.fio(ctx, j, dev)
			if err != nil {
				return err
			}
			without = append(without, v)
			began, first := time.Now(), n
			if v, err = b.fioDuring(ctx, j, dev, backUp); err != nil {
				return err
			}
			during = append(during, v)
			each := time.Since(began) / time.Duration(n-first)
			v, err = b.fioDuring(ctx, j, dev, func(stop context.Context) error {
				n++
				name := fmt.Sprintf("guest-%d", n)
				err := b.createSnapshot(ctx, backupVolume, name)
				select {
				case <-stop.Done():
				case <-time.After(each):
				}
				return errors.Join(err, b.deleteSnapshot(ctx, name))
			})
			if err != nil {
				return err
			}
			snapshots = append(snapshots, v)
		}
		name, base := "backup-guest-"+j.name, median(without)
		b.addFigure(name, "no backup", base, j.unit, "", 0, "")
		b.addFigure(name, "snapshots alone", median(snapshots), j.unit, "no backup", base, "")
		b.addFigure(name, "during full backups", median(during), j.unit, "no backup", base, "")
	}
	return nil
}

// fioDuring runs a round of a job while calls of work follow each other. The context of work ends with the round.
func (b *bench) fioDuring(ctx context.Context, j job, dev string, work func(context.Context) error) (float64, error) {
	during, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		for {
			if err := work(during); err != nil || during.Err() != nil {
				ended <- err
				return
			}
		}
	}()
	v, err := b.fio(ctx, j, dev)
	stop()
	return v, errors.Join(err, <-ended)
}

// sweep deletes all backups of the volume, and waits until the space is free.
func (b *bench) sweep(ctx context.Context, folder string) error {
	_, before, err := objects(folder)
	if err != nil {
		return err
	}
	var list api.BackupList
	if err := b.in.client.List(ctx, &list, client.MatchingLabels{api.LabelVolume: backupVolume}); err != nil {
		return err
	}
	var t *api.BackupTarget
	cost, err := b.in.measure(func() error {
		began := time.Now()
		for i := range list.Items {
			if err := b.in.deleteBackup(ctx, list.Items[i].Name); err != nil {
				return err
			}
		}
		b.addFigure("backup-delete", fmt.Sprintf("%d backups", len(list.Items)), time.Since(began).Seconds(), "s", "", 0, "")
		t, err = await.Until(ctx, b.in.client, api.DefaultBackupTarget, func(t *api.BackupTarget) (bool, error) {
			last := t.Status.LastSweep
			return t.Status.SweepRequested == nil && last != nil && !last.EndedAt.Time.Before(began.Truncate(time.Second)), nil
		})
		return err
	})
	if err != nil {
		return err
	}
	_, after, err := objects(folder)
	if err != nil {
		return err
	}
	b.addFigure("backup-sweep", "deletion to free space", cost.seconds, "s", "", 0,
		"a sweep waits 30 s for further deletions")
	b.addFigure("backup-sweep-cpu", "deletion to free space", cost.cpu, "s", "", 0, "processor time of the node's process")
	b.addFigure("backup-sweep-freed", "bytes", float64(before-after)/1e6, "MB", "in the store", float64(before)/1e6,
		t.Status.LastSweep.Message)
	return nil
}
