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

// openState creates the state folder and locks the folder for this process, until the caller closes the file.
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

// forkTime bounds how long the lock of a killed serve may outlive serve: a child holds all descriptors between fork and
// exec.
const forkTime = 2 * time.Second

// awaitLockFile opens path and locks the file, or fails if another process holds the lock for longer than within.
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

// refuseOwnVolume refuses a state folder on a Drover volume, because volume and folder would need each other.
func refuseOwnVolume(dir string) error {
	name, err := device.Below(dir)
	if err == nil && name != "" {
		err = api.Errorf(api.Invalid, "%s is on %s, a Drover volume: choose a folder on a disk of the machine", dir, name)
	}
	return err
}
