package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack"
)

// clone creates a clone of a volume and waits until the clone can be attached.
func (b *bench) clone(ctx context.Context, name, source, mode string, size int64) (float64, error) {
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, DataSource: source, CloneMode: mode}}
	v.Name = name
	began := time.Now()
	if err := b.in.client.Create(ctx, v); err != nil {
		return 0, err
	}
	_, err := await.Until(ctx, b.in.client, name, func(v *api.Volume) (bool, error) {
		if c := v.Status.CloneStatus; c != nil && c.State == api.CloneFailed {
			return true, errors.New(c.Message)
		}
		return v.Status.State == api.VolumeDetached, nil
	})
	if err != nil {
		return 0, fmt.Errorf("clone %s: %w", name, err)
	}
	return time.Since(began).Seconds(), nil
}

// linked times clones of attached volumes with 256 MiB of data in them.
func (b *bench) linked(ctx context.Context) error {
	for _, gib := range []int64{1, 100} {
		name := fmt.Sprintf("whole-%dg", gib)
		dev, err := b.in.attachNew(ctx, name, "", gib<<30)
		if err != nil {
			return err
		}
		if err := fillDevice(dev, 256<<20, 256<<20); err != nil {
			return err
		}
		var took []float64
		for i := range max(b.rounds, 3) {
			c := fmt.Sprintf("%s-%d", name, i)
			t, err := b.clone(ctx, c, "vol://"+name, "", gib<<30)
			if err != nil {
				return err
			}
			took = append(took, t)
			if err := b.in.deleteVolume(ctx, c); err != nil {
				return err
			}
		}
		b.addFigure("clone", fmt.Sprintf("of-%d-GiB", gib), median(took), "s", "", 0, "attached source; request to volume")
		if err := b.in.deleteVolume(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// fillDevice writes random data to the first n bytes of a device. With span 2n fillDevice writes every other run of 8
// MiB.
func fillDevice(dev string, n, span int64) error {
	src, err := os.Open("/dev/urandom")
	if err != nil {
		return err
	}
	defer src.Close()
	f, err := os.OpenFile(dev, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	const run = 8 << 20
	buf := make([]byte, run)
	for off := int64(0); off < span; off += run * span / n {
		if _, err := src.Read(buf); err != nil {
			return err
		}
		if _, err := f.WriteAt(buf, off); err != nil {
			return err
		}
	}
	return f.Sync()
}

// dropPageCache drops the page cache of a file.
func dropPageCache(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// fullCopy copies a volume with data in every other run of 8 MiB, and a file with the same content. Each copy ends with
// the data on the disk.
func (b *bench) fullCopy(ctx context.Context) error {
	size := 2 * b.sizeMiB << 20 / (32 << 20) * (32 << 20) // a small share for requests and answers
	dev, err := b.in.attachNew(ctx, "copied", "", 2*size)
	if err != nil {
		return err
	}
	if err := fillDevice(dev, size, 2*size); err != nil {
		return err
	}
	file, out := filepath.Join(b.dir, "copied.raw"), filepath.Join(b.dir, "copied.out")
	if _, err := runTool(ctx, "cp", "--sparse=always", dev, file); err != nil {
		return err
	}
	if err := b.in.detach(ctx, "copied"); err != nil {
		return err
	}
	snap := &api.Snapshot{Spec: api.SnapshotSpec{Volume: "copied", CreateSnapshot: true}}
	snap.Name = "copied-at"
	if err := b.in.client.Create(ctx, snap); err != nil {
		return err
	}
	snap, err = await.Until(ctx, b.in.client, snap.Name, func(s *api.Snapshot) (bool, error) {
		return s.Status.ReadyToUse, nil
	})
	if err != nil {
		return err
	}
	disk, err := stack.Open(b.in.disk)
	if err != nil {
		return err
	}
	for tick := time.NewTicker(100 * time.Millisecond); ; <-tick.C { // the digests come first, once for all copies
		if _, _, err := disk.Digest(string(snap.Status.Layer)); err == nil {
			tick.Stop()
			break
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	unix.Sync()
	took := map[string][]float64{}
	for i := range max(b.rounds, 3) {
		for subject, command := range map[string]string{
			"cp":       "cp --sparse=always " + file + " " + out + " && sync " + out,
			"qemu-img": "qemu-img convert -f raw -O raw -t none -T none " + file + " " + out + " && sync " + out,
		} {
			if err := dropPageCache(file); err != nil {
				return err
			}
			began := time.Now()
			if _, err := runTool(ctx, "sh", "-c", command); err != nil {
				return err
			}
			took[subject] = append(took[subject], time.Since(began).Seconds())
			if err := os.Remove(out); err != nil {
				return err
			}
		}
		name := fmt.Sprintf("copy-%d", i)
		t, err := b.clone(ctx, name, "snap://copied/copied-at", api.CloneFull, 2*size)
		if err != nil {
			return err
		}
		took["drover"] = append(took["drover"], t)
		if err := b.in.deleteVolume(ctx, name); err != nil {
			return err
		}
	}
	mb := float64(size) / 1e6
	best := max(mb/median(took["cp"]), mb/median(took["qemu-img"]))
	b.addFigure("full-copy", "cp", mb/median(took["cp"]), "MB/s", "", 0, "with --sparse=always, to the disk")
	b.addFigure("full-copy", "qemu-img", mb/median(took["qemu-img"]), "MB/s", "", 0, "convert, direct, to the disk")
	b.addFigure("full-copy", "drover", mb/median(took["drover"]), "MB/s", "the better", best, "verified, with digests")
	if err := b.in.client.Delete(ctx, snap); err != nil {
		return err
	}
	return errors.Join(b.in.deleteVolume(ctx, "copied"), os.Remove(file))
}

// merge merges two layers with half of the data each, and measures the index of such fragments.
func (b *bench) merge(ctx context.Context) (err error) {
	size := b.sizeMiB << 20 / (64 << 20) * (64 << 20)
	dir := filepath.Join(b.dir, "merge")
	disk, err := stack.Add(ctx, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close(), os.RemoveAll(dir)) }()
	loop, err := uring.New(64)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- loop.Run() }()
	defer func() {
		loop.Close()
		err = errors.Join(err, <-ended)
	}()
	for _, piece := range []int64{1 << 20, 4 << 10} {
		if err := b.mergeOf(ctx, disk, loop, size, piece); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) mergeOf(ctx context.Context, disk *stack.Disk, loop *uring.Loop, size, piece int64) error {
	var layers []string
	for half := range int64(2) {
		uid := string(api.NewUID())
		w, err := disk.Create(ctx, uid, size)
		if err != nil {
			return err
		}
		buf := make([]byte, piece+1)[1:] // unaligned: through the page cache
		for i := range buf {
			buf[i] = byte(i) | 1
		}
		for off := half * piece; off < size; off += 2 * piece {
			if _, err := w.WriteAt(buf, off); err != nil {
				return errors.Join(err, w.Abort())
			}
		}
		if _, _, err := w.Seal(ctx); err != nil {
			return errors.Join(err, w.Abort())
		}
		layers = append(layers, uid)
	}
	spec := stack.Spec{UID: string(api.NewUID()), Volume: "merge", VolumeUID: string(api.NewUID()), Size: size,
		Layers: layers}
	if err := disk.CreateReplica(ctx, spec); err != nil {
		return err
	}
	r, err := disk.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		return err
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		return errors.Join(err, r.Close())
	}
	what := fmt.Sprintf("pieces-of-%d-KiB", piece>>10)
	buf, err := unix.Mmap(-1, 0, block.Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return errors.Join(err, r.Close())
	}
	defer func() { _ = unix.Munmap(buf) }()
	for off := int64(0); off < size; off += 64 << 20 { // a read builds a page of the index
		done := make(chan error, 1)
		loop.Post(func() {
			r.Submit(&block.Request{Op: block.OpRead, Off: off, Len: block.Size, Buf: buf,
				Done: func(q *block.Request) { done <- q.Err }})
		})
		if err := <-done; err != nil {
			return errors.Join(err, r.Close())
		}
	}
	memory, err := r.IndexMemory()
	if err != nil {
		return errors.Join(err, r.Close())
	}
	b.addFigure("index", what, float64(memory)/(float64(size)/(1<<30)), "bytes/GiB", "", 0,
		"two layers, alternating; worst case")
	unix.Sync()
	began := time.Now()
	did, err := r.Merge(ctx, stack.MergeOptions{})
	if err != nil || !did {
		return errors.Join(err, r.Close(), fmt.Errorf("merged: %v", did))
	}
	b.addFigure("merge", what, float64(size/2)/1e6/time.Since(began).Seconds(), "MB/s", "", 0,
		"rate of the copied data, digests included")
	return errors.Join(r.Close(), disk.RemoveReplica(spec.UID))
}
