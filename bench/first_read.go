package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/backups/mover"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/tags"
	"drover.io/drover/backups/target/s3"
	"drover.io/drover/block"
)

// The store of the section, and its answers.
const (
	farTarget = "far"
	farBackup = "far-backup"
	farSize   = 100 << 30
	farKinds  = 32 // chunks that differ: the list of chunks has its full size, the store has 64 MiB
)

// farDisk is a disk without holes, of few chunks in an order that does not repeat.
type farDisk struct {
	chunks  [farKinds][]byte
	digests [farKinds][32]byte
}

func newFarDisk() *farDisk {
	d := &farDisk{}
	for i := range d.chunks {
		d.chunks[i] = make([]byte, block.ChunkSize)
		fillRandom(d.chunks[i])
		d.digests[i] = sha256.Sum256(d.chunks[i])
	}
	return d
}

func (d *farDisk) kind(chunk int64) int {
	return rand.New(rand.NewPCG(1, uint64(chunk))).IntN(farKinds)
}

// Size implements mover.Source.
func (d *farDisk) Size() int64 { return farSize }

// Close implements mover.Source.
func (d *farDisk) Close() error { return nil }

// Next implements mover.Source.
func (d *farDisk) Next(off int64) (block.Extent, error) {
	return block.Extent{Off: off, Len: farSize - off, Kind: block.Data}, nil
}

// Digest implements block.DigestSource.
func (d *farDisk) Digest(chunk int64) ([32]byte, bool) { return d.digests[d.kind(chunk)], true }

// ReadAt implements mover.Source.
func (d *farDisk) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		at := off + int64(n)
		n += copy(p[n:], d.chunks[d.kind(at/block.ChunkSize)][at%block.ChunkSize:])
	}
	return n, nil
}

// firstRead measures the time from the request for a volume of a backup of 100 GiB to the first byte of its device.
// Each request of the store takes 20 ms more than on loopback.
func (b *bench) firstRead(ctx context.Context) error {
	store, err := newBucket()
	if err != nil {
		return err
	}
	defer store.server.Close()
	disk := newFarDisk()
	if err := fillFarStore(ctx, store.server.URL, filepath.Join(b.dir, "far-cache"), disk); err != nil {
		return fmt.Errorf("fill the store: %w", err)
	}
	if err := b.createFarTarget(ctx, store); err != nil {
		return err
	}
	store.far.Store(true)
	for i, subject := range []string{"first", "second"} {
		if err := b.readFar(ctx, disk, fmt.Sprintf("far-%d", i), subject); err != nil {
			return err
		}
	}
	store.far.Store(false)
	return b.forgetTarget(ctx, farTarget)
}

// fillFarStore makes a repository with the backup. cache is the folder of its index.
func fillFarStore(ctx context.Context, url, cache string, disk *farDisk) error {
	store, err := s3.New(s3.Config{Endpoint: url, Region: "us-east-1", Bucket: "backups", AccessKey: "key",
		SecretKey: "hush"})
	if err != nil {
		return err
	}
	if err := repo.Init(ctx, store, "bench", repo.Options{}); err != nil {
		return err
	}
	r, err := repo.Open(ctx, store, "bench", repo.Options{Cache: cache})
	if err != nil {
		return err
	}
	now := time.Now()
	facts := tags.Facts{Backup: farBackup, Volume: "far", Object: api.NewUID(), VolumeUID: api.NewUID(),
		Snapshot: "s", SnapshotUID: api.NewUID(), SnapshotCreated: now.UTC().Format(time.RFC3339), VolumeSize: farSize,
		Mode: api.BackupFull}
	_, err = mover.Backup(ctx, r, disk, mover.BackupOptions{
		Description: manifest.Description{Kind: manifest.Volume, Name: "far"},
		Snapshot:    repo.Snapshot{Time: now, Hostname: "bench", Username: "bench", Program: "bench"},
		Tags:        func(context.Context, mover.Result) ([]string, error) { return facts.Tags(), nil }})
	return errors.Join(err, store.Close())
}

// createFarTarget makes the target of the store, and waits for the object of the backup.
func (b *bench) createFarTarget(ctx context.Context, store *bucket) error {
	if err := b.createBucketTarget(ctx, farTarget, store); err != nil {
		return err
	}
	_, err := await.Until(ctx, b.in.client, farBackup, func(o *api.Backup) (bool, error) {
		return o.Status.State == api.BackupCompleted, nil
	})
	return err
}

// readFar restores a volume, measures reads of its device, and deletes the volume long before the restore ends.
func (b *bench) readFar(ctx context.Context, disk *farDisk, volume, subject string) error {
	var backup api.Backup
	if err := b.in.client.Get(ctx, client.ObjectKey{Name: farBackup}, &backup); err != nil {
		return err
	}
	began := time.Now()
	v := &api.Volume{Spec: api.VolumeSpec{Size: farSize, FromBackup: backup.Status.URL}}
	v.Name = volume
	if err := b.in.client.Create(ctx, v); err != nil {
		return err
	}
	device, err := b.in.attach(ctx, volume)
	if err != nil {
		return err
	}
	attached := time.Since(began)
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close() // after an error
	var first time.Duration
	var reads []float64
	rnd := rand.New(rand.NewPCG(2, uint64(len(subject))))
	for range 33 {
		at := rnd.Int64N(farSize/block.Size) * block.Size
		start := time.Now()
		got, want := block.AlignedBuffer(block.Size), make([]byte, block.Size)
		if _, err := f.ReadAt(got, at); err != nil {
			return err
		}
		if first == 0 {
			first = time.Since(began)
		} else {
			reads = append(reads, float64(time.Since(start).Microseconds())/1000)
		}
		if _, err := disk.ReadAt(want, at); err != nil || string(got) != string(want) {
			return fmt.Errorf("the volume has other bytes than the backup at %d", at)
		}
	}
	const name = "backup-first-read"
	b.addFigure(name, subject+" restore: attached", attached.Seconds(), "s", "", 0, "from the request for the volume")
	b.addFigure(name, subject+" restore: first byte", first.Seconds(), "s", "", 0,
		"100 GiB without holes; each request of the store takes 20 ms")
	b.addFigure(name, subject+" restore: a read of 4 KiB", median(reads), "ms", "", 0,
		"at random places, during the restore")
	return errors.Join(f.Close(), b.in.deleteVolume(ctx, volume))
}
