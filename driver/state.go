package driver

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
)

// openState makes the state folder and takes it for this process. The lock lasts until the file is closed.
func openState(dir string) (*os.File, error) {
	for _, d := range []string{dir, filepath.Join(dir, "run"), filepath.Join(dir, "log")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, api.Errorf(api.Unavailable, "state folder: %w", err)
		}
	}
	if err := refuseOwnVolume(dir); err != nil {
		return nil, err
	}
	lock, err := awaitLockFile(filepath.Join(dir, "run", "serve.lock"), forkTime)
	if err != nil {
		return nil, api.Errorf(api.InUse, "another `drover serve` runs on state folder %s: stop it, or choose another "+
			"folder with --state-dir", dir)
	}
	return lock, nil
}

// forkTime is how long the lock of a serve that was killed may outlive it: a process that it was starting has all its
// descriptors until it runs another program.
const forkTime = 2 * time.Second

// awaitLockFile opens path and locks it for this process, or fails when another one has it for longer than a time.
func awaitLockFile(path string, within time.Duration) (*os.File, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(within); ; <-tick.C {
		f, err := lockFile(path)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return f, err
		}
	}
}

// refuseOwnVolume refuses a folder on a volume of ours: serving that volume would need the folder, and the folder the
// volume.
func refuseOwnVolume(dir string) error {
	name, err := device.Below(dir)
	if err == nil && name != "" {
		err = api.Errorf(api.Invalid, "%s is on %s, a Drover volume: choose a folder on a disk of the machine", dir, name)
	}
	return err
}
