package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/tree"
	"drover.io/drover/backups/tags"
	"drover.io/drover/backups/target/folder"
)

const (
	foundPerVolume = 100 // backups of each volume in the store
	foundPerImage  = 200 // backups in the store for each backup of an image
)

// foundStore is a store with the backups of another cluster.
type foundStore struct {
	dir    string
	r      *repo.Repository
	root   blob.ID // of the content that all backups have
	images int     // backups of images
}

// found measures a new cluster that is pointed at a store with n backups: until each has an object, at rest, with a
// further backup, after a restart, and when a tenth of the backups is deleted.
func (b *bench) found(ctx context.Context, n int) (err error) {
	dir, err := os.MkdirTemp(b.options.dir, "drover-found.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	store, err := newFoundStore(ctx, dir)
	if err != nil {
		return fmt.Errorf("make the store: %w", err)
	}
	if err := store.fill(ctx, n); err != nil {
		return fmt.Errorf("fill the store: %w", err)
	}
	in, err := startInstance(ctx, b.drover, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.stop()) }()
	var newest time.Duration
	for _, step := range []struct {
		subject, note string
		do            func() error
	}{
		{"listed", fmt.Sprintf("%d backups, each with an object", n), func() error {
			began := time.Now()
			if err := in.createTarget(ctx, "file://"+store.dir); err != nil {
				return err
			}
			if err := in.awaitNewest(ctx, n); err != nil {
				return err
			}
			newest = time.Since(began)
			return in.awaitFound(ctx, n-store.images, store.images)
		}},
		{"listed again", "", func() error { return in.syncTarget(ctx) }},
		{"one more", "", func() error {
			if err := store.save(ctx, n, n); err != nil {
				return err
			}
			if err := in.syncTarget(ctx); err != nil {
				return err
			}
			return in.awaitFound(ctx, n+1-store.images, store.images)
		}},
		{"a tenth deleted", "at once", func() error { return in.deleteFound(ctx, n/10) }},
	} {
		if err := awaitQuiet(ctx, in.cmd.Process.Pid); err != nil {
			return err
		}
		if err := b.measureFound(ctx, in, step.subject, step.note, step.do); err != nil {
			return fmt.Errorf("%s: %w", step.subject, err)
		}
	}
	b.addFigure("backups-found", "newest", newest.Seconds(), "s", "", 0, "the newest of each volume has an object")
	if err := in.stop(); err != nil {
		return err
	}
	again, err := startInstance(ctx, b.drover, dir)
	if err != nil {
		return err
	}
	in = again
	if err := errors.Join(in.syncTarget(ctx), awaitQuiet(ctx, in.cmd.Process.Pid)); err != nil {
		return err
	}
	spent, err := ticks([]int{in.cmd.Process.Pid})
	if err != nil {
		return err
	}
	b.addFigure("backups-found-cpu", "restarted", float64(spent)/100, "s", "", 0, "of the process from its start on")
	return nil
}

// measureFound records the figures of a step, with the work that follows in the background.
func (b *bench) measureFound(ctx context.Context, in *instance, subject, note string, do func() error) error {
	_, before, err := in.countBackups(ctx)
	if err != nil {
		return err
	}
	var took time.Duration
	cost, err := in.measure(func() error {
		began := time.Now()
		if err := do(); err != nil {
			return err
		}
		took = time.Since(began)
		return awaitQuiet(ctx, in.cmd.Process.Pid)
	})
	if err != nil {
		return err
	}
	_, after, err := in.countBackups(ctx)
	if err != nil {
		return err
	}
	b.addFigure("backups-found", subject, took.Seconds(), "s", "", 0, note)
	b.addFigure("backups-found-cpu", subject, cost.cpu, "s", "", 0, "processor time, until the process rests")
	b.addFigure("backups-found-rss", subject, float64(cost.peak)/1024, "MiB", "", 0, "most")
	b.addFigure("backups-found-writes", subject, float64(after-before), "writes", "", 0, "of all objects")
	return nil
}

func newFoundStore(ctx context.Context, dir string) (*foundStore, error) {
	s := &foundStore{dir: filepath.Join(dir, "store")}
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return nil, err
	}
	files, err := folder.Open(ctx, s.dir)
	if err != nil {
		return nil, err
	}
	if err := repo.Init(ctx, files, api.PublishedPassword, repo.Options{}); err != nil {
		return nil, err
	}
	if s.r, err = repo.Open(ctx, files, api.PublishedPassword,
		repo.Options{Cache: filepath.Join(dir, "store-cache")}); err != nil {
		return nil, err
	}
	blobs, err := s.r.LoadIndex(ctx)
	if err != nil {
		return nil, err
	}
	lock, err := s.r.Lock(ctx, repo.Shared)
	if err != nil {
		return nil, err
	}
	w, err := repo.NewWriter(ctx, blobs, repo.WriterOptions{Lock: lock})
	if err != nil {
		return nil, err
	}
	body := make([]byte, 1000)
	fillRandom(body)
	id, _, err := w.Add(ctx, blob.Data, body)
	if err != nil {
		return nil, err
	}
	if s.root, err = w.AddTree(ctx, []tree.Node{{Name: "data", Type: tree.File, Size: int64(len(body)),
		Content: []blob.ID{id}}}); err != nil {
		return nil, err
	}
	return s, errors.Join(w.Flush(ctx), w.Close(), blobs.Close(), lock.Close(ctx))
}

