package stack

import (
	"io/fs"
	"sync"
	"testing"

	"drover.io/drover/block/file"
)

// tapped is a file system which calls tap before an operation. An error from tap is the answer. The function then, if
// any, is called after the operation. Only a single tap runs at a time: operations of a tap call no tap.
type tapped struct {
	file.FS
	mu   sync.Mutex
	tap  func(op, name string) (then func(), err error)
	busy bool
}

const (
	opOpen   = "open"
	opRename = "rename" // by the new name
	opRemove = "remove"
	opSync   = "sync"
)

// tap opens a disk as another process does, with a tapped file system.
func tap(t *testing.T, of *Disk) (*Disk, *tapped) {
	t.Helper()
	f := &tapped{FS: file.OS}
	d, err := openOn(f, of.Root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d, f
}

// set sets the tap; nil removes the tap.
func (f *tapped) set(tap func(op, name string) (then func(), err error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tap = tap
}

func (f *tapped) tell(op, name string, do func() error) error {
	f.mu.Lock()
	tap := f.tap
	if tap == nil || f.busy {
		f.mu.Unlock()
		return do()
	}
	f.busy = true
	f.mu.Unlock()
	free := func() {
		f.mu.Lock()
		f.busy = false
		f.mu.Unlock()
	}
	then, err := tap(op, name)
	free()
	if err != nil {
		return err
	}
	err = do()
	if then != nil && err == nil {
		f.mu.Lock()
		f.busy = true
		f.mu.Unlock()
		then()
		free()
	}
	return err
}

func (f *tapped) Open(name string, flag int, perm fs.FileMode) (h file.Handle, err error) {
	err = f.tell(opOpen, name, func() error { h, err = f.FS.Open(name, flag, perm); return err })
	return h, err
}

func (f *tapped) Rename(from, to string) error {
	return f.tell(opRename, to, func() error { return f.FS.Rename(from, to) })
}

func (f *tapped) Remove(name string) error {
	return f.tell(opRemove, name, func() error { return f.FS.Remove(name) })
}

func (f *tapped) SyncDir(name string) error {
	return f.tell(opSync, name, func() error { return f.FS.SyncDir(name) })
}
