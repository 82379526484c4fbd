package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// The file system of the section first-file.
const (
	fileTarget = "files"
	fileVolume = "files"
	fileSize   = 1 << 40 // of the volume
	fileCount  = 64      // of 1 MiB
)

// firstFile measures how long a user waits for one file of a backup of 1 TiB whose store is 20 ms away: in a volume
// that is restored at once, and in a mounted backup.
func (b *bench) firstFile(ctx context.Context) (err error) {
	store, err := newBucket()
	if err != nil {
		return err
	}
	defer store.server.Close()
	if err := b.createBucketTarget(ctx, fileTarget, store); err != nil {
		return err
	}
	room := &api.Setting{Value: "10000"} // for volumes larger than the disk; a mounted backup needs none
	room.Name = "storage-over-provisioning-percentage"
	if err := b.in.client.Create(ctx, room); err != nil {
		return err
	}
	want, url, err := b.fillFiles(ctx)
	if err != nil {
		return err
	}
	store.far.Store(true)
	defer store.far.Store(false)
	const what = "1 TiB, ext4 with 64 files of 1 MiB; each request of the store takes 20 ms"
	began := time.Now()
	v := &api.Volume{Spec: api.VolumeSpec{Size: fileSize, FromBackup: url}}
	v.Name = "files-restored"
	if err := b.in.client.Create(ctx, v); err != nil {
		return err
	}
	dev, err := b.in.attach(ctx, v.Name)
	if err != nil {
		return err
	}
	b.addFigure("backup-first-file", "restored volume: attached", time.Since(began).Seconds(), "s", "", 0, what)
	dir := filepath.Join(b.dir, "files-restored")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	began = time.Now()
	if err := unix.Mount(dev, dir, "ext4", unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount %s: %w", dev, err)
	}
	b.addFigure("backup-first-file", "restored volume: mounted", time.Since(began).Seconds(), "s", "", 0, "")
	began = time.Now()
	err = compareFile(filepath.Join(dir, "file-33"), want)
	b.addFigure("backup-first-file", "restored volume: first file", time.Since(began).Seconds(), "s", "", 0,
		"of 1 MiB, after the mount")
	if err := errors.Join(err, unix.Unmount(dir, 0)); err != nil {
		return err
	}
	if err := errors.Join(b.in.deleteVolume(ctx, v.Name), b.in.client.Delete(ctx, room)); err != nil {
		return err
	}

	began = time.Now()
	if _, err := runTool(ctx, b.in.drover, "backup", "mount", fileVolume, dir,
		"--kubeconfig", b.in.kubeconfig); err != nil {
		return err
	}
	err = compareFile(filepath.Join(dir, "file-34"), want)
	b.addFigure("backup-first-file", "mounted backup: first file", time.Since(began).Seconds(), "s", "", 0,
		"from the command on")
	_, uerr := runTool(ctx, b.in.drover, "backup", "unmount", dir, "--kubeconfig", b.in.kubeconfig)
	if err := errors.Join(err, uerr); err != nil {
		return err
	}
	store.far.Store(false)
	return b.forgetTarget(ctx, fileTarget)
}

// fillFiles makes the backup, and returns the content of each file.
func (b *bench) fillFiles(ctx context.Context) (content []byte, url string, err error) {
	dev, err := b.in.attachNew(ctx, fileVolume, "", fileSize)
	if err != nil {
		return nil, "", err
	}
	if _, err := runTool(ctx, "mkfs.ext4", "-q", "-E", "nodiscard", dev); err != nil {
		return nil, "", err
	}
	dir := filepath.Join(b.dir, "files")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, "", err
	}
	if err := unix.Mount(dev, dir, "ext4", 0, ""); err != nil {
		return nil, "", fmt.Errorf("mount %s: %w", dev, err)
	}
	content = make([]byte, 1<<20)
	fillRandom(content)
	for i := 0; err == nil && i < fileCount; i++ {
		err = os.WriteFile(filepath.Join(dir, fmt.Sprintf("file-%d", i)), content, 0o600)
	}
	if err := errors.Join(err, unix.Unmount(dir, 0)); err != nil {
		return nil, "", err
	}
	made, err := b.in.backUpTo(ctx, fileTarget, fileVolume, fileVolume, "")
	if err != nil {
		return nil, "", err
	}
	return content, made.Status.URL, b.in.deleteVolume(ctx, fileVolume)
}

