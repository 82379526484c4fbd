package describe

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
	"drover.io/drover/driver/cli/verified"
)

// Backup writes the fields of a volume's backup.
func Backup(w io.Writer, b *api.Backup) {
	s := b.Status
	snapshot := cmp.Or(s.SnapshotName, b.Spec.SnapshotName)
	if s.SnapshotCreatedAt != "" {
		snapshot += " of " + s.SnapshotCreatedAt
	}
	uploaded, labels := text.SomeBytes(s.NewlyUploadDataSize), s.Labels
	if s.State == api.BackupCompleted {
		uploaded = api.SizeText(s.NewlyUploadDataSize)
	}
	if len(labels) == 0 {
		labels = b.Spec.Labels
	}
	node := s.OwnerID
	if b.Spec.Source != nil {
		node = cmp.Or(node, b.Spec.Source.Node)
	}
	record := s.RecordedVolume
	if record == nil {
		record = &api.RecordedVolume{}
	}
	text.Fields(w, "Name", b.Name, "Volume", b.Spec.Volume, "Target", b.Target(), "Copy of", b.Spec.CopyOf,
		"State", string(s.State), "Message", s.Message, "Damaged", damageText(b), "Progress", progressText(b),
		"Attempts", attemptsText(b), "Restored at once", verified.AtOnce(b), "Mode", BackupMode(b), "Snapshot", snapshot,
		"Ended", s.BackupCreatedAt, "Size", text.SomeBytes(s.VolumeSize), "Uploaded", uploaded,
		"Image", s.VolumeBackingImageName, "Labels", text.JoinLabels(labels),
		"StorageClass", record.StorageClassName, "Claim", record.Claim, "PersistentVolume", record.PersistentVolumeName,
		"Volume labels", text.JoinLabels(record.Labels), "Volume parameters", parametersText(record),
		"Cluster", s.Cluster, "Node", node, "restic snapshot", cmp.Or(s.SnapshotID, b.Spec.SnapshotID), "URL", s.URL,
		"Volume UID", string(s.VolumeUID))
}

// Damaged is "yes" for a backup that a verification found damaged, otherwise empty.
func Damaged(b api.StoredBackup) string { return map[bool]string{true: "yes"}[b.Common().Damaged] }

// damageText says where to read on about the damage of a backup; empty: none is known.
func damageText(b api.StoredBackup) string {
	damaged := Damaged(b)
	if damaged == "" {
		return ""
	}
	return damaged + ": see `drover target show " + b.Target() + "`"
}

// progressText tells how far a backup is, and when it is about to end.
func progressText(b api.StoredBackup) string {
	s := b.Common()
	done := fmt.Sprintf("%d %%", s.Progress)
	if b.Ended() {
		return done
	}
	return done + s.Text()
}

// attemptsText tells of attempts that failed, of a backup that has not ended.
func attemptsText(b api.StoredBackup) string {
	s := b.Common()
	if s.Attempts == 0 || b.Ended() {
		return ""
	}
	text := api.CountText(int(s.Attempts), "attempt") + " failed"
	if s.NextTry != nil {
		text += ", the next is at " + s.NextTry.UTC().Format(time.RFC3339)
	}
	return text
}

// BackupMode returns how a backup was made, or will be made.
func BackupMode(b *api.Backup) string {
	return cmp.Or(b.Status.BackupMode, b.Spec.BackupMode, api.BackupIncremental)
}

// parametersText names the parameters that a restore takes over, by their flags if they have any.
func parametersText(r *api.RecordedVolume) string {
	all := map[string]string{"data-locality": r.DataLocality, "auto-balance": r.ReplicaAutoBalance,
		"backupTargetName": r.BackupTargetName,
		"node-selector":    strings.Join(r.NodeSelector, ","), "disk-selector": strings.Join(r.DiskSelector, ","),
		"replicaSoftAntiAffinity": r.ReplicaSoftAntiAffinity, "replicaZoneSoftAntiAffinity": r.ReplicaZoneSoftAntiAffinity,
		"replicaDiskSoftAntiAffinity": r.ReplicaDiskSoftAntiAffinity,
		"freezeFilesystemForSnapshot": r.FreezeFilesystemForSnapshot, "snapshotDataIntegrity": r.SnapshotDataIntegrity,
		"unmapMarkSnapChainRemoved": r.UnmapMarkSnapChainRemoved}
	if r.NumberOfReplicas > 0 {
		all["replicas"] = strconv.Itoa(int(r.NumberOfReplicas))
	}
	if r.StaleReplicaTimeout > 0 {
		all["staleReplicaTimeout"] = strconv.Itoa(int(r.StaleReplicaTimeout))
	}
	maps.DeleteFunc(all, func(_, value string) bool { return value == "" || value == "ignored" })
	return text.JoinLabels(all)
}

// ImageBackup writes the fields of an image's backup.
func ImageBackup(w io.Writer, b *api.BackupBackingImage) {
	s := &b.Status
	node, _ := b.SourceDisk()
	text.Fields(w, "Name", b.Name, "Image", b.Spec.BackingImageName, "Target", b.Target(), "Copy of", b.Spec.CopyOf,
		"State", string(s.State), "Message", s.Message, "Damaged", damageText(b), "Progress", progressText(b),
		"Attempts", attemptsText(b), "Ended", s.BackupCreatedAt, "Size", text.SomeBytes(s.Size),
		"Uploaded", text.SomeBytes(s.NewlyUploadDataSize), "SHA-512", s.Checksum, "Content", b.ContentDigest(),
		"Labels", text.JoinLabels(b.Spec.Labels), "Cluster", s.Cluster, "Node", cmp.Or(s.OwnerID, node), "restic snapshot",
		cmp.Or(s.SnapshotID, b.Spec.SnapshotID), "URL", s.URL)
	RecordedImage(w, s.RecordedImage)
}

// RecordedImage prints what a restored image takes over; record may be nil.
func RecordedImage(w io.Writer, record *api.RecordedImage) {
	if record == nil {
		return
	}
	text.Fields(w, "Image labels", text.JoinLabels(record.Labels), "Copies", fmt.Sprint(max(record.MinNumberOfCopies, 1)),
		"Node selector", strings.Join(record.NodeSelector, ", "),
		"Disk selector", strings.Join(record.DiskSelector, ", "))
}

// Locks writes a table of the locks of a repository.
func Locks(w io.Writer, fact *api.LocksFact) {
	ago := func(t *metav1.Time) string {
		if t == nil {
			return ""
		}
		return text.AgeOf(t) + " ago"
	}
	var rows [][]string
	for _, l := range fact.Locks {
		kind := "shared"
		switch {
		case l.Message != "":
			kind = "unreadable"
		case l.Exclusive:
			kind = "exclusive"
		case l.Sweep:
			kind = "sweep"
		}
		pid := ""
		if l.PID != 0 {
			pid = fmt.Sprint(l.PID)
		}
		rows = append(rows, []string{fmt.Sprintf("%.8s", l.Name), l.Program, l.Hostname, l.Username, pid, kind, ago(l.Since),
			ago(l.RefreshedAt), map[bool]string{true: "yes"}[l.Stale], l.Message})
	}
	_ = text.Table(w, "LOCK PROGRAM HOST USER PID KIND SINCE REFRESHED STALE MESSAGE", rows)
	if more := int(fact.Total) - len(fact.Locks); more > 0 {
		fmt.Fprintf(w, "and %d older ones\n", more)
	}
}
