package device

import (
	"hash/crc32"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
)

// TestPayloadIsStable: a guest changes the page of a write in progress. The engine's uses of the payload (the checksum,
// each member's copy) must all see the same bytes, until the engine answers the write.
func TestPayloadIsStable(t *testing.T) {
	h, l := openHost(t, runHolder(t)), runLoop(t)
	d, be := attach(t, h, l, "stable", 64*mib)
	const writers = 6
	type held struct {
		r   *block.Request
		sum uint32
	}
	sum := func(r *block.Request) uint32 { return crc32.ChecksumIEEE(r.Buf) }
	var all []held // loop thread
	if err := l.Do(func() {
		be.hold = func(r *block.Request) bool {
			if r.Op != block.OpWrite {
				return false
			}
			all = append(all, held{r, sum(r)})
			return true
		}
	}); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var changes, writes sync.WaitGroup
	for i := range writers {
		n := []int{4096, 64 << 10, 128 << 10, mib}[i%4] // the server copies small payloads only
		b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Munmap(b) }()
		changes.Go(func() {
			for k := byte(1); ; k++ {
				select {
				case <-stop:
					return
				default:
				}
				for o := 0; o < n; o += 512 {
					b[o] = k + byte(i)
				}
			}
		})
		fd := openDev(t, d.Path(), unix.O_RDWR|unix.O_DIRECT)
		writes.Go(func() {
			defer func() { _ = unix.Close(fd) }()
			if k, err := unix.Pwrite(fd, b, int64(i)*8*mib); err != nil || k != n {
				t.Errorf("write of %d: %d, %v", n, k, err)
			}
		})
	}
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Millisecond) {
		n := 0
		_ = l.Do(func() { n = len(all) })
		if n >= writers {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d of %d writes came", n, writers)
		}
	}
	_ = l.Do(func() {
		for _, w := range all {
			if sum(w.r) != w.sum {
				t.Errorf("the payload of a write of %d changed while it was under way", len(w.r.Buf))
			}
		}
		be.letGo()
	})
	writes.Wait()
	close(stop)
	changes.Wait()
	if err := d.Detach(t.Context()); err != nil {
		t.Error(err)
	}
}
