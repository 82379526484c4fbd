// Package tags describes a backup in the tags of its snapshot of the repository: all that a list of backups shows, so
// that every cluster that uses the store knows the backup without reading more. Everybody who has the key of the
// repository writes tags, so Parse trusts none. The package starts no goroutine and reads no store.
package tags

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"drover.io/drover/api"
)

// Bounds of tags. Users may add tags of their own with restic.
const (
	tagsLimit       = 512
	NameLimit       = 128 // bytes of a name, as the objects have it
	labelsLimit     = 64
	labelKeyLimit   = 320  // bytes: a prefix of 253, a slash and a name of 63
	labelValueLimit = 1024 // bytes
)

// Tags of the snapshot of a backup. The other tags are a key of tagKeys, '=' and a value, or labelTag, the key of a
// label, '=' and the value of the label.
const (
	droverTag = "drover"
	kindTag   = "kind"
	kindValue = "volume"
	labelTag  = "label:"
)

var tagKeys = []string{droverTag, kindTag, "volume", "uid", "backup", "object", "snapshot", "snapshot-uid", "created",
	"size", "uploaded", "mode", "image"}

// Facts are what the tags of a backup say.
type Facts struct {
	Backup, Volume  string  // names of the objects
	Object          api.UID // of the Backup
	VolumeUID       api.UID
	Snapshot        string
	SnapshotUID     api.UID
	SnapshotCreated string // RFC 3339
	VolumeSize      int64
	Uploaded        int64 // bytes that the backup added to the store
	Mode            string
	Image           string
	Labels          map[string]string
}

// labelKeys escapes the keys of labels in tags.
var labelKeys = strings.NewReplacer("%", "%25", "=", "%3D")

// Tags are the tags from which Parse returns f. Labels beyond the bounds of Parse are left out.
func (f Facts) Tags() []string {
	tags := []string{droverTag, kindTag + "=" + kindValue}
	for _, t := range [][2]string{{"volume", f.Volume}, {"uid", string(f.VolumeUID)}, {"backup", f.Backup},
		{"object", string(f.Object)}, {"snapshot", f.Snapshot}, {"snapshot-uid", string(f.SnapshotUID)},
		{"created", f.SnapshotCreated}, {"size", strconv.FormatInt(f.VolumeSize, 10)},
		{"uploaded", strconv.FormatInt(f.Uploaded, 10)}, {"mode", f.Mode}, {"image", f.Image}} {
		if t[1] != "" {
			tags = append(tags, t[0]+"="+t[1])
		}
	}
	bounded := Facts{}
	for _, key := range slices.Sorted(maps.Keys(f.Labels)) {
		if bounded.addLabel(key, f.Labels[key]) {
			tags = append(tags, labelTag+labelKeys.Replace(key)+"="+f.Labels[key])
		}
	}
	return tags
}

// Parse reads the tags of a snapshot. It returns false for a snapshot that is no backup of a volume by Drover, or
// whose tags no Drover writes.
func Parse(tags []string) (Facts, bool) {
	if len(tags) > tagsLimit {
		return Facts{}, false
	}
	f, values := Facts{}, map[string]string{}
	for _, tag := range tags {
		key, value, _ := strings.Cut(tag, "=")
		if label, ok := strings.CutPrefix(key, labelTag); ok {
			f.addLabel(strings.NewReplacer("%25", "%", "%3D", "=").Replace(label), value)
			continue
		}
		if _, twice := values[key]; twice {
			return Facts{}, false
		}
		if slices.Contains(tagKeys, key) {
			values[key] = value
		}
	}
	if _, ours := values[droverTag]; !ours || values[kindTag] != kindValue {
		return Facts{}, false
	}
	f.Backup, f.Volume, f.Image = values["backup"], values["volume"], values["image"]
	f.Object, f.VolumeUID = api.UID(values["object"]), api.UID(values["uid"])
	f.Snapshot, f.SnapshotUID = values["snapshot"], api.UID(values["snapshot-uid"])
	f.SnapshotCreated, f.Mode = values["created"], values["mode"]
	var sizeOK, uploadedOK bool
	f.VolumeSize, sizeOK = parseBytes(values["size"])
	f.Uploaded, uploadedOK = parseBytes(values["uploaded"])
	if !sizeOK || !uploadedOK || !f.isSound() {
		return Facts{}, false
	}
	return f, true
}

// parseBytes reads a number of bytes as Tags writes it; no number is 0.
func parseBytes(text string) (int64, bool) {
	if text == "" {
		return 0, true
	}
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil && n >= 0 && strconv.FormatInt(n, 10) == text
}

// isSound reports whether objects can have the facts.
func (f *Facts) isSound() bool {
	_, err := time.Parse(time.RFC3339, f.SnapshotCreated)
	return isName(f.Backup) && isName(f.Volume) && (f.Snapshot == "" || isName(f.Snapshot)) &&
		(f.Image == "" || isName(f.Image)) && f.Object.Validate() == nil &&
		(f.VolumeUID == "" || f.VolumeUID.Validate() == nil) &&
		(f.SnapshotUID == "" || f.SnapshotUID.Validate() == nil) && (f.SnapshotCreated == "" || err == nil) &&
		f.VolumeSize <= api.MaxVolumeSize && (f.Mode == "" || f.Mode == api.BackupFull || f.Mode == api.BackupIncremental)
}

func isName(s string) bool { return len(s) <= NameLimit && len(validation.IsDNS1123Subdomain(s)) == 0 }

// addLabel adds a label within the bounds.
func (f *Facts) addLabel(key, value string) bool {
	_, twice := f.Labels[key]
	if twice || len(f.Labels) >= labelsLimit || key == "" || len(key) > labelKeyLimit || len(value) > labelValueLimit ||
		!utf8.ValidString(key) || !utf8.ValidString(value) {
		return false
	}
	if f.Labels == nil {
		f.Labels = map[string]string{}
	}
	f.Labels[key] = value
	return true
}

// Status is the status of a Completed Backup with a snapshot of the repository, which ended then, in a target of
// targetURL.
func (f Facts) Status(targetURL, snapshot string, ended, now time.Time) api.BackupStatus {
	synced := metav1.NewTime(now)
	return api.BackupStatus{State: api.BackupCompleted, Progress: 100, BytesDone: f.VolumeSize, BytesTotal: f.VolumeSize,
		URL: api.BackupURL(targetURL, f.Backup, f.Volume), SnapshotID: snapshot, SnapshotName: f.Snapshot,
		SnapshotUID: f.SnapshotUID, SnapshotCreatedAt: f.SnapshotCreated,
		BackupCreatedAt: ended.UTC().Format(time.RFC3339), BackupMode: f.Mode,
		VolumeName: f.Volume, VolumeUID: f.VolumeUID, VolumeSize: f.VolumeSize, VolumeBackingImageName: f.Image,
		NewlyUploadDataSize: f.Uploaded, Labels: f.Labels, LastSyncedAt: &synced, SizeText: api.SizeText(f.VolumeSize),
		UploadedText: api.SizeText(f.Uploaded)}
}
