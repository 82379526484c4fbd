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

// A disk keeps a file of blocks that nobody uses, so that the record of a replica can be replaced where no room is
// left: a volume can then be attached and read, and a snapshot be deleted. The record that was replaced gives its
// blocks back, with which the file is filled up again.
const (
	reserveFile = "reserve"
	reserveSize = 256 << 10
	reserveStep = 32 << 10 // spent at once: a record, its folder's block, and what others take meanwhile
)

// reserve is what this process knows of the file.
type reserve struct {
	mu    sync.Mutex
	whole bool
}

// writeStack replaces a replica's stack.json.
func (d *Disk) writeStack(dir string, m Meta) error {
	name := dir + "/" + stackFile
	err := format.WriteMeta(d.FS, name, formatStack, m.record())
	if err == nil {
		d.fillReserve()
	}
	if !diskfs.NoRoom(err) {
		return err
	}
	d.reserve.mu.Lock()
	defer d.reserve.mu.Unlock()
	for diskfs.NoRoom(err) {
		left, spent := d.spend()
		if spent != nil {
			return errors.Join(err, spent)
		}
		if !left {
			return err
		}
		again := format.WriteMeta(d.FS, name, formatStack, m.record())
		if again != nil && errors.Is(err, format.ErrUnsure) {
			again = fmt.Errorf("%w: %w", format.ErrUnsure, again) // the first one may be there
		}
		err = again
	}
	if err == nil {
		d.fill()
	}
	return err
}

// spend gives some of the reserve to the file system, and reports whether there was any. The caller has the lock.
func (d *Disk) spend() (bool, error) {
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
	return true, h.Datasync() // only then does the file system give the blocks to others
}

// fillReserve makes the reserve whole, if there is room.
func (d *Disk) fillReserve() {
	d.reserve.mu.Lock()
	defer d.reserve.mu.Unlock()
	if !d.reserve.whole {
		d.fill()
	}
}

// fill does that, step by step: a reserve of which a part is there is of use. The caller has the lock.
func (d *Disk) fill() {
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
			_ = h.Truncate(at) // what did not become a whole step
			return
		}
	}
	d.reserve.whole = true
}
