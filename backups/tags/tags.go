// Package tags describes a backup in the tags of its snapshot of the repository: all that a list of backups shows, so
// that every cluster that uses the store knows the backup without reading more. Everybody who has the key of the
// repository writes tags, so Parse trusts none. The package starts no goroutine and reads no store.
package tags

import (
	"crypto/sha256"
	"crypto/sha512"
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
	labelKeyLimit   = 320                   // bytes: a prefix of 253, a slash and a name of 63
	labelValueLimit = 1024                  // bytes
	uploadLimit     = 2 * api.MaxVolumeSize // bytes; the sum over all backups of a volume fits into an int64
)

// Tags of the snapshot of a backup. The other tags are a key of tagKeys, '=' and a value, or labelTag, the key of a
// label, '=' and the value of the label.
const (
	droverTag  = "drover"
	kindTag    = "kind"
	kindVolume = "volume"
	kindImage  = "image"
	labelTag   = "label:"
)

var tagKeys = []string{droverTag, kindTag, "volume", "uid", "backup", "object", "snapshot", "snapshot-uid", "created",
	"size", "uploaded", "mode", "image", "image-digest", "image-checksum", "record", "origin", "cluster", "node"}

// Facts are what the tags of a backup say. The backup of an image has no Volume, and nothing of a snapshot.
type Facts struct {
	Backup, Volume  string  // names of the objects
	Origin          string  // name of the original of a copy
	Cluster, Node   string  // names of the source; a copy has the cluster of its origin
	Object          api.UID // of the Backup or BackupBackingImage
	VolumeUID       api.UID
	Snapshot        string
	SnapshotUID     api.UID
	SnapshotCreated string // RFC 3339
	VolumeSize      int64  // or that of the image
	Uploaded        int64  // bytes that the backup added to the store
	Mode            string
	Image           string              // that the backup is of, or that is below the volume
	ImageDigest     string              // api.BackingImage.ContentDigest
	ImageChecksum   string              // SHA-512 of the image's source
	Record          *api.RecordedVolume // nil: not known
	ImageRecord     *api.RecordedImage  // of the image that the backup is of; nil: not known
	Labels          map[string]string
}

// IsImage reports whether the backup is that of an image.
func (f Facts) IsImage() bool { return f.Volume == "" }

// labelKeys escapes the keys of labels in tags.
var labelKeys = strings.NewReplacer("%", "%25", "=", "%3D")

