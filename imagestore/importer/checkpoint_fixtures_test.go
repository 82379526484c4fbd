package importer

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"drover.io/drover/imagestore/origin"
)

// testdata/v1 has the records of a released version beside a half-made layer, byte for byte: a later version continues
// the import from the records, or has to refuse the records. A version with other records adds a folder, with
//
//	DROVER_WRITE_FIXTURES=v2 go test -run TestNotesOfHalfMadeLayers ./imagestore/importer

// TestNotesOfHalfMadeLayersAreReadAndWrittenAsBefore has a note of each way to make a layer.
func TestNotesOfHalfMadeLayersAreReadAndWrittenAsBefore(t *testing.T) {
	mark := origin.Mark{Off: 4 << 20, Size: 64 << 20, Validator: `"etag"`}
	summed := mark
	summed.CRC = 0xdeadbeef
	sum := []byte("sha\x05state")
	for name, want := range map[string]checkpointRecord{
		"raw":    {Mark: mark, Sum: sum, From: 4 << 20},
		"upload": {Mark: summed, Sum: sum, From: 4 << 20},
		"registry": {Mark: mark, Sum: sum, From: 2 << 20,
			State: json.RawMessage(`{"layers":["sha256:c0ffee"],"open":0}`)},
		"packed": {Mark: mark, Sum: sum, From: 6 << 20, Packed: json.RawMessage(
			`{"point":{"format":2,"packed":5242880,"plain":7340032,"window":1048576,"state":{"know":{}}},"off":8388608}`)},
		"converted": {Mark: mark, Sum: sum, From: 4 << 20, Format: formatQCOW2, Spool: &scratchState{Have: 4 << 20,
			Gone: []byte{1, 0, 0, 0, 0, 0, 0, 0}, Part: map[int64]int{3: 512, 9: 4096},
			Early: []lookaheadRecord{{Unit: 60, Sum: []byte("digest")}}}},
	} {
		raw := noteFixture(t, name, want)
		k := Checkpoint{at: want.Mark.Off}
		if err := json.Unmarshal(raw, &k.record); err != nil || !reflect.DeepEqual(k.record, want) {
			t.Errorf("%s says %+v, %v; it said %+v", name, k.record, err, want)
		}
		if k.isUsable() != (name != "packed") { // no version can continue an archive any more
			t.Errorf("%s is continued: %v", name, k.isUsable())
		}
	}
	want, got := copyNote{Root: "c0ffee", Size: 64 << 20}, copyNote{}
	if err := json.Unmarshal(noteFixture(t, "copy", want), &got); err != nil || got != want {
		t.Errorf("copy says %+v, %v; it said %+v", got, err, want)
	}
}

// noteFixture compares the present record with a fixture, and returns the fixture.
func noteFixture(t *testing.T, name string, note any) []byte {
	t.Helper()
	now, err := json.Marshal(note)
	if err != nil {
		t.Fatal(err)
	}
	version := os.Getenv("DROVER_WRITE_FIXTURES")
	if version != "" {
		path := filepath.Join("testdata", version, "note-"+name+".json")
		if _, err := os.Stat(path); err == nil {
			t.Fatalf("%s exists: a fixture of a released version stays", path)
		}
		err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, now, 0o644))
		if err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(filepath.Join("testdata", "v1", "note-"+name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if string(now) != string(was) {
		t.Errorf("%s is written as\n%s\nand was\n%s", name, now, was)
	}
	return was
}
