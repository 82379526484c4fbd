// Package backups keeps backups of volumes and images in stores: the planner decides which replica or copy a backup is
// made from, the host of its node makes the backup, and one node looks after each backup target.
//
//	Backup --planner--> spec.source --host--> repository in the store of a BackupTarget
//	Backup with spec.copyOf --host--> repository in the store of another BackupTarget
//
//	planner/    controller role: the snapshot and the replica, or the copy, of a backup, from objects alone
//	host/       node role: makes the backups of the node; status of Backups and BackupTargets
//	mover/      copies a volume into a repository, and back, and a backup from one repository into another
//	manifest/   the folder of a backup: segments and groups of chunks
//	longhorn/   reads the backups of Longhorn in a store
//	repo/       a repository in a store, in restic's format
//	target/     the stores
//
// Each status has one writer at a time. The comment of api.Backup names the writers.
package backups
