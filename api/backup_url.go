package api

import (
	"net/url"
	"strings"
)

// BackupRef is a parsed URL of a backup.
//
// +kubebuilder:object:generate=false
type BackupRef struct {
	store                 string // of the target, without its options
	volume, image, backup string // volume or image is empty
}

// ParseBackupURL reads the URL of a backup: that of the target's store, and ?backup=BACKUP&volume=VOLUME, or
// ?backingImage=IMAGE&backup=BACKUP. In Longhorn's URL of an image there is no backup. The error does not repeat the
// text, which may hold a password.
func ParseBackupURL(text string) (BackupRef, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme == "" || hasPassword(u) {
		return BackupRef{}, errNoBackupURL
	}
	q := u.Query()
	r := BackupRef{storeOf(u), q.Get("volume"), q.Get("backingImage"), q.Get("backup")}
	if (r.volume == "") == (r.image == "") || r.volume != "" && r.backup == "" {
		return BackupRef{}, errNoBackupURL
	}
	return r, nil
}

var errNoBackupURL = Errorf(Invalid, "the text is no URL of a backup: copy status.url of the Backup")

// storeOf names the store of a URL: URLs that differ in the options of a mount, in a slash at the end, or in the name
// of the scheme, name one store.
func storeOf(u *url.URL) string {
	scheme := u.Scheme
	switch scheme {
	case "vfs":
		scheme = "file"
	case "smb":
		scheme = "cifs"
	}
	s := url.URL{Scheme: scheme, User: u.User, Host: strings.ToLower(strings.TrimSuffix(u.Host, ":")), Opaque: u.Opaque,
		Path: strings.TrimRight(u.Path, "/")}
	return s.String()
}

// NamesBackup reports whether the URL names a single backup. Longhorn's URL of an image does not: a store of Drover may
// have backups of several images of one name.
func (r BackupRef) NamesBackup() bool { return r.backup != "" }

// Matches reports whether a backup with a URL is the one, or one of those, that r names.
func (r BackupRef) Matches(text string) bool {
	o, err := ParseBackupURL(text)
	if err != nil {
		return false
	}
	return o == r || o.AnyOfImage() == r
}

// NameIn is the backup's name in the store of a target, and its StoredBackup.Subject; empty: the backup is of another
// store, or r names no single backup.
func (r BackupRef) NameIn(targetURL string) (backup, subject string) {
	u, err := url.Parse(targetURL)
	switch {
	case err != nil || storeOf(u) != r.store || !r.NamesBackup():
		return "", ""
	case r.image != "":
		return r.backup, (&BackupBackingImage{Spec: BackupBackingImageSpec{BackingImageName: r.image}}).Subject()
	}
	return r.backup, (&Backup{Spec: BackupSpec{Volume: r.volume}}).Subject()
}

// AnyOfImage is r as Longhorn names the backup of an image.
func (r BackupRef) AnyOfImage() BackupRef {
	if r.image != "" {
		r.backup = ""
	}
	return r
}

// SameBackup reports whether two texts are URLs of the same backup.
func SameBackup(a, b string) bool {
	r, err := ParseBackupURL(a)
	o, otherErr := ParseBackupURL(b)
	return err == nil && otherErr == nil && r == o
}

// ValidateBackupURL refuses a text that is not the URL of a backup.
func ValidateBackupURL(text string) error {
	_, err := ParseBackupURL(text)
	return err
}

// BackupOfURL is the name of a backup in its target, from the backup's URL; empty: the text is no such URL, or names an
// image as Longhorn does.
func BackupOfURL(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return ""
	}
	return u.Query().Get("backup")
}
