package cli

import (
	"strings"
	"testing"

	"drover.io/drover/api"
)

func TestTableIsAlignedAndHasNoControlCharacters(t *testing.T) {
	var out strings.Builder
	if err := printTable(&out, "NAME STATE", [][]string{{"a-long-name", ""}, {"b", "re\x1b[31mady"}}); err != nil {
		t.Fatal(err)
	}
	if want := "NAME          STATE\na-long-name   -\nb             re?[31mady\n"; out.String() != want {
		t.Errorf("the table is\n%swant\n%s", out.String(), want)
	}
	out.Reset()
	if err := printTable(&out, "NAME STATE", nil); err != nil || out.String() != "NAME   STATE\n" {
		t.Errorf("an empty table is %q, %v", out.String(), err)
	}
}

// TestLabelsOfAStoreForgeNothing: labels of a backup and reasons of a wait, which a store supplies, neither begin a line
// nor move the cursor nor turn the direction of the text.
func TestLabelsOfAStoreForgeNothing(t *testing.T) {
	const hostile = "x\nState:  Completed\r\x1b[2J\u009b2J\u202e"
	b := &api.Backup{Status: api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupError,
		Message: hostile, Labels: map[string]string{hostile: hostile}}}}
	var out strings.Builder
	describeBackup(&out, b)
	remarkOn(&out, "backup", "b")(hostile)
	if strings.Count(out.String(), "\nState:") != 1 || strings.ContainsAny(out.String(), "\r\x1b\u009b\u202e") {
		t.Errorf("%q", out.String())
	}
}