// fill saves n backups of volumes and images.
func (s *foundStore) fill(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range n {
		if i%foundPerImage == 0 {
			s.images++
		}
		group.Go(func() error { return s.save(ctx, i, n) })
	}
	return group.Wait()
}

// save saves backup i of n, of a volume or an image.
func (s *foundStore) save(ctx context.Context, i, n int) error {
	at := time.Now().Add(time.Duration(i-n) * time.Minute).Truncate(time.Second)
	facts := tags.Facts{Backup: fmt.Sprintf("found-%d", i), Object: api.NewUID(), VolumeSize: 10 << 30,
		Image: fmt.Sprintf("image-%d", i/foundPerImage), ImageDigest: strings.Repeat("ab", 32),
		ImageChecksum: strings.Repeat("cd", 64), Uploaded: 123 << 20}
	if i%foundPerImage != 0 || i == n {
		facts.Volume, facts.VolumeUID, facts.Mode = fmt.Sprintf("volume-%d", i/foundPerVolume), api.NewUID(),
			api.BackupIncremental
		facts.Snapshot, facts.SnapshotUID = fmt.Sprintf("snapshot-%d", i), api.NewUID()
		facts.SnapshotCreated = at.UTC().Format(time.RFC3339)
		facts.Labels = map[string]string{"recurring-job": "daily"}
		facts.Record = &api.RecordedVolume{StorageClassName: "standard"}
	}
	_, err := s.r.SaveSnapshot(ctx, repo.Snapshot{Time: at, Tree: &s.root, Paths: []string{"/volumes"},
		Hostname: "elsewhere", Username: "drover", Program: "drover", Tags: facts.Tags()})
	return err
}

// awaitNewest waits until the newest backup of each volume, of n backups in the store, has an object with a status.
func (in *instance) awaitNewest(ctx context.Context, n int) error {
	newest := map[string]bool{}
	for i := foundPerVolume - 1; i < n+foundPerVolume-1; i += foundPerVolume {
		last := min(i, n-1)
		if last%foundPerImage == 0 { // of an image
			last--
		}
		if last > 0 {
			newest[fmt.Sprintf("found-%d", last)] = true
		}
	}
	return await.Each(ctx, in.client, &api.BackupList{}, func(o client.Object) (bool, error) {
		if o.(*api.Backup).Status.State == api.BackupCompleted {
			delete(newest, o.GetName())
		}
		return len(newest) == 0, nil
	})
}

// awaitFound waits until backups of volumes and images have objects with a status, and the volumes have their summary.
func (in *instance) awaitFound(ctx context.Context, backups, images int) error {
	_, err := await.Until(ctx, in.client, api.DefaultBackupTarget, func(t *api.BackupTarget) (bool, error) {
		return t.Status.Available && int(t.Status.Backups) >= backups+images && !t.HasUnlisted(), nil
	})
	if err != nil {
		return err
	}
	counts := map[string]int{}
	return await.Each(ctx, in.client, &api.BackupVolumeList{}, func(o client.Object) (bool, error) {
		counts[o.GetName()] = int(o.(*api.BackupVolume).Status.Backups)
		sum := 0
		for _, n := range counts {
			sum += n
		}
		return sum >= backups, nil
	})
}

// syncTarget requests a list of the store, and waits for the end.
func (in *instance) syncTarget(ctx context.Context) error {
	at := metav1.NewTime(time.Now().Add(time.Duration(rand.IntN(1e6)) * time.Second).Truncate(time.Second))
	if _, err := await.Edit(ctx, in.client, api.DefaultBackupTarget, func(t *api.BackupTarget) (bool, error) {
		t.Spec.SyncRequestedAt = &at
		return true, nil
	}); err != nil {
		return err
	}
	_, err := await.Until(ctx, in.client, api.DefaultBackupTarget, func(t *api.BackupTarget) (bool, error) {
		return t.Status.SyncedRequest.Equal(&at), nil
	})
	return err
}

// deleteFound deletes n Backups at once, and waits for the end.
func (in *instance) deleteFound(ctx context.Context, n int) error {
	before, _, err := in.countBackups(ctx)
	if err != nil {
		return err
	}
	var list api.BackupList
	if err := in.client.List(ctx, &list, client.Limit(int64(n))); err != nil {
		return err
	}
	group, some := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i := range list.Items {
		group.Go(func() error { return in.client.Delete(some, &list.Items[i]) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for {
		left, _, err := in.countBackups(ctx)
		if err != nil || left <= before-n {
			return err
		}
		if err := sleep(ctx, 200*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d Backups still exist: %w", left, before, err)
		}
	}
}

// countBackups returns the number of Backups and the number of writes in the life of the API server.
func (in *instance) countBackups(ctx context.Context) (count, writes int, err error) {
	var list api.BackupList
	if err := in.client.List(ctx, &list, client.Limit(1)); err != nil {
		return 0, 0, err
	}
	count = len(list.Items)
	if more := list.RemainingItemCount; more != nil {
		count += int(*more)
	}
	writes, err = strconv.Atoi(list.ResourceVersion) // the revision of the embedded etcd
	return count, writes, err
}
