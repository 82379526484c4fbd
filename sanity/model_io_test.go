package sanity_test

import (
	"bytes"
	"errors"
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// io begins I/O on a volume and returns a function that waits for the I/O. If a kill hits serve meanwhile, wait
// starts serve again: the data process may have died just before, and only serve starts the data process.
func (m *model) io(v *modelled, what string, all ...func() error) (wait func()) {
	done := make(chan error, len(all))
	for _, one := range all {
		go func() { done <- one() }() // wait receives the result; after a timeout the write ends with the data process
	}
	return func() {
		m.t.Helper()
		late := time.After(2 * settle)
		for ended := 0; ended < len(all); {
			select {
			case err := <-done:
				ended++
				if err != nil {
					m.w.fatal("%s of %s: %v", what, v.id, err)
				}
			case <-m.dying:
				m.revive(false)
			case <-late:
				m.w.fatal("%s of %s hangs", what, v.id)
			}
		}
	}
}

// write begins several writes at once without overlap: of blocks, of odd numbers of sectors, and of all the sectors
// of one block.
func (m *model) write(v *modelled) (wait func()) {
	type piece struct{ at, n int64 }
	var pieces []piece
	size := int64(len(v.image))
	switch m.rng.IntN(4) {
	case 0: // one block, sector by sector
		block := m.rng.Int64N(size/4096) * 4096
		for s := range int64(8) {
			pieces = append(pieces, piece{block + s*512, 512})
		}
	case 1: // blocks
		for part := range int64(8) {
			n := (1 + m.rng.Int64N(64)) * 4096
			pieces = append(pieces, piece{part*size/8 + m.rng.Int64N((size/8-n)/4096+1)*4096, n})
		}
	case 2: // a few blocks in a row
		at := m.rng.Int64N(size/4096-16) * 4096
		for range 4 {
			n := (1 + m.rng.Int64N(3)) * 4096
			pieces = append(pieces, piece{at, n})
			at += n
		}
	default: // sectors
		for part := range int64(8) {
			n := (1 + m.rng.Int64N(300)) * 512
			pieces = append(pieces, piece{part*size/8 + m.rng.Int64N((size/8-n)/512+1)*512, n})
		}
	}
	zero := m.rng.IntN(8) == 0
	m.say("write %s %v, zeros: %t", v.id, pieces, zero)
	var all []func() error
	for _, p := range pieces {
		data := v.image[p.at : p.at+p.n]
		clear(data)
		if !zero {
			_, _ = m.bytes.Read(data)
		}
		buf := m.buffer(data)
		all = append(all, func() error {
			defer func() { _ = syscall.Munmap(buf) }()
			_, err := v.dev.WriteAt(buf, p.at)
			return err
		})
	}
	return m.io(v, "write", all...)
}

// buffer is memory for direct I/O with a copy of the data.
func (m *model) buffer(data []byte) []byte {
	b := aligned((len(data) + 4095) &^ 4095)[:len(data)]
	copy(b, data)
	return b
}

// discard discards whole blocks, which then read as zeros.
func (m *model) discard(v *modelled) { m.wipe(v, "discard", unix.BLKDISCARD, 4096) }

func (m *model) zero(v *modelled) {
	unit := int64(4096)
	if m.rng.IntN(2) == 0 {
		unit = 512
	}
	m.wipe(v, "zero", unix.BLKZEROOUT, unit)
}

func (m *model) wipe(v *modelled, what string, request uintptr, unit int64) {
	units := int64(len(v.image)) / unit
	n := 1 + m.rng.Int64N(min(units, []int64{8, 512, units}[m.rng.IntN(3)]))
	span := [2]int64{m.rng.Int64N(units-n+1) * unit, n * unit}
	m.say("%s %s %v", what, v.id, span)
	m.io(v, what, func() error {
		_, _, e := syscall.Syscall(syscall.SYS_IOCTL, v.dev.Fd(), request, uintptr(unsafe.Pointer(&span)))
		if e != 0 {
			return e
		}
		return nil
	})()
	clear(v.image[span[0] : span[0]+span[1]])
}

// checkVolumes reads all volumes and compares every byte.
func (m *model) checkVolumes() {
	m.t.Helper()
	for _, v := range m.volumes {
		was := v.dev != nil
		m.up(v)
		m.check(v)
		if !was {
			m.down(v)
		}
	}
}

func (m *model) check(v *modelled) {
	m.t.Helper()
	m.say("check %s", v.id)
	m.io(v, "read", func() error {
		buf := aligned(int(mib))
		defer func() { _ = syscall.Munmap(buf) }()
		for at := int64(0); at < int64(len(v.image)); at += mib {
			if _, err := v.dev.ReadAt(buf, at); err != nil {
				return fmt.Errorf("at %d: %w", at, err)
			}
			want := v.image[at : at+mib]
			for i := int64(0); v.or != nil && i < mib; i += 512 {
				if bytes.Equal(buf[i:i+512], v.or[at+i:at+i+512]) {
					copy(want[i:i+512], v.or[at+i:])
				}
			}
			if !bytes.Equal(buf, want) {
				i := 0
				for buf[i] == want[i] {
					i++
				}
				block := i &^ 511
				return fmt.Errorf("differs from byte %d on: %x, not %x (zeros: %t, %t)", at+int64(i), buf[i:min(i+16, len(buf))],
					want[i:min(i+16, len(want))], zeros(buf[block:block+512]), zeros(want[block:block+512]))
			}
		}
		if end, err := v.dev.Seek(0, 2); err != nil || end != int64(len(v.image)) {
			return errors.Join(err, fmt.Errorf("it has %d bytes, not %d", end, len(v.image)))
		}
		return nil
	})()
}

func zeros(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// checkSnap reads a snapshot through a clone.
func (m *model) checkSnap(s *kept) {
	m.t.Helper()
	m.say("check snapshot %s", s.name)
	v := &modelled{image: s.image, or: s.either}
	name := m.name()
	m.again(func() (err error) { v.pod, err = m.w.from(s.id, name, 0, blockCap()); return err })
	m.up(v)
	m.check(v)
	s.either = nil
	m.down(v)
	m.again(v.pod.remove)
}

// killData kills the data process in the middle of another step.
func (m *model) killData() {
	after := time.Duration(m.rng.IntN(60)) * time.Millisecond
	m.say("kill data in %v, during:", after)
	killed := make(chan error, 1)
	time.AfterFunc(after, func() { killed <- m.kill() })
	m.step(modelCalm())
	must(m.t, <-killed)
}

// kill kills the data process, unless the process has just ended, and returns when the process is gone.
func (m *model) kill() error {
	pid := m.w.child("data")
	if pid == 0 {
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		if errors.Is(err, syscall.ESRCH) {
			return nil
		}
		return err
	}
	if !comes(func() bool { return m.w.child("data") != pid }) {
		return fmt.Errorf("process %d (data) was killed and is not gone", pid)
	}
	return nil
}

// killServe kills serve in the middle of another step, and starts serve again.
func (m *model) killServe() {
	after := time.Duration(m.rng.IntN(200)) * time.Millisecond
	m.say("kill serve in %v, during:", after)
	process := m.w.cmd.Process
	m.dying = make(chan struct{})
	dying := m.dying
	time.AfterFunc(after, func() {
		_ = process.Kill()
		close(dying)
	})
	m.step(modelCalm())
	<-dying
	m.revive(true)
}

// revive starts serve after a kill of serve.
func (m *model) revive(idle bool) bool {
	if m.dying == nil {
		return false
	}
	<-m.dying
	m.dying = nil
	<-m.w.done
	m.absent(idle)
	return true
}

// restartServe ends serve as a service manager does, and starts serve again.
func (m *model) restartServe() {
	m.say("restart serve")
	m.w.signal(syscall.SIGTERM)
	m.absent(true)
}

// absent starts serve after its end. Attached volumes work on meanwhile; if the data process dies as well, or died
// just before, as soon as serve is back. During a call (not idle), absent writes nothing: the call may concern the
// present content of a volume.
func (m *model) absent(idle bool) {
	m.say("  serve is gone, between calls: %t", idle)
	write := func() (waits []func()) {
		for _, v := range m.volumes {
			if v.dev != nil && idle {
				waits = append(waits, m.write(v))
			}
		}
		return waits
	}
	dead, too := m.w.child("data") == 0, m.rng.IntN(3) == 0
	if !dead {
		for _, wait := range write() {
			wait()
		}
	}
	if too {
		m.say("  kill data as well")
		must(m.t, m.kill())
	}
	var waits []func()
	if dead || too {
		waits = write()
	}
	m.w.start(drover(m.t))
	m.say("  serve is back")
	for _, wait := range waits {
		wait()
	}
}
