package api

import (
	"strings"
	"testing"
)

func TestBackingImageSpecValidate(t *testing.T) {
	sum := strings.Repeat("aB", 64)
	for _, c := range []struct {
		name string
		spec BackingImageSpec
		kind Kind
		text string // in the message; empty: no error
	}{
		{"download", BackingImageSpec{SourceType: SourceDownload, SourceParameters: map[string]string{"url": "https://h/x"}}, 0, ""},
		{"checksum in capitals", BackingImageSpec{SourceType: SourceDownload, Checksum: sum,
			SourceParameters: map[string]string{"url": "http://h/x"}}, 0, ""},
		{"upload", BackingImageSpec{SourceType: SourceUpload}, 0, ""},
		{"upload of a size", BackingImageSpec{SourceType: SourceUpload, SourceParameters: map[string]string{"size": "5"}}, 0, ""},
		{"file", BackingImageSpec{SourceType: SourceFile, SourceParameters: map[string]string{"path": "/x"}}, 0, ""},
		{"no url", BackingImageSpec{SourceType: SourceDownload}, Invalid, `needs the parameter "url"`},
		{"scheme", BackingImageSpec{SourceType: SourceDownload, SourceParameters: map[string]string{"url": "ftp://h/x"}},
			Invalid, `scheme "ftp"`},
		{"no host", BackingImageSpec{SourceType: SourceDownload, SourceParameters: map[string]string{"url": "http:///x"}},
			Invalid, "no host"},
		{"secret in a bad url", BackingImageSpec{SourceType: SourceDownload,
			SourceParameters: map[string]string{"url": "http://u:pw@h:x/%zz"}}, Invalid, "cannot be read"},
		{"relative path", BackingImageSpec{SourceType: SourceFile, SourceParameters: map[string]string{"path": "x"}},
			Invalid, "must be absolute"},
		{"unknown parameter", BackingImageSpec{SourceType: SourceFile,
			SourceParameters: map[string]string{"path": "/x", "pth": "/y"}}, Invalid, `"pth" is unknown for source type file: it takes path`},
		{"size", BackingImageSpec{SourceType: SourceUpload, SourceParameters: map[string]string{"size": "-1"}}, Invalid, "above 0"},
		{"checksum", BackingImageSpec{SourceType: SourceUpload, Checksum: "abc"}, Invalid, "128 hex digits"},
		{"registry", BackingImageSpec{SourceType: SourceRegistry, SecretRef: &SecretRef{Name: "s"},
			SourceParameters: map[string]string{"url": "docker://h.example:5000/a/b:c"}}, 0, ""},
		{"registry, over http", BackingImageSpec{SourceType: SourceRegistry,
			SourceParameters: map[string]string{"url": "https://h/a"}}, Invalid, "docker://HOST"},
		{"registry, no image", BackingImageSpec{SourceType: SourceRegistry,
			SourceParameters: map[string]string{"url": "docker://h"}}, Invalid, "docker://HOST"},
		{"registry, password", BackingImageSpec{SourceType: SourceRegistry,
			SourceParameters: map[string]string{"url": "docker://me:pw@h/a"}}, Invalid, "belong in a Secret"},
		{"clone", BackingImageSpec{SourceType: SourceClone, SourceParameters: map[string]string{"backingImage": "a"}}, 0, ""},
		{"clone of what", BackingImageSpec{SourceType: SourceClone}, Invalid, `needs the parameter "backingImage"`},
		{"clone of a path", BackingImageSpec{SourceType: SourceClone,
			SourceParameters: map[string]string{"backingImage": "../a"}}, Invalid, "cannot be the name"},
		{"a secret for a file", BackingImageSpec{SourceType: SourceFile, SecretRef: &SecretRef{Name: "s"},
			SourceParameters: map[string]string{"path": "/x"}}, Invalid, "asks for no secret"},
		{"a secret without a name", BackingImageSpec{SourceType: SourceDownload, SecretRef: &SecretRef{},
			SourceParameters: map[string]string{"url": "https://h/x"}}, Invalid, "the name of a Secret"},
		{"restore of nothing", BackingImageSpec{SourceType: SourceRestore}, Invalid, `needs the parameter "backup-url"`},
		{"restore of a target", BackingImageSpec{SourceType: SourceRestore,
			SourceParameters: map[string]string{RestoreBackupURL: "s3://bucket@region/path"}}, Invalid, "no URL of a backup"},
		{"restore with a password", BackingImageSpec{SourceType: SourceRestore, SourceParameters: map[string]string{
			RestoreBackupURL: "s3://me:secret@bucket/path?backup=b&volume=v"}}, Invalid, "no URL of a backup"},
		{"restore from a bucket with a region", BackingImageSpec{SourceType: SourceRestore,
			SourceParameters: map[string]string{RestoreBackupURL: "s3://bucket@region/path?backup=b&volume=v"}}, 0, ""},
		{"restore as in Longhorn", BackingImageSpec{SourceType: SourceRestore, SourceParameters: map[string]string{
			RestoreBackupURL:  "nfs://host:/srv/t?nfsOptions=soft&backingImage=golden",
			RestoreTargetName: "default", RestoreConcurrency: "2"}}, 0, ""},
		{"restore with a limit", BackingImageSpec{SourceType: SourceRestore, SourceParameters: map[string]string{
			RestoreBackupURL: "s3://bucket@region/?backingImage=golden", RestoreConcurrency: "two"}}, Invalid, "a number"},
		{"unknown type", BackingImageSpec{SourceType: "tape"}, Invalid, `"tape" is unknown`},
		{"disk", BackingImageSpec{SourceType: SourceUpload, CleanupDisks: []UID{"../x"}}, Invalid, "not a UID"},
	} {
		err := c.spec.Validate()
		if c.text == "" {
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			continue
		}
		if !Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: got %v (kind %v), want %q of kind %v", c.name, err, KindOf(err), c.text, c.kind)
		}
		if err != nil && strings.Contains(err.Error(), "pw") {
			t.Errorf("%s: the message shows the password: %v", c.name, err)
		}
	}
	s := BackingImageSpec{Checksum: " " + sum + "\n"}
	if s.Normalize(); s.Checksum != strings.ToLower(sum) || s.SourceParameters == nil {
		t.Errorf("normalized to %+v", s)
	}
	for name, ok := range map[string]bool{"debian-12.raw": true, "": false, "-a": false, "A": false,
		strings.Repeat("a", 64): false, "a/b": false} {
		if err := ValidateImageName(name); (err == nil) != ok {
			t.Errorf("name %q: %v", name, err)
		}
	}
}
