package sanity_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

// copiesKilled: kills hit the data process at random moments while a clone on another disk hydrates from its source
// and a full copy runs. In the end both volumes have every byte, also bytes written meanwhile, and need the source no
// more.
func copiesKilled(t *testing.T, w *world) {
	const size = 96 * mib
	far := w.path("far")
	must(t, os.Mkdir(far, 0o700))
	w.must("disk", "add", far, "--tags", "far")
	a, err := w.create("killed-source", size, blockCap())
	must(t, err)
	must(t, a.up())
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	want := make([]byte, size)
	for at := int64(0); at < size; at += 8 * mib {
		fillRandom(rng, want[at:at+6*mib])
	}
	put(t, a.target, want, 0)
	w.set("replica-copy-rate-limit", "8")
	b, err := w.from(a.id, "killed-linked", 0, blockCap(), "diskSelector", "far")
	must(t, err)
	must(t, b.up())
	ctx, cancel := context.WithTimeout(t.Context(), 2*settle)
	defer cancel()
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, DataSource: "vol://" + a.id, CloneMode: api.CloneFull,
		DiskSelector: []string{"far"}}}
	v.Name = "killed-copied"
	must(t, w.objects.Create(t.Context(), v))
	_, err = await.Until(ctx, w.objects, v.Name, func(v *api.Volume) (bool, error) {
		return v.Status.CloneStatus != nil && v.Status.CloneStatus.Progress > 0, nil
	})
	must(t, err)
	own := make([]byte, mib)
	linked := bytes.Clone(want)
	n := kills(t, 3)
	for i := range n {
		pause := time.NewTimer(time.Duration(rng.IntN(700)) * time.Millisecond)
		<-pause.C
		pid := w.kill("data")
		fillRandom(rng, own)
		at := rng.Int64N(size/mib) * mib
		put(t, b.target, own, at) // the write waits for the next process
		copy(linked[at:], own)
		if !comes(func() bool { now := w.child("data"); return now != pid && now != 0 }) {
			w.fatal("no data process after kill %d", i)
		}
	}
	w.set("replica-copy-rate-limit", "0")
	v, err = await.Until(ctx, w.objects, v.Name, func(v *api.Volume) (bool, error) {
		c := v.Status.CloneStatus
		if c != nil && c.State == api.CloneFailed {
			return true, fmt.Errorf("the copy failed: %s", c.Message)
		}
		return c != nil && c.State == api.CloneCompleted && v.Status.State == api.VolumeDetached, nil
	})
	must(t, err)
	r := w.volume(b.id).Status.Members[0]
	_, err = await.Until(ctx, w.objects, r, func(r *api.Replica) (bool, error) {
		return r.Status.Copy == nil && !r.Status.Pinned, nil
	})
	must(t, err)
	do(t, a.down, a.remove)
	var left []string
	if !comes(func() bool { // no pin of the source is left on the source's disk
		left, err = filepath.Glob(w.path("disk", "pins", "*"))
		return err != nil || len(left) == 0
	}) || err != nil {
		t.Errorf("pins are left: %v, %v", left, err)
	}
	must(t, dropCaches(b.target))
	same(t, b.target, linked)
	c := &pod{w: w, id: v.Name, cap: blockCap(), staging: w.path(v.Name + "-staging"), target: w.path(v.Name + "-target")}
	must(t, c.up())
	same(t, c.target, want)
	do(t, b.down, b.remove, c.down, c.remove)
	w.must("disk", "evict", far)
	w.must("disk", "remove", far)
}

func fillRandom(rng *rand.Rand, b []byte) {
	for i := 0; i+8 <= len(b); i += 8 {
		n := rng.Uint64()
		for k := range 8 {
			b[i+k] = byte(n >> (8 * k))
		}
	}
}

func put(t *testing.T, dev string, b []byte, at int64) {
	t.Helper()
	f, err := os.OpenFile(dev, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt(b, at)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
}

func same(t *testing.T, dev string, want []byte) {
	t.Helper()
	f, err := os.Open(dev)
	must(t, err)
	defer f.Close()
	got := make([]byte, len(want))
	_, err = io.ReadFull(f, got)
	must(t, err)
	for i := 0; i < len(want); i += 4096 {
		if !bytes.Equal(got[i:i+4096], want[i:i+4096]) {
			t.Fatalf("%s differs at %d", dev, i)
		}
	}
}

// dropCaches drops the kernel's cache of a block device.
func dropCaches(dev string) error {
	f, err := os.Open(dev)
	if err != nil {
		return err
	}
	defer f.Close()
	const blkFlushBuf = 0x1261
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), blkFlushBuf, 0); e != 0 {
		return e
	}
	return nil
}
