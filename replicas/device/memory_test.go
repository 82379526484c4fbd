package device

import (
	"fmt"
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestNoMemory: without other memory any request can need the memory of the staging buffer; the server still continues.
func TestNoMemory(t *testing.T) {
	s := newServer(nil, slog.Default())
	if err := s.prepareMemory(); err != nil {
		t.Fatal(err)
	}
	s.stage.mem[0] = 7
	m := s.takeMemory(maxIO, true)
	if m.mem[0] != 7 || s.stage.mem == nil {
		t.Fatal("a large request must keep its buffer, and there be another")
	}
	n := s.takeMemory(page, true)
	if n.class != 0 {
		t.Fatalf("class %d for a page", n.class)
	}
	s.giveBack(n)
	s.giveBack(m)
	if s.pool.used != maxIO {
		t.Errorf("%d bytes in use; only the staging buffer should be", s.pool.used)
	}
	s.growing = true // as if the server had asked for memory: none may come here
	s.stage, m = slot{}, s.stage
	if s.mayRead(&conn{}) {
		t.Error("nothing may be read without a staging buffer")
	}
	s.giveBack(m)
	if s.stage.mem == nil {
		t.Error("a buffer that comes back must become the staging buffer")
	}
	for len(s.free) > 0 {
		s.newRequest()
	}
	if s.mayRead(&conn{}) {
		t.Error("nothing may be read without a request to keep it in")
	}
	s.pool.putSlot(s.stage)
	s.pool.trimSlabs(reserved)
}

// TestMemoryComesLate: requested memory may come late: after the end of the last device, with all memory given back, or
// while a hanging disk has the only staging buffer. The server serves the present or the next device.
func TestMemoryComesLate(t *testing.T) {
	slab := func() [][]byte {
		m, err := mapLocked(slabSize, func(error) {})
		if err != nil {
			t.Fatal(err)
		}
		return [][]byte{m}
	}
	l := runLoop(t)
	s := newServer(l, slog.Default())
	err := l.Do(func() {
		s.growing = true // as after wantMemory, so that the server adds no memory here
		if err := s.prepareMemory(); err != nil {
			t.Error(err)
			return
		}
		s.connectionEnded()
		s.trimPool()
		if n := s.pool.size(); n != 0 || s.stage.mem != nil {
			t.Errorf("%d bytes without a device", n)
		}
		s.addMemory(slab(), nil)
		s.growing = true
		if err := s.prepareMemory(); err != nil {
			t.Error(err)
		}
		if !s.mayRead(&conn{}) {
			t.Error("the next device is not served")
		}

		for s.stage.mem != nil { // a hanging disk has all memory
			s.pool.leased += int64(classSize[s.takeMemory(maxIO, false).class])
		}
		s.growing = true
		if s.mayRead(&conn{}) {
			t.Error("there is a staging buffer yet")
		}
		s.addMemory(slab(), nil)
		if !s.mayRead(&conn{}) {
			t.Error("the memory that came in the place of what is lent is of no use")
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// TestMemoryForEach: a device without requests in progress gets a buffer, however many other devices hold all memory
// with unanswered requests, and however small the pieces of the memory are.
func TestMemoryForEach(t *testing.T) {
	suite.Slow(t)
	for name, cut := range map[string]int{"large": maxIO, "cut": page} {
		t.Run(name, func(t *testing.T) {
			const devices = poolCap/maxIO + 20
			l := runLoop(t)
			s := newServer(l, slog.Default())
			var small []slot
			err := l.Do(func() {
				for range devices {
					if err := s.prepareMemory(); err != nil {
						t.Error(err)
					}
				}
			})
			for cut != maxIO && err == nil && s.pool.size() < poolCap { // cut all memory, and give all pieces back
				err = l.Do(func() {
					for s.stage.mem != nil && len(s.pool.free[bigClass]) > 0 {
						small = append(small, s.takeMemory(cut, false))
					}
					s.wantMemory()
				})
			}
			if err == nil {
				err = l.Do(func() {
					for _, m := range small {
						s.giveBack(m)
					}
				})
			}
			if err != nil {
				t.Fatal(err)
			}
			for n := range devices {
				await(t, func() (got bool) {
					_ = l.Do(func() {
						c := &conn{srv: s}
						if got = s.mayRead(c); got {
							s.takeMemory(maxIO, false)
						}
					})
					return got
				})
				if t.Failed() {
					t.Fatalf("device %d of %d", n, devices)
				}
			}
			s.aside.Wait()
		})
	}
}

// TestMemoryGoesWithTheLastDevice: without a device the server keeps no memory for requests, and the next device gets
// memory again.
func TestMemoryGoesWithTheLastDevice(t *testing.T) {
	h, l := openHost(t, runHolder(t)), runLoop(t)
	srv := h.serverOf(l)
	becomes := func(want int64) {
		t.Helper()
		if size := sizeTrimmed(l, srv, func(n int64) bool { return n == want }); size != want {
			t.Errorf("a pool of %d bytes, not %d", size, want)
		}
	}
	for i := range 3 {
		first, _ := attach(t, h, l, fmt.Sprint("first-", i), 8*mib)
		second, _ := attach(t, h, l, fmt.Sprint("second-", i), 8*mib)
		if err := first.Detach(t.Context()); err != nil {
			t.Fatal(err)
		}
		becomes(reserved * slabSize) // beside a device
		fd := openDev(t, second.Path(), unix.O_RDWR|unix.O_DIRECT)
		b := block.AlignedBuffer(mib)
		b[0] = byte(i + 1)
		mustPwrite(t, fd, b, mib)
		if got := mustPread(t, fd, mib, mib); got[0] != byte(i+1) {
			t.Error("other data came back")
		}
		_ = unix.Close(fd)
		if err := second.Detach(t.Context()); err != nil {
			t.Fatal(err)
		}
		becomes(0) // without a device
	}
}
