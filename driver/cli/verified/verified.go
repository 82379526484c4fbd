// Package verified describes for people what a verification found out about backups. It holds no state.
package verified

import (
	"fmt"
	"strings"

	"drover.io/drover/api"
)

// Damage describes the damage of a target; empty: none. The target has been verified.
func Damage(t *api.BackupTarget) string {
	v := t.Status.Verification
	backups := fmt.Sprintf("%s (%s)", api.CountText(int(v.DamagedBackups), "backup"), strings.Join(v.BackupNames, ", "))
	blobs, names := int(v.DamagedBlobs), strings.Join(v.BlobNames, ", ")
	switch {
	case blobs == 0 && len(v.ObjectNames) == 0:
		return ""
	case t.Status.Format == api.FormatLonghorn:
		return fmt.Sprintf("target %q is damaged: %s of %s lost or changed: %s; back the volumes up again with Longhorn, or "+
			"restore these backups with --allow-damaged", t.Name, api.CountText(blobs, "block"), backups, names)
	}
	objects := ""
	if len(v.ObjectNames) > 0 {
		objects = ", and the objects " + strings.Join(v.ObjectNames, ", ")
	}
	switch {
	case blobs == 0 && v.DamagedBackups > 0: // their snapshot objects
		return fmt.Sprintf("target %q is damaged: nothing repairs %s%s: delete these backups, and make new ones", t.Name,
			backups, objects)
	case blobs == 0:
		return fmt.Sprintf("target %q is damaged, and no backup is%s: see `drover target show %s`", t.Name, objects, t.Name)
	}
	return fmt.Sprintf("target %q is damaged: %s of %s lost%s; blobs: %s; make full backups of the volumes (--full) "+
		"unless other nodes heal the target within minutes, or delete these backups", t.Name, api.CountText(blobs, "blob"),
		backups, objects, names)
}

// Remedy says what a user can do about a damaged backup of a target.
func Remedy(t *api.BackupTarget, damaged api.StoredBackup) string {
	b, ofVolume := damaged.(*api.Backup)
	switch isLonghorn := t.Status.Format == api.FormatLonghorn; {
	case isLonghorn && ofVolume:
		return fmt.Sprintf("back volume %q up again with Longhorn, or restore the backup with --allow-damaged", b.Spec.Volume)
	case isLonghorn:
		return "back the image up again with Longhorn"
	case ofVolume:
		return fmt.Sprintf("make a full backup of volume %q (--full), or delete this one", b.Spec.Volume)
	}
	return "copies of the image on the nodes' disks heal it; without one, delete this backup"
}

// Total is how many bytes a verification in progress reads; 0: not known.
func Total(t *api.BackupTarget) int64 {
	if u := t.Status.Usage; u != nil {
		return max(u.UsedBytes, t.Status.Verification.Bytes)
	}
	return 0
}

// Summary describes how much of a target the verification read.
func Summary(t *api.BackupTarget) string {
	v := t.Status.Verification
	if t.Status.Format == api.FormatLonghorn {
		return fmt.Sprintf("%s in %s read", api.SizeText(v.Bytes), api.CountText(int(v.Packs), "block"))
	}
	return fmt.Sprintf("%s in %s read, %s healed", api.SizeText(v.Bytes), api.CountText(int(v.Packs), "pack"),
		api.CountText(int(v.HealedBlobs), "blob"))
}

// AtOnce says where a restore of a backup of Longhorn begins at once; empty: a verification has not read the backup, or
// the target is a repository.
func AtOnce(b *api.Backup) string {
	d := b.Status.Digests
	switch {
	case d == nil:
		return ""
	case d.Percent == 100:
		return "on node " + d.Node
	}
	return fmt.Sprintf("no: node %s knows the digests of %d %%; run `drover backup verify %s`", d.Node, d.Percent, b.Name)
}
