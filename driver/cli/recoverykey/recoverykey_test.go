package recoverykey

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestTextNamesTheStore: the commands in the file name the store as restic does, and the place of the key file.
func TestTextNamesTheStore(t *testing.T) {
	content := []byte("{}")
	sum := sha256.Sum256(content)
	name := hex.EncodeToString(sum[:])
	for url, want := range map[string][2]string{
		"file:///mnt/backups":            {"restic -r /mnt/backups --", "> /mnt/backups/keys/" + name},
		"s3://backups@eu-west-1/drover/": {"restic -r s3:https://SERVER/backups/drover --", "> keys/" + name},
		"s3://backups/drover":            {"restic -r s3:https://SERVER/backups/drover --", "> keys/" + name},
		"sftp://nas.example/srv/backups": {"restic -r sftp://nas.example//srv/backups --", "> keys/" + name},
		"nfs://nas.example:/exports/a":   {"restic -r REPOSITORY --", "> keys/" + name},
	} {
		k := Key{Target: "t", URL: url, Password: "secret", Name: name, Content: content}
		if err := k.Check(); err != nil {
			t.Error(err)
		}
		for _, part := range append(want[:], "\nurl: "+url+"\n", "\npassword: secret\n") {
			if text := string(k.Text()); !strings.Contains(text, part) {
				t.Errorf("%s: the text lacks %q:\n%s", url, part, text)
			}
		}
	}
}

// TestDamagedKeyFileIsRefused: a key file that does not match its name, or a password that is no line, is not written.
func TestDamagedKeyFileIsRefused(t *testing.T) {
	content := []byte("{}")
	sum := sha256.Sum256(content)
	good := Key{Password: "secret", Name: hex.EncodeToString(sum[:]), Content: content}
	for _, change := range []func(*Key){
		func(k *Key) { k.Content = []byte("{ }") },
		func(k *Key) { k.Name = "" },
	} {
		k := good
		if change(&k); !api.Is(k.Check(), api.Corrupt) {
			t.Errorf("%+v: %v, want an error of kind corrupt", k, k.Check())
		}
	}
	good.Password = "two\nlines"
	if err := good.Check(); !api.Is(err, api.Invalid) {
		t.Errorf("a password of two lines: %v", err)
	}
}
