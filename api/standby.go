package api

import (
	"cmp"
	"net/url"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A standby volume follows the backups of a volume: it has no replica and holds the content of the newest backup in a
// hidden image, until its activation makes it an ordinary volume.

// StandbyStatus is about a standby volume, and stays after the activation.
type StandbyStatus struct {
	// Held is the backup that the volume holds whole; after the activation, the one that the volume began with.
	Held *StandbyBackup `json:"held,omitempty"`
	// Next is the newer backup that is being fetched, Progress how far, in percent.
	Next     *StandbyBackup `json:"next,omitempty"`
	Progress int32          `json:"progress,omitempty"`
	// FailingSince is when the restore of Next failed first, in a store that answers, or when Next found no room.
	// FailingProgress is the progress then: a restore that gets further has recovered.
	FailingSince    *metav1.Time `json:"failingSince,omitempty"`
	FailingProgress int32        `json:"failingProgress,omitempty"`
	// Search is set after a backup newer than the held one could not be taken, until the volume holds another backup.
	Search *StandbySearch `json:"search,omitempty"`
	// Message says what the activation took, and why.
	Message string `json:"message,omitempty"`
	// ActivatingSince is when the controller saw the wish for the activation. SyncRequestedAt is the list of the target's
	// store that the activation asked for.
	ActivatingSince *metav1.Time `json:"activatingSince,omitempty"`
	SyncRequestedAt *metav1.Time `json:"syncRequestedAt,omitempty"`
}

// StandbyBackup is a backup that a standby volume holds, fetches or could not take.
type StandbyBackup struct {
	Backup string `json:"backup"` // name of the Backup
	URL    string `json:"url"`
	// SnapshotCreatedAt is the instant of the content, RFC 3339; StoredAt is that of the Backup.
	SnapshotCreatedAt string `json:"snapshotCreatedAt,omitempty"`
	StoredAt          string `json:"storedAt,omitempty"`
	// Size of the volume then: as the backup claims, and as its content has it once this is known.
	Size int64 `json:"size,omitempty"`
	// BackingImage is the hidden image with the content.
	BackingImage string `json:"backingImage"`
}

// IsNewerThan compares as Backup.NewerThan does.
func (b *StandbyBackup) IsNewerThan(o *StandbyBackup) bool {
	return isNewer(b.CutAt(), b.Backup, o.CutAt(), o.Backup)
}

// CutAt is the instant of the content; zero: not known.
func (b *StandbyBackup) CutAt() time.Time { return boundInstant(b.SnapshotCreatedAt, b.StoredAt) }

// StandbySearch is the search of a standby volume for a backup that it can take. The search begins with the newest
// backup, and tries each older one that was known when the first failed. Every other turn is that of a newer arrival.
type StandbySearch struct {
	Since metav1.Time `json:"since"` // when the first backup failed
	// Newest and Oldest are the newest and the oldest backup that failed. Message says why the newest did.
	Newest  StandbyBackup `json:"newest"`
	Oldest  StandbyBackup `json:"oldest"`
	Message string        `json:"message,omitempty"`
}

// ConditionFollowing is on a standby volume: False while the newest backup cannot arrive.
const ConditionFollowing = "Following"

// Reasons of ConditionFollowing.
const (
	ReasonFollowing         = "Following"
	ReasonNoBackup          = "NoBackup"
	ReasonTargetMissing     = "TargetMissing"
	ReasonTargetUnavailable = "TargetUnavailable"
	ReasonRestoreFailed     = "RestoreFailed"
	ReasonNoRoom            = "NoRoom"
)

// AnnotationActivateNow on a standby volume makes the activation take the newest backup that the volume holds whole,
// without asking the store.
const AnnotationActivateNow = "drover.io/activate-now"

// FollowsBackups reports whether the volume is a standby volume, or is being activated.
func (v *Volume) FollowsBackups() bool { return v.Spec.Standby || v.Status.IsStandby }

// RefuseStandby returns an error if the volume cannot be used before its activation, for which nobody has asked yet.
func (v *Volume) RefuseStandby() error {
	if !v.Spec.Standby {
		return nil
	}
	return Errorf(InUse, "volume %s is a standby volume, which cannot be used: activate it first with `drover volume "+
		"activate %s`", v.Name, v.Name)
}

// RestoredURL is the URL of the backup that the volume begins with; empty: none, or not decided yet.
func (v *Volume) RestoredURL() string {
	switch st := v.Status.Standby; {
	case st != nil && st.Held != nil:
		return st.Held.URL
	case v.FollowsBackups():
		return ""
	}
	return v.Spec.FromBackup
}

// NextImage names the hidden image of the backup that a standby volume fetches; empty: none.
func (v *Volume) NextImage() string {
	if st := v.Status.Standby; st != nil && st.Next != nil {
		return st.Next.BackingImage
	}
	return ""
}

// StandbyImage names the hidden image of a standby volume with the content of a backup.
func (v *Volume) StandbyImage(b *Backup) string {
	return restoreImagePrefix + string(v.Status.UID) + "-" + b.Status.SnapshotID[:min(12, len(b.Status.SnapshotID))]
}

// OwnsStandbyImage reports whether a hidden image has a name that StandbyImage gave for the volume.
func (v *Volume) OwnsStandbyImage(image string) bool {
	return v.Status.UID != "" && strings.HasPrefix(image, restoreImagePrefix+string(v.Status.UID)+"-")
}

// BackupVolumeURL is the URL of a volume's backups: the URL of one of them without the parameter backup, or the text
// itself. Empty: the text is neither.
func BackupVolumeURL(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Scheme == "" || hasPassword(u) || u.Query().Get("volume") == "" {
		return ""
	}
	q := u.Query()
	q.Del("backup")
	u.RawQuery = q.Encode()
	return u.String()
}

// VolumeOfURL is the name of the volume in the URL of a backup, or of a volume's backups; empty: the text is neither.
func VolumeOfURL(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	return u.Query().Get("volume")
}

// CutAt implements StoredBackup: the instant of the snapshot, or of the backup's end if the snapshot's is not known.
// The time of the object in the store takes the place of an instant that was in the future when the target was listed,
// so a source whose clock is ahead does not hide later backups.
func (b *Backup) CutAt() time.Time {
	return boundInstant(cmp.Or(b.Status.SnapshotCreatedAt, b.Status.BackupCreatedAt), b.Status.StoredAt)
}

// CutAt implements StoredBackup.
func (b *BackupBackingImage) CutAt() time.Time {
	return boundInstant(b.Status.BackupCreatedAt, b.Status.StoredAt)
}

// boundInstant returns the instant that the source names, or the instant of the store if the store's is earlier.
func boundInstant(named, stored string) time.Time {
	at, limit := parseInstant(named), parseInstant(stored)
	if !limit.IsZero() && limit.Before(at) {
		return limit
	}
	return at
}

// NewerThan orders the backups of a volume by their content, and by name if two have one instant.
func (b *Backup) NewerThan(o *Backup) bool {
	return isNewer(b.CutAt(), b.Name, o.CutAt(), o.Name)
}

func isNewer(at time.Time, name string, than time.Time, other string) bool {
	return at.After(than) || at.Equal(than) && name > other
}

// CutText is CutAt as a status has it, RFC 3339; empty: not known.
func (b *Backup) CutText() string {
	at := b.CutAt()
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format(time.RFC3339)
}

// ProtectsVolume reports whether the backup is whole in its store, and of this very volume: not of a former one, or one
// of another cluster, with the same name.
func (b *Backup) ProtectsVolume(v *Volume) bool {
	return v.Status.UID != "" && b.Status.VolumeUID == v.Status.UID && !b.Status.Damaged && RestorableBackup(b) == nil
}

// InstantSeconds is an instant of a status, RFC 3339, in seconds since 1970, as metrics have it; 0: not known.
func InstantSeconds(text string) float64 {
	at := parseInstant(text)
	if at.IsZero() {
		return 0
	}
	return float64(at.Unix())
}

func parseInstant(text string) time.Time {
	at, _ := time.Parse(time.RFC3339, text)
	return at
}
