package stack

import (
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/format"
)

// TestRecordOfAnOlderProgramIsRead: stack.json of an older program has a field which no code reads any more, and is
// still read.
func TestRecordOfAnOlderProgramIsRead(t *testing.T) {
	d, uid := newDisk(t), string(api.NewUID())
	if err := d.CreateReplica(t.Context(), Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	for _, winner := range []string{"", uid} {
		name := filepath.Join(d.Path(), "replicas", uid, stackFile)
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var body map[string]any
		if err := format.DecodeMeta(data, formatStack, &body); err != nil {
			t.Fatal(err)
		}
		body["winner"] = winner
		if data, err = format.EncodeMeta(formatStack, body); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := d.Stack(uid)
		if err != nil {
			t.Fatalf("winner %q: %v", winner, err)
		}
		if m.UID != uid {
			t.Errorf("winner %q: read %+v", winner, m)
		}
	}
}
