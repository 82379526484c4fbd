package sanity_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block/suite"
)

// restarts: mounts and I/O continue while serve is away, and the next serve takes data and hold over.
func restarts(t *testing.T, w *world) {
	p, err := w.create("restart", 512*mib, mountCap("xfs"))
	must(t, err)
	must(t, p.up())
	before := p.write("before", 8*mib)
	data, hold := w.child("data"), w.child("hold")
	w.signal(syscall.SIGTERM)
	during := p.write("during", 8*mib)
	w.start(drover(t))
	if w.child("data") != data || w.child("hold") != hold || data == 0 || hold == 0 {
		t.Errorf("data and hold were %d and %d and are %d and %d: not adopted", data, hold,
			w.child("data"), w.child("hold"))
	}
	p.check("before", before)
	p.check("during", during)
	must(t, p.up()) // all again: nothing to do
	do(t, p.down, p.up)
	p.check("during", during)
	do(t, p.down, p.remove)
	w.signal(syscall.SIGTERM)
	if w.child("data") != 0 || w.child("hold") != 0 {
		t.Error("with no volume attached, data and hold stay behind")
	}
	w.start(drover(t))
}

// killServe: after kill -9 of serve, data and hold, the next serve has all objects and data, and completes work in
// progress.
func killServe(t *testing.T, w *world) {
	p, err := w.create("killed", 512*mib, mountCap("ext4"))
	must(t, err)
	must(t, p.up())
	sum := p.write("file", 8*mib)
	must(t, p.down())
	w.signal(syscall.SIGKILL)
	w.kill("data")
	w.kill("hold")
	w.start(drover(t))
	must(t, p.up())
	p.check("file", sum)
	do(t, p.down, p.remove)
}

// killData kills the data process again and again while verified writes run.
func killData(t *testing.T, w *world) {
	p, err := w.create("load", 256*mib, blockCap())
	must(t, err)
	must(t, p.up())
	f, err := os.OpenFile(p.target, os.O_RDWR|syscall.O_DIRECT|syscall.O_EXCL, 0)
	must(t, err)
	stop, ended := make(chan struct{}), make(chan error, 1)
	progress := make(chan struct{}, 1)
	go func() { ended <- load(f, 256*mib, stop, progress) }()
	n := kills(t, 3)
	var slowest time.Duration
	for range n {
		pid, began := w.kill("data"), time.Now()
		// Only work begun after the kill is a sign of life: the test reads two signs, since an older sign may have
		// waited here.
		for range 2 {
			select {
			case <-progress:
			case err := <-ended:
				t.Fatalf("the load ended: %v", err)
			case <-time.After(settle):
				w.fatal("no I/O for %v after a kill", settle)
			}
		}
		slowest = max(slowest, time.Since(began))
		for w.child("data") == pid || w.child("data") == 0 { // the next process writes the pid file with its first I/O
			select {
			case <-progress:
			case <-time.After(settle):
				w.fatal("data was not started again")
			}
		}
	}
	close(stop)
	must(t, <-ended)
	must(t, f.Close())
	t.Logf("%d kills, at most %v until I/O went on", n, slowest.Round(time.Millisecond))
	do(t, p.down, p.remove)
}

// loadPace is the time from one write of a load to the next: several tests run at once and share the processors.
func loadPace() time.Duration {
	if suite.All() {
		return 20 * time.Microsecond
	}
	return 10 * time.Millisecond
}

// load writes random blocks, reads some back at once and all in the end. Any error or difference ends the load.
func load(f *os.File, size int64, stop, progress chan struct{}) error {
	const block, many = 16 << 10, 64
	versions := make([]uint64, size/block)
	buf, got := aligned(block), aligned(many*block)
	fill := func(b []byte, i int64, v uint64) {
		rng := rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%d %d", i, v)))
		_, _ = rng.Read(b)
	}
	verify := func(from, to int64) error {
		if _, err := f.ReadAt(got[:(to-from)*block], from*block); err != nil {
			return fmt.Errorf("read block %d: %w", from, err)
		}
		for i := from; i < to; i++ {
			clear(buf)
			if versions[i] > 0 {
				fill(buf, i, versions[i])
			}
			if !bytes.Equal(buf, got[(i-from)*block:(i-from+1)*block]) {
				return fmt.Errorf("block %d is not what was written, version %d", i, versions[i])
			}
		}
		return nil
	}
	pace := time.NewTicker(loadPace())
	defer pace.Stop()
	for n := 0; ; n++ {
		select {
		case <-stop:
			for i := int64(0); i < size/block; i += many {
				if err := verify(i, min(i+many, size/block)); err != nil {
					return err
				}
			}
			return nil
		default:
		}
		i := rand.Int64N(int64(len(versions)))
		fill(buf, i, versions[i]+1)
		if _, err := f.WriteAt(buf, i*block); err != nil {
			return fmt.Errorf("write block %d: %w", i, err)
		}
		versions[i]++
		if n%64 == 0 {
			if err := f.Sync(); err != nil {
				return err
			}
		}
		i = rand.Int64N(int64(len(versions)))
		if err := verify(i, i+1); err != nil {
			return err
		}
		select {
		case progress <- struct{}{}:
		default:
		}
		select {
		case <-pace.C:
		case <-stop:
		}
	}
}

// aligned returns memory for direct I/O.
func aligned(n int) []byte {
	b, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		panic(err)
	}
	return b // for as long as the test runs
}