// Tags are the tags from which Parse returns f. Labels beyond the bounds of Parse are left out.
func (f Facts) Tags() []string {
	kind, record := kindVolume, f.Record.Encode()
	if f.IsImage() {
		kind, record = kindImage, f.ImageRecord.Encode()
	}
	tags := []string{droverTag, kindTag + "=" + kind}
	for _, t := range [][2]string{{"volume", f.Volume}, {"uid", string(f.VolumeUID)}, {"backup", f.Backup},
		{"object", string(f.Object)}, {"snapshot", f.Snapshot}, {"snapshot-uid", string(f.SnapshotUID)},
		{"created", f.SnapshotCreated}, {"size", strconv.FormatInt(f.VolumeSize, 10)},
		{"uploaded", strconv.FormatInt(f.Uploaded, 10)}, {"mode", f.Mode}, {"image", f.Image},
		{"image-digest", f.ImageDigest}, {"image-checksum", f.ImageChecksum}, {"record", record}, {"origin", f.Origin},
		{"cluster", f.Cluster}, {"node", boundName(f.Node)}} {
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

// Parse reads the tags of a snapshot. It returns false for a snapshot that is no backup by Drover, or whose tags no
// Drover writes.
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
	if _, ours := values[droverTag]; !ours {
		return Facts{}, false
	}
	f.Backup, f.Volume, f.Image = values["backup"], values["volume"], values["image"]
	f.Object, f.VolumeUID = api.UID(values["object"]), api.UID(values["uid"])
	f.Snapshot, f.SnapshotUID = values["snapshot"], api.UID(values["snapshot-uid"])
	f.SnapshotCreated, f.Mode = values["created"], values["mode"]
	f.ImageDigest, f.ImageChecksum = values["image-digest"], values["image-checksum"]
	f.Origin, f.Cluster, f.Node = boundName(values["origin"]), boundName(values["cluster"]), boundName(values["node"])
	if f.IsImage() {
		f.ImageRecord = api.ParseRecordedImage(values["record"])
	} else {
		f.Record = api.ParseRecordedVolume(values["record"])
	}
	var sizeOK, uploadedOK bool
	f.VolumeSize, sizeOK = parseBytes(values["size"])
	f.Uploaded, uploadedOK = parseBytes(values["uploaded"])
	if !sizeOK || !uploadedOK || !f.isSound(values[kindTag]) {
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

// isSound reports whether objects of a kind can have the facts.
func (f *Facts) isSound(kind string) bool {
	created, err := time.Parse(time.RFC3339, f.SnapshotCreated)
	isTime := err == nil && created.Equal(api.BoundTime(created))
	sound := isName(f.Backup) && (f.Image == "" || isName(f.Image)) && f.Object.Validate() == nil &&
		f.VolumeSize <= api.MaxVolumeSize && f.Uploaded <= uploadLimit && isHex(f.ImageDigest, sha256.Size) &&
		isHex(f.ImageChecksum, sha512.Size)
	switch kind {
	case kindVolume:
		return sound && isName(f.Volume) && (f.Snapshot == "" || isName(f.Snapshot)) &&
			(f.VolumeUID == "" || f.VolumeUID.Validate() == nil) &&
			(f.SnapshotUID == "" || f.SnapshotUID.Validate() == nil) && (f.SnapshotCreated == "" || isTime) &&
			(f.Mode == "" || f.Mode == api.BackupFull || f.Mode == api.BackupIncremental)
	case kindImage:
		return sound && api.ValidateImageName(f.Image) == nil && f.ImageDigest != "" && f.Volume == "" && f.Mode == "" &&
			f.VolumeUID == "" && f.Snapshot == "" && f.SnapshotUID == "" && f.SnapshotCreated == ""
	}
	return false
}

// isHex reports whether a text is empty, or n bytes in lower-case hexadecimal digits.
func isHex(text string, n int) bool {
	return text == "" || len(text) == 2*n && strings.Trim(text, "0123456789abcdef") == ""
}

func isName(s string) bool { return len(s) <= NameLimit && len(validation.IsDNS1123Subdomain(s)) == 0 }

// boundName is a name within the bounds, or nothing.
func boundName(s string) string {
	if isName(s) {
		return s
	}
	return ""
}

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
	common := f.commonStatus(snapshot, ended, now)
	common.URL = api.BackupURL(targetURL, f.Backup, f.Volume)
	return api.BackupStatus{CommonBackupStatus: common, SnapshotName: f.Snapshot, SnapshotUID: f.SnapshotUID,
		SnapshotCreatedAt: f.SnapshotCreated, BackupMode: f.Mode, VolumeName: f.Volume, VolumeUID: f.VolumeUID,
		VolumeSize: f.VolumeSize, VolumeBackingImageName: f.Image, VolumeBackingImageDigest: f.ImageDigest,
		VolumeBackingImageChecksum: f.ImageChecksum, RecordedVolume: f.Record.DeepCopy()}
}

// ImageStatus is Status of a BackupBackingImage.
func (f Facts) ImageStatus(targetURL, snapshot string, ended, now time.Time) api.BackupBackingImageStatus {
	common := f.commonStatus(snapshot, ended, now)
	common.URL = api.ImageBackupURL(targetURL, f.Backup, f.Image)
	return api.BackupBackingImageStatus{CommonBackupStatus: common, BackingImage: f.Image, Checksum: f.ImageChecksum,
		Digest: f.ImageDigest, Size: f.VolumeSize, RecordedImage: f.ImageRecord.DeepCopy()}
}

func (f Facts) commonStatus(snapshot string, ended, now time.Time) api.CommonBackupStatus {
	synced := metav1.NewTime(now)
	return api.CommonBackupStatus{State: api.BackupCompleted, Progress: 100,
		ByteProgress: api.ByteProgress{BytesDone: f.VolumeSize, BytesTotal: f.VolumeSize}, Cluster: f.Cluster,
		SnapshotID: snapshot, BackupCreatedAt: ended.UTC().Format(time.RFC3339),
		NewlyUploadDataSize: f.Uploaded, Labels: f.Labels, LastSyncedAt: &synced, SizeText: api.SizeText(f.VolumeSize),
		UploadedText: api.SizeText(f.Uploaded)}
}
