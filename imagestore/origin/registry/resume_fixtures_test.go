package registry

import (
	"encoding/json"
	"os"
	"reflect"
	"testing"
)

// TestPlacesAreReadAndWrittenAsBefore: testdata/v1 has the records of a released version for a place in the disk file
// of a plain layer, which a later version continues byte for byte, and of a packed layer, which no version can continue.
func TestPlacesAreReadAndWrittenAsBefore(t *testing.T) {
	read := func(name string) (raw []byte, st resumeState) {
		t.Helper()
		raw, err := os.ReadFile("testdata/v1/place-" + name + ".json")
		if err == nil {
			err = json.Unmarshal(raw, &st)
		}
		if err != nil {
			t.Fatal(err)
		}
		return raw, st
	}
	want := resumeState{Layers: []string{"sha256:c0ffee", "sha256:f00d"}, Open: 1, Size: 64 << 20, Start: 1536,
		Walk: searchState{Found: "disk/vm.img", Hidden: []string{"disk/old.img"}, Closed: true, Seen: []string{"disk/vm.img"},
			Headers: 3, Beside: 512, Hides: []string{"disk/.wh.b.img"}, Closes: true},
		Off: 4 << 20, Sum: []byte("sha\x05state")}
	was, got := read("plain")
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the record of a plain layer says %+v; it said %+v", got, want)
	}
	now, err := json.Marshal(want)
	if err != nil || string(now) != string(was) {
		t.Errorf("the record of a plain layer is written as\n%s\nand was\n%s: %v", now, was, err)
	}
	if _, got := read("packed"); got.Point == nil {
		t.Error("the record of a packed layer looks like that of a plain one")
	}
}
