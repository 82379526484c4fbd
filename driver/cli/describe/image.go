package describe

import (
	"fmt"
	"io"
	"strings"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

// Copies says where the copies of an image are and who uses them.
type Copies struct {
	Users  []string // volumes that stand on the image
	ByDisk map[api.UID]api.ImageCopy
	Paths  map[api.UID]string // of disks
	Using  map[api.UID]int    // replicas per disk that stand on the image
}

// Image writes the fields of an image and its copies.
func Image(w io.Writer, img *api.BackingImage, copies *Copies) {
	s := img.Status
	from := string(img.Spec.SourceType)
	for _, k := range []string{"url", "path", "backingImage", "volume-name", "snapshot-name", api.RestoreBackupURL} {
		if v := img.Spec.SourceParameters[k]; v != "" {
			from += " " + v
		}
	}
	progress := fmt.Sprintf("%d %%", s.Progress)
	if s.State != api.ImageReady {
		progress += s.Text()
	}
	text.Fields(w, "Name", img.Name, "State", ImageState(&s), "Message", s.Message, "Progress", progress,
		"Source", from, "Backup", s.BackupURL, "Format", s.Format, "Virtual size", text.SomeBytes(s.VirtualSize),
		"Size on disk", text.SomeBytes(s.Size),
		"SHA-512", s.Checksum, "Expected", img.Spec.Checksum, "Content", s.Digest, "UUID", string(s.UUID),
		"Copies", fmt.Sprintf("%d ready, %d wanted", s.ReadyCopies, max(img.Spec.MinNumberOfCopies, 1)),
		"Used by", strings.Join(copies.Users, ", "))
	if rows := copies.Rows(img); len(rows) > 0 {
		fmt.Fprintln(w, "\nCopies:")
		_ = text.Table(w, CopyHeader, rows)
	}
	text.PrintConditions(w, s.Conditions)
}

// ImageState is the state, and whether volumes can use the image before it is ready.
func ImageState(s *api.BackingImageStatus) string {
	if s.Readable {
		return string(s.State) + ", readable"
	}
	return string(s.State)
}

// CopyHeader is the header of Rows.
const CopyHeader = "NODE DISK STATE PROGRESS SIZE USED VERIFIED FROM MESSAGE"

// Rows returns the image's copies, one per disk.
func (c *Copies) Rows(img *api.BackingImage) [][]string {
	var rows [][]string
	for _, s := range img.Status.Copies {
		f := c.ByDisk[s.Disk]
		used := ""
		switch n := c.Using[s.Disk]; {
		case n == 1:
			used = "by 1 volume"
		case n > 1:
			used = fmt.Sprintf("by %d volumes", n)
		case s.State == api.ImageReady && !s.LastUsed.IsZero():
			used = "not for " + text.Age(s.LastUsed)
		}
		verified := ""
		switch {
		case s.State == api.ImageReady && f.Spec.Verify != "" && f.Spec.Verify != f.Status.Verified:
			verified = "in progress"
		case !f.Status.LastVerified.IsZero():
			verified = text.Age(f.Status.LastVerified) + " ago"
		}
		from := "source"
		if f.Spec.From != "" {
			from = c.DiskName(f.Spec.From)
		}
		message := s.Message
		if message == "" {
			message = f.Status.Notice
		}
		rows = append(rows, []string{s.Node, c.DiskName(s.Disk), string(s.State), progressOf(s, f.Status),
			text.SomeBytes(f.Status.Size), used, verified, from, message})
	}
	return rows
}

// progressOf returns the progress of a copy, in bytes during a transfer.
func progressOf(s api.ImageCopySummary, st api.ImageCopyStatus) string {
	text := fmt.Sprintf("%d%%", s.Progress)
	if s.State != api.ImageInProgress || st.BytesDone == 0 {
		return text
	}
	text += ", " + api.SizeText(st.BytesDone)
	if st.BytesTotal > 0 {
		text += " of " + api.SizeText(st.BytesTotal)
	}
	return text
}

// DiskName names a disk for people: by path, or by UID if no node lists the disk.
func (c *Copies) DiskName(uid api.UID) string {
	if p := c.Paths[uid]; p != "" {
		return p
	}
	return string(uid)
}
