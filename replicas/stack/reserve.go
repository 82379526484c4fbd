package stack

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// A disk keeps a reserve, a file of unused blocks, so that a full disk can still replace the record of a replica: then
// a volume can be attached and read, and a snapshot deleted. The old record frees its blocks, which refill the reserve.
const (
	reserveFile = "reserve"
	reserveSize = 256 << 10
	reserveStep = 32 << 10 // spent at once: a record, the block of its folder, and room that other writers take meanwhile
)

// reserve is the state of the reserve in this process.
type reserve struct {
	mu    sync.Mutex
	whole bool
}

// writeStack replaces a replica's stack.json.
func (d *Disk) writeStack(dir string, m Meta) error {
	name := dir + "/" + stackFile
	err := format.WriteMeta(d.FS, name, formatStack, m.toRecord())
	if err == nil {
		d.fillReserve()
	}
	if !diskfs.NoRoom(err) {
		return err
	}
	d.reserve.mu.Lock()
	defer d.reserve.mu.Unlock()
	for diskfs.NoRoom(err) {
		left, spent := d.spendReserve()
		if spent != nil {
			return errors.Join(err, spent)
		}
		if !left {
			return err
		}
		again := format.WriteMeta(d.FS, name, formatStack, m.toRecord())
		if again != nil && errors.Is(err, format.ErrUnsure) {
			again = fmt.Errorf("%w: %w", format.ErrUnsure, again) // the first record may be on the disk
		}
		err = again
	}
	if err == nil {
		d.fillReserveLocked()
	}
	return err
}

// spendReserve frees a step of the reserve, and reports whether the reserve had one. The caller has the lock.
func (d *Disk) spendReserve() (bool, error) {
	d.reserve.whole = false
	h, err := d.FS.Open(d.Join(reserveFile), os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil || st.Size() == 0 {
		return false, err
	}
	if err := h.Truncate(max(st.Size()-reserveStep, 0)); err != nil {
		return false, err
	}
	return true, h.Datasync() // the file system reuses the blocks only after the sync
}

// fillReserve refills the reserve as far as the disk has room.
func (d *Disk) fillReserve() {
	d.reserve.mu.Lock()
	defer d.reserve.mu.Unlock()
	if !d.reserve.whole {
		d.fillReserveLocked()
	}
}

// fillReserveLocked is fillReserve with the lock held. A partial reserve is useful, too.
func (d *Disk) fillReserveLocked() {
	h, err := d.FS.Open(d.Join(reserveFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil {
		return
	}
	for at := st.Size(); at < reserveSize; at += reserveStep {
		if unix.Fallocate(int(h.Fd()), 0, at, reserveStep) != nil {
			_ = h.Truncate(at) // without a partial step
			return
		}
	}
	d.reserve.whole = true
}
