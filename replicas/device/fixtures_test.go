package device

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"drover.io/drover/api"
)

// testdata/v1 has, byte for byte, a released version's messages to the holder, and the device records. The holder's
// process outlives upgrades: each version speaks with all older holders, and reads the records of older processes. A
// version with other messages or records adds a folder, with
//
//	DROVER_WRITE_FIXTURES=v2 go test -run BeforeThis ./replicas/device
const fixtureNow = "v1"

func sameAsFixture(t *testing.T, name string, value, into any) {
	t.Helper()
	now, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	if version := os.Getenv("DROVER_WRITE_FIXTURES"); version != "" {
		path := filepath.Join("testdata", version, name)
		if _, err := os.Stat(path); err == nil {
			t.Fatalf("%s exists: a fixture of a released version stays", path)
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, now, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(filepath.Join("testdata", fixtureNow, name))
	if err != nil {
		t.Fatal(err)
	}
	if string(now) != string(was) {
		t.Errorf("%s is written as\n%s\nand was\n%s", name, now, was)
	}
	if err := json.Unmarshal(was, into); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if got := reflect.ValueOf(into).Elem().Interface(); !reflect.DeepEqual(got, value) {
		t.Errorf("%s says %+v, and said %+v", name, got, value)
	}
}

// TestHolderIsSpokenToAsBeforeThis has each ask and each answer of the holder's protocol.
func TestHolderIsSpokenToAsBeforeThis(t *testing.T) {
	for name, a := range map[string]ask{
		"hello":  {Op: askHello, Least: 1795352399440},
		"put":    {Op: askPut, Key: "00000000-0000-4000-9000-000000000001", Blob: []byte(`{"Key":"k"}`)},
		"get":    {Op: askGet, Key: "00000000-0000-4000-9000-000000000001"},
		"list":   {Op: askList, After: "00000000-0000-4000-9000-000000000001"},
		"delete": {Op: askDelete, Key: "00000000-0000-4000-9000-000000000001"},
	} {
		sameAsFixture(t, "holder/ask-"+name+".json", a, new(ask))
	}
	for name, a := range map[string]answer{
		"hello":   {Incarnation: 1795352399441},
		"done":    {},
		"get":     {Blob: []byte(`{"Key":"k"}`)},
		"list":    {Keys: []string{"00000000-0000-4000-9000-000000000001", "b"}, More: true},
		"missing": {Err: `the holder keeps nothing under "k"`, Kind: api.NotFound},
	} {
		sameAsFixture(t, "holder/answer-"+name+".json", a, new(answer))
	}
}

// TestErrorKindsKeepTheirNumbersBeforeThis: the holder's answers carry kinds as numbers.
func TestErrorKindsKeepTheirNumbersBeforeThis(t *testing.T) {
	var got []string
	for k := api.Other; k <= api.Denied; k++ {
		got = append(got, k.String())
	}
	sameAsFixture(t, "holder/kinds.json", got, new([]string))
}

// TestRecordsOfDevicesAreKeptAsBeforeThis has the records that the holder keeps beside the descriptors of a device.
func TestRecordsOfDevicesAreKeptAsBeforeThis(t *testing.T) {
	spec := Spec{Key: "00000000-0000-4000-9000-000000000001", Name: "data", Size: 1 << 30, Blob: []byte(`{"volume":"data"}`)}
	readOnly := spec
	readOnly.ReadOnly = true
	for name, r := range map[string]record{
		"new":       {Spec: spec, Loop: loopUnknown, File: "0123abcd-data"},
		"shown":     {Spec: spec, Loop: 17, File: "0123abcd-data"},
		"read-only": {Spec: readOnly, Loop: 0, File: "0123abcd-data"},
		"unnamed":   {Spec: spec, Loop: 3}, // of a version that named files by the key alone
	} {
		sameAsFixture(t, "record/"+name+".json", r, new(record))
		if r.File == "" && r.fileName() != oldFileName(spec.Key) {
			t.Errorf("the file of an unnamed device is %q", r.fileName())
		}
	}
	sameAsFixture(t, "freeze.json", frozenRecord{Boot: "5f3c8e0a-4b53-4a57-9d3e-2f0c6a1b7d11", Key: spec.Key, Loop: 17},
		new(frozenRecord))
}
