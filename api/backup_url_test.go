package api

import "testing"

// TestURLsOfABackup: URLs of Drover and Longhorn name the same backup if they differ in the order of their parameters,
// in a slash at the end, in the name of the scheme, or in the options of the mount; all others name another one.
func TestURLsOfABackup(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{BackupURL("s3://bucket@eu-west-1/path/", "b", "v"), "s3://bucket@eu-west-1/path?backup=b&volume=v", true},
		{BackupURL("s3://bucket@eu-west-1/", "b", "v"), "s3://bucket@eu-west-1?volume=v&backup=b", true},
		{BackupURL("nfs://host:/srv/t?nfsOptions=soft,timeo=330", "b", "v"), "nfs://host:/srv/t?backup=b&volume=v", true},
		{BackupURL("nfs://Host:/srv/t", "b", "v"), "nfs://host/srv/t?nfsOptions=hard&backup=b&volume=v", true},
		{BackupURL("file:///srv/t", "b", "v"), "vfs:///srv/t/?backup=b&volume=v", true},
		{ImageBackupURL("cifs://host/share", "b", "golden"), "smb://host/share?backup=b&backingImage=golden", true},
		{BackupURL("s3://bucket@eu-west-1/path", "b", "v"), "s3://bucket@eu-west-2/path?backup=b&volume=v", false},
		{BackupURL("s3://bucket@eu-west-1/path", "b", "v"), "s3://other@eu-west-1/path?backup=b&volume=v", false},
		{BackupURL("s3://bucket@eu-west-1/path", "b", "v"), "s3://bucket@eu-west-1/Path?backup=b&volume=v", false},
		{BackupURL("file:///srv/t", "b", "v"), "file:///srv/t?backup=b&volume=w", false},
		{BackupURL("file:///srv/t", "b", "v"), "file:///srv/t?backup=c&volume=v", false},
		{BackupURL("file:///srv/t", "b", "v"), "file:///srv/t?backup=b&backingImage=v", false},
		{BackupURL("file:///srv/t", "b", "v"), "file:///srv/t?volume=v", false},
	} {
		if SameBackup(c.a, c.b) != c.same || SameBackup(c.b, c.a) != c.same {
			t.Errorf("%s and %s: want %v", c.a, c.b, c.same)
		}
	}
}

// TestURLOfLonghornsImage: the URL without a backup names all backups of the image, and no other URL does.
func TestURLOfLonghornsImage(t *testing.T) {
	r, err := ParseBackupURL("nfs://host:/srv/t?backingImage=golden")
	if err != nil || r.NamesBackup() {
		t.Fatalf("%+v, %v", r, err)
	}
	for _, b := range []string{"golden", "golden-1f3a9c2b.default"} {
		if url := ImageBackupURL("nfs://host:/srv/t/?nfsOptions=soft", b, "golden"); !r.Matches(url) || SameBackup(url, r.store) {
			t.Errorf("%s is none of the backups", url)
		}
	}
	for _, url := range []string{ImageBackupURL("nfs://host:/srv/t", "b", "silver"), BackupURL("nfs://host:/srv/t", "b", "golden"),
		"", "::"} {
		if r.Matches(url) {
			t.Errorf("%s is one of the backups", url)
		}
	}
	for _, text := range []string{"", "golden", "file:///srv/t", "file:///srv/t?backup=b", "file:///srv/t?backingImage=",
		"file:///srv/t?backup=b&volume=v&backingImage=i", "s3://me:secret@bucket/t?backup=b&volume=v", "%zz?backup=b&volume=v"} {
		if _, err := ParseBackupURL(text); !Is(err, Invalid) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestBackupIsReadableOnTheNodeThatKnowsAll: the node knows all digests of the backup that the URL names.
func TestBackupIsReadableOnTheNodeThatKnowsAll(t *testing.T) {
	url := BackupURL("s3://bucket@eu-west-1/", "b", "v")
	for _, c := range []struct {
		of     string
		digest *DigestsFact
		want   string
	}{{url, nil, ""}, {url, &DigestsFact{"n", 99}, ""}, {url, &DigestsFact{"n", 100}, "n"},
		{BackupURL("s3://bucket@eu-west-1/", "c", "v"), &DigestsFact{"n", 100}, ""}, {"", &DigestsFact{"n", 100}, ""}} {
		var b Backup
		b.Status.URL, b.Status.Digests = c.of, c.digest
		if got := ReadableOn([]Backup{{}, b}, url); got != c.want {
			t.Errorf("%+v: node %q, want %q", c, got, c.want)
		}
	}
	if got := ReadableOn([]Backup{{}}, "no URL"); got != "" {
		t.Errorf("node %q", got)
	}
}
