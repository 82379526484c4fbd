package describe

import (
	"fmt"
	"io"
	"strings"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/filesystem"
	"drover.io/drover/driver/cli/text"
)

// CreatedVolume prints the result of a command that made a volume.
func CreatedVolume(w io.Writer, vol *api.Volume, began time.Time) {
	from := ""
	switch {
	case vol.Spec.DataSource != "":
		from = " from " + vol.Spec.DataSource
	case vol.Spec.BackingImage != "":
		from = fmt.Sprintf(" from image %q", vol.Spec.BackingImage)
	case vol.Spec.Standby:
		from = fmt.Sprintf(", follows the backups of volume %q", api.VolumeOfURL(vol.Spec.FromBackup))
	case vol.Spec.FromBackup != "":
		from = fmt.Sprintf(" from backup %q", api.BackupOfURL(vol.Spec.FromBackup))
	case vol.Spec.ImportFrom != nil:
		from = ", imported"
	}
	fmt.Fprintf(w, "volume %q created: %s%s, in %s\n", vol.Name, api.SizeText(vol.Spec.Size), from,
		text.Seconds(time.Since(began)))
}

// Volume writes the fields of a volume and a table of its replicas. att may be nil.
func Volume(w io.Writer, v *api.Volume, reps []api.Replica, att *api.Attachment) {
	s := v.Status
	size := api.SizeText(v.Spec.Size)
	if s.Size != 0 && s.Size != v.Spec.Size {
		size += " (now " + api.SizeText(s.Size) + ")"
	}
	where, mounted := "", ""
	if att != nil {
		where = att.Spec.Node
		if att.Status.Device != "" {
			where += ", " + att.Status.Device
		}
		if att.Spec.ReadOnly {
			where += ", read-only"
		}
		if att.Status.Message != "" {
			where += ": " + att.Status.Message
		}
		if dirs, err := filesystem.DirsOf(att.Status.Device); err == nil {
			mounted = strings.Join(dirs, ", ")
		}
	}
	used := api.SizeText(s.Used)
	if s.Shared > 0 {
		used += fmt.Sprintf(", of which %s in layers that others have too", api.SizeText(s.Shared))
	}
	text.Fields(w, "Name", v.Name, "State", string(s.State), "Robustness", string(s.Robustness), "Message", s.Message,
		"Size", size, "Used", used, "Image", v.Spec.BackingImage, "Source", sourceText(v),
		"Standby", standbyText(v),
		"Replicas", fmt.Sprint(v.Spec.NumberOfReplicas),
		"Filesystem", strings.TrimSpace(v.Spec.FSType+" "+v.Spec.MkfsParams), "Attached", where, "Mounted", mounted,
		"Epoch", fmt.Sprint(s.Epoch), "UID", string(s.UID))
	if len(reps) > 0 {
		fmt.Fprintln(w, "\nReplicas:")
		var rows [][]string
		for _, r := range reps {
			rows = append(rows, []string{r.Name, r.Spec.Node, string(r.Spec.Disk), string(r.Status.Mode),
				api.SizeText(r.Status.Used), copyProgress(&r), r.Status.Message})
		}
		_ = text.Table(w, "NAME NODE DISK MODE USED COPIED MESSAGE", rows)
	}
	text.PrintConditions(w, s.Conditions)
}

// copyProgress returns the progress of the copy to the replica's disk, or nothing without a copy.
func copyProgress(r *api.Replica) string {
	if r.Status.Copy == nil {
		return ""
	}
	return fmt.Sprintf("%d %%", r.Status.Copy.Progress)
}

// sourceText describes a volume's source and the progress of its copy.
func sourceText(v *api.Volume) string {
	if c := v.Status.CloneStatus; c != nil {
		return v.Spec.DataSource + " (" + string(c.State) + ")" + text.Colon(c.Message)
	}
	if v.FollowsBackups() {
		return "backups of volume " + api.VolumeOfURL(v.Spec.FromBackup)
	}
	if r := v.Status.RestoreStatus; r != nil {
		source := fmt.Sprintf("backup %s (%s", r.Backup, r.State)
		if v.Spec.ImportFrom != nil {
			source = fmt.Sprintf("imported file (%s", r.State)
		}
		if r.State != api.CloneCompleted {
			source += fmt.Sprintf(", %d %%", r.Progress) + r.Text()
		}
		return source + ")" + text.Colon(r.Message)
	}
	return v.Spec.DataSource
}

// standbyText describes what a standby volume holds and fetches, or what its activation took.
func standbyText(v *api.Volume) string {
	st := v.Status.Standby
	if st == nil {
		return ""
	}
	if st.Message != "" {
		return "activated: " + st.Message
	}
	text := "holds no backup yet"
	if st.Held != nil {
		text = fmt.Sprintf("holds backup %s of %s", st.Held.Backup, st.Held.SnapshotCreatedAt)
	}
	if st.Next != nil {
		text += fmt.Sprintf("; fetches backup %s of %s, %d %%", st.Next.Backup, st.Next.SnapshotCreatedAt, st.Progress)
	}
	return text
}
