package describe

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/duration"

	"drover.io/drover/api"
	"drover.io/drover/driver/cli/text"
)

// Target writes the fields of a backup target.
func Target(w io.Writer, t *api.BackupTarget) {
	s := t.Status
	encrypted := ""
	switch {
	case s.Encrypted:
		encrypted = "yes"
	case s.Format == api.FormatLonghorn:
		encrypted = "no: Longhorn does not encrypt backups"
	case s.RepositoryID != "":
		encrypted = "no: every reader of the store can read the backups, because the password is published"
	}
	secret := ""
	if ref := t.Spec.CredentialSecret; ref != nil {
		secret = cmp.Or(ref.Namespace, api.DefaultSecretNamespace) + "/" + ref.Name
	}
	searched := "only by `drover target sync`"
	if d := t.Spec.Poll(); d > 0 {
		searched = "every " + duration.HumanDuration(d)
	}
	if last := text.AgeOf(s.LastSyncedAt); last != "" {
		searched += ", last " + last + " ago"
	}
	text.Fields(w, "Name", t.Name, "URL", t.Spec.BackupTargetURL, "Available", fmt.Sprint(s.Available),
		"Message", s.Message, "Format", s.Format, "Encrypted", encrypted, "Secret", secret, "Read-only",
		fmt.Sprint(t.ExplainReadOnly() != ""), "Upload limit", someRate(t.Spec.MaxUploadRate),
		"Download limit", someRate(t.Spec.MaxDownloadRate),
		"Searched", searched, "Backups", Backups(&s), "Used", usageText(s.Usage), "Sweep", sweepText(&s),
		"Verified", verificationText(s.Verification), "Repository", s.RepositoryID,
		"Node", s.OwnerID)
	text.PrintConditions(w, s.Conditions)
}

// Backups says how many backups the store has, and how many of these have no object.
func Backups(s *api.BackupTargetStatus) string {
	if s.Unlisted == 0 {
		return fmt.Sprint(s.Backups)
	}
	yet := " yet"
	if meta.IsStatusConditionTrue(s.Conditions, api.ConditionTooManyBackups) {
		yet = ""
	}
	return fmt.Sprintf("%d, of which %d have no object%s", s.Backups, s.Unlisted, yet)
}

// someRate formats a limit; no limit is empty.
func someRate(n int64) string {
	if n == 0 {
		return ""
	}
	return api.SizeText(n) + "/s on each node"
}

// sweepText says whether the space of deleted backups is free, and how the last sweep ended.
func sweepText(s *api.BackupTargetStatus) string {
	var parts []string
	if !s.SweepRequested.IsZero() {
		parts = append(parts, "due, to free the space of deleted backups")
	}
	if last := s.LastSweep; last != nil && !last.EndedAt.IsZero() {
		parts = append(parts, fmt.Sprintf("%s freed %s ago", api.SizeText(last.FreedBytes), text.Age(last.EndedAt)))
	}
	if last := s.LastSweep; last != nil && last.Message != "" {
		parts = append(parts, last.Message)
	}
	return strings.Join(parts, "; ")
}

// usageText says how much the store has.
func usageText(u *api.UsageFact) string {
	if u == nil {
		return ""
	}
	return fmt.Sprintf("%s, %s without repeated chunks", u.UsedText, api.SizeText(u.UniqueBytes))
}

// verificationText says when all bytes were compared last, and with which outcome.
func verificationText(v *api.VerificationFact) string {
	if v == nil {
		return "never"
	}
	var parts []string
	if v.EndedAt != nil {
		parts = append(parts, text.AgeOf(v.EndedAt)+" ago")
	}
	if v.StartedAt != nil {
		parts = append(parts, fmt.Sprintf("%d of %d parts since %s", v.Parts, api.VerificationParts, text.AgeOf(v.StartedAt)))
	}
	if v.DamagedBackups > 0 { // the blobs count from 0 in each verification of a store of Longhorn
		damage := api.CountText(int(v.DamagedBackups), "damaged backup") + ": " + strings.Join(v.BackupNames, ", ")
		if v.DamagedBlobs > 0 {
			damage += " (" + api.CountText(int(v.DamagedBlobs), "blob") + ")"
		}
		parts = append(parts, damage)
	}
	if len(v.ObjectNames) > 0 {
		parts = append(parts, "damaged objects: "+strings.Join(v.ObjectNames, ", "))
	}
	if v.Message != "" {
		parts = append(parts, v.Message)
	}
	return strings.Join(parts, "; ")
}
