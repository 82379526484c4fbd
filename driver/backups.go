package driver

import (
	"path/filepath"

	"drover.io/drover/api"
	"drover.io/drover/backups/host"
	"drover.io/drover/backups/host/targets"
	"drover.io/drover/block"
	"drover.io/drover/driver/cli"
	"drover.io/drover/imagestore/importer"
)

// snapshotDisk finds a disk of the node, with the snapshots of its replicas.
func (s *server) snapshotDisk(uid api.UID) (block.SnapshotDisk, error) {
	disk, err := s.disks.Get(uid)
	if err != nil {
		return nil, err // not a nil *stack.Disk in the interface
	}
	return disk, nil
}

// backupOptions are the options of the node's work for backups.
func (s *server) backupOptions() host.Options {
	return host.Options{Log: s.log, Guests: countGuests(dataSocket(s.stateDir)), Version: cli.BuildVersion(),
		OpenDisk: importer.OpenDisk,
		Targets: targets.Options{Log: s.log, Cache: filepath.Join(s.stateDir, "backups"),
			Mounts: filepath.Join(s.stateDir, "shares")}}
}
