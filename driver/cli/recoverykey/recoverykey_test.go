package recoverykey

import (
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/keys"
)

// TestTextNamesTheStore: the commands in the file name the store as restic does, and the place of the key file.
func TestTextNamesTheStore(t *testing.T) {
	name, content := keyFile(t, "secret")
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

// keyFile is a key file that opens with a password, and its name.
func keyFile(t *testing.T, password string) (name string, content []byte) {
	t.Helper()
	content, err := keys.Wrap(blob.Secret{}, password, "host", "user")
	if err != nil {
		t.Fatal(err)
	}
	return blob.Sum(content).String(), content
}

// TestWrongKeyFileIsRefused: a key file that does not match its name, or does not open with the password, is refused.
func TestWrongKeyFileIsRefused(t *testing.T) {
	name, content := keyFile(t, "secret")
	garbage := []byte("{}")
	for what, c := range map[string]struct {
		change func(*Key)
		want   api.Kind
	}{
		"changed":          {func(k *Key) { k.Content = append(content, ' ') }, api.Corrupt},
		"without a name":   {func(k *Key) { k.Name = "" }, api.Corrupt},
		"another password": {func(k *Key) { k.Password = "Secret" }, api.Denied},
		"not a key file":   {func(k *Key) { k.Name, k.Content = blob.Sum(garbage).String(), garbage }, api.Unsupported},
	} {
		k := Key{Password: "secret", Name: name, Content: content}
		if c.change(&k); !api.Is(k.Check(), c.want) {
			t.Errorf("%s: %v, want an error of kind %v", what, k.Check(), c.want)
		}
	}
}

// TestPasswordSurvivesTheFile: a password that restic would read from the file as another one is refused.
func TestPasswordSurvivesTheFile(t *testing.T) {
	for password, good := range map[string]bool{
		"secret": true, "two words": true, "ü#'\"": true,
		"": false, " secret": false, "secret ": false, "two\nlines": false, "tab\t": false, "\ufeffsecret": false,
		"\u00a0secret": false, "nul\x00": false, "\xff": false,
	} {
		if err := CheckPassword(password); (err == nil) != good || !good && !api.Is(err, api.Invalid) {
			t.Errorf("%q: %v, want good: %v", password, err, good)
		}
	}
}
