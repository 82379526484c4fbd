package describe

import (
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestLabelsOfAStoreForgeNothing: labels and the message of a backup, which a store supplies, neither begin a line nor
// move the cursor nor turn the direction of the text.
func TestLabelsOfAStoreForgeNothing(t *testing.T) {
	const hostile = "x\nState:  Completed\r\x1b[2J\u009b2J\u202e"
	b := &api.Backup{Status: api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupError,
		Message: hostile, Labels: map[string]string{hostile: hostile}}}}
	var out strings.Builder
	Backup(&out, b)
	if strings.Count(out.String(), "\nState:") != 1 || strings.ContainsAny(out.String(), "\r\x1b\u009b\u202e") {
		t.Errorf("%q", out.String())
	}
}
