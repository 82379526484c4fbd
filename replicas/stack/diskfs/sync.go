package diskfs

import (
	"errors"
	"sync"
)

// AtOnce runs several syncs together, because the journal of a file system combines concurrent syncs.
func AtOnce(fns ...func() error) error {
	errs := make([]error, len(fns))
	var wg sync.WaitGroup
	for i, fn := range fns[1:] {
		wg.Go(func() { errs[i+1] = fn() })
	}
	errs[0] = fns[0]()
	wg.Wait()
	return errors.Join(errs...)
}