func compareFile(path string, want []byte) error {
	got, err := os.ReadFile(path)
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("%s has other bytes than its backup", path)
	}
	return err
}

// bucketBackups measures backups into a bucket that is 20 ms away: the requests of an incremental one, a pod that
// starts in the middle of the backup of a detached volume, and the memory of two backups beside a restore.
func (b *bench) bucketBackups(ctx context.Context) error {
	store, err := newBucket()
	if err != nil {
		return err
	}
	defer store.server.Close()
	const target = "bucket"
	if err := b.createBucketTarget(ctx, target, store); err != nil {
		return err
	}
	store.far.Store(true)
	size := min(b.sizeMiB, 512) << 20
	volumes := []string{"in-bucket", "in-bucket-too"}
	for _, name := range volumes {
		dev, err := b.in.attachNew(ctx, name, "", size)
		if err != nil {
			return err
		}
		if err := errors.Join(fillDevice(dev, size, size), b.in.detach(ctx, name)); err != nil {
			return err
		}
	}
	dev, err := b.attachDuringBackup(ctx, target, volumes[0])
	if err != nil {
		return err
	}
	if _, err := changePart(dev, size); err != nil {
		return err
	}
	packs, requests := store.packs.Load(), store.requests.Load()
	if _, err := b.in.backUpTo(ctx, target, "bucket-incremental", volumes[0], ""); err != nil {
		return err
	}
	b.addFigure("backup-incremental-requests", "1 % changed", float64(store.requests.Load()-requests), "requests", "packs",
		float64(store.packs.Load()-packs), "all requests of the node meanwhile")
	if err := b.memoryOfThree(ctx, target, volumes); err != nil {
		return err
	}
	store.far.Store(false)
	return errors.Join(b.forgetTarget(ctx, target), b.in.deleteVolume(ctx, volumes[0]), b.in.deleteVolume(ctx, volumes[1]))
}

// attachDuringBackup attaches a volume in the middle of its first backup, which it waits for.
func (b *bench) attachDuringBackup(ctx context.Context, target, volume string) (dev string, err error) {
	const name = "bucket-first"
	if err := b.in.requestBackup(ctx, target, name, volume, ""); err != nil {
		return "", err
	}
	if _, err := await.Until(ctx, b.in.client, name, func(o *api.Backup) (bool, error) {
		return o.Status.State == api.BackupInProgress || o.Ended(), nil
	}); err != nil {
		return "", err
	}
	began := time.Now()
	if dev, err = b.in.attach(ctx, volume); err != nil {
		return "", err
	}
	took := time.Since(began)
	o := &api.Backup{}
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: name}, o); err != nil {
		return "", err
	}
	b.addFigure("backup-attach", "during the backup", took.Seconds(), "s", "", 0,
		fmt.Sprintf("the backup is %s at %d %%", o.Status.State, o.Status.Progress))
	_, err = b.in.awaitBackup(ctx, name)
	return dev, err
}

// memoryOfThree measures the memory of the node while it makes two full backups and a restore.
func (b *bench) memoryOfThree(ctx context.Context, target string, volumes []string) error {
	first := &api.Backup{}
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: "bucket-first"}, first); err != nil {
		return err
	}
	s, err := b.in.measure(func() error {
		group, ctx := errgroup.WithContext(ctx)
		for _, v := range volumes {
			group.Go(func() error {
				_, err := b.in.backUpTo(ctx, target, v+"-full", v, api.BackupFull)
				return err
			})
		}
		group.Go(func() error {
			return b.in.importFrom(ctx, "of-bucket", api.SourceRestore,
				map[string]string{api.RestoreBackupURL: first.Status.URL})
		})
		return group.Wait()
	})
	if err != nil {
		return err
	}
	b.addFigure("backup-rss", "two backups and a restore", float64(s.peak)/1024, "MiB", "", 0, "")
	return b.in.deleteImage(ctx, "of-bucket")
}
