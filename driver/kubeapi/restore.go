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

// revisionGap separates the revisions of a restored state from later revisions. revisionGap exceeds all writes since
// the snapshot, so that a client that watches from a later revision receives an error and lists again, instead of
// waiting.
const revisionGap = 1_000_000_000

// Restore replaces the state of the API in dir by a snapshot. No server may run on dir. Restore renames the former
// database and returns the new path, or "" without a former database.
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
	if err := os.RemoveAll(fresh); err != nil { // of an interrupted Restore
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
	// The next start must recognise another state, whatever the age of the snapshot.
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

// Snapshots returns the paths of the snapshots of the state in dir, oldest first.
func Snapshots(dir string) ([]string, error) {
	return filepath.Glob(filepath.Join(dir, "etcd-snapshots", snapshotPrefix+"*.db"))
}
