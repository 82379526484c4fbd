package driver

import (
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestStateFolderOfAKilledServe: a child of a killed serve holds the lock for a moment, so openState waits; another
// serve holds the lock for long, so openState fails.
func TestStateFolderOfAKilledServe(t *testing.T) {
	suite.Slow(t)
	dir := t.TempDir()
	first, err := openState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if f, err := openState(dir); !api.Is(err, api.InUse) {
		t.Fatalf("a folder that is in use was opened: %v, %v", f, err)
	}
	for tries := 5; ; tries-- { // a busy machine may close first after second has given up
		closed := make(chan error, 1)
		time.AfterFunc(forkTime/8, func() { closed <- first.Close() })
		second, err := openState(dir)
		if cerr := <-closed; cerr != nil {
			t.Fatal(cerr)
		}
		if err == nil {
			err = second.Close()
			if err != nil {
				t.Error(err)
			}
			return
		}
		if tries == 1 {
			t.Fatalf("the folder of a serve that has just ended: %v", err)
		}
		if first, err = openState(dir); err != nil {
			t.Fatal(err)
		}
	}
}
