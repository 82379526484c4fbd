package stack

import (
	"errors"
	"sync"
)

// atOnce runs several syncs together: the journal of the disk takes them in one go, where one after the other each
// waits for a turn of its own.
func atOnce(fns ...func() error) error {
	errs := make([]error, len(fns))
	var wg sync.WaitGroup
	for i, fn := range fns[1:] {
		wg.Go(func() { errs[i+1] = fn() })
	}
	errs[0] = fns[0]()
	wg.Wait()
	return errors.Join(errs...)
}

// syncDirs makes the names in several folders durable.
func (d *Disk) syncDirs(names ...string) error {
	fns := make([]func() error, len(names))
	for i, name := range names {
		fns[i] = func() error { return d.fs.SyncDir(name) }
	}
	return atOnce(fns...)
}
