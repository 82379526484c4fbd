package kubeapi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"drover.io/drover/api"
)

// revisionGap is put between a restored state and what comes after it. It is more than was ever written since the
// snapshot, so that a client that watches from a later revision is told to read anew, and does not wait for it.
const revisionGap = 1_000_000_000

// Restore makes the state of the API in dir what a snapshot holds. No server may run on it. The former database is set
// aside; the path of that is returned, or "" where there was none.
func Restore(dir, file string) (aside string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("restore the state in %s from %s: %w", dir, file, err)
		}
	}()
	if _, err := os.Stat(file); err != nil {
		return "", api.Errorf(api.NotFound, "snapshot: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", api.Errorf(api.Unavailable, "state folder: %w", err)
	}
	lock, err := takeLock(dir)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	db, fresh := filepath.Join(dir, "etcd"), filepath.Join(dir, "etcd.restoring")
	if err := os.RemoveAll(fresh); err != nil { // of a try that was cut off
		return "", err
	}
	c := embed.NewConfig()
	var quiet atomic.Bool
	quiet.Store(true)
	err = snapshot.NewV3(zap.New(zapTo{slog.Default(), &quiet})).Restore(snapshot.RestoreConfig{
		SnapshotPath: file, Name: memberName, OutputDataDir: fresh,
		PeerURLs:       []string{c.AdvertisePeerUrls[0].String()},
		InitialCluster: c.InitialClusterFromName(memberName), InitialClusterToken: c.InitialClusterToken,
		RevisionBump: revisionGap, MarkCompacted: true,
	})
	if err != nil {
		return "", errors.Join(api.Errorf(api.Corrupt, "%w", err), os.RemoveAll(fresh))
	}
	// The next start is to know that the state is another one, whenever the snapshot was taken.
	b, err := json.Marshal(lineage{Start: "restored"})
	if err == nil {
		err = writeFile(filepath.Join(dir, lineageFile), b)
	}
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(db); err == nil {
		aside = db + "." + time.Now().UTC().Format("20060102T150405.000")
		if err := os.Rename(db, aside); err != nil {
			return "", err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return aside, errors.Join(os.Rename(fresh, db), syncDir(dir))
}

// Snapshots are the paths of the snapshots of the state in dir, oldest first.
func Snapshots(dir string) ([]string, error) {
	return filepath.Glob(filepath.Join(dir, "etcd-snapshots", snapshotPrefix+"*.db"))
}
