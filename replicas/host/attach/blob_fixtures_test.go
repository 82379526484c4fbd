package attach

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/sources"
)

// testdata/v1 has what a released version leaves with the holder for each kind of session, and the file of a node's
// places, both byte for byte. A process of a later version takes devices up by them, and an older one may follow it,
// so they are never changed; a version that writes something else adds a folder, with
//
//	DROVER_WRITE_FIXTURES=v2 go test -run 'TestBlobs|TestPlaces' ./replicas/host/attach
//
// and goes on to read the older ones.
const fixtureNow = "v1"

// likeFixture compares what is written now with a fixture, and returns the fixture.
func likeFixture(t *testing.T, name string, value any) []byte {
	t.Helper()
	now, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	version := os.Getenv("DROVER_WRITE_FIXTURES")
	if version != "" {
		path := filepath.Join("testdata", version, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) // of a released version it stays
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(now); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		return now
	}
	was, err := os.ReadFile(filepath.Join("testdata", fixtureNow, name))
	if err != nil {
		t.Fatal(err)
	}
	if string(now) != string(was) {
		t.Errorf("%s is written as\n%s\nand was\n%s", name, now, was)
	}
	return was
}

const (
	fixVolume = api.UID("00000000-0000-4000-9000-000000000001")
	fixHere   = api.UID("00000000-0000-4000-8000-000000000001")
	fixThere  = api.UID("00000000-0000-4000-8000-000000000002")
	fixComer  = api.UID("00000000-0000-4000-8000-000000000003")
	fixDiskA  = api.UID("00000000-0000-4000-a000-000000000001")
	fixDiskB  = api.UID("00000000-0000-4000-a000-000000000002")
)

// TestBlobsOfEverySessionAreReadAndWrittenAsBefore has a blob of each shape: what a device is resumed by.
func TestBlobsOfEverySessionAreReadAndWrittenAsBefore(t *testing.T) {
	here := memberSpec{Name: "data-a", UID: fixHere, Node: "one", Disk: fixDiskA, Path: "/var/lib/drover/a"}
	there := memberSpec{Name: "data-b", UID: fixThere, Node: "two", Disk: fixDiskB,
		Boot: "5f3c8e0a-4b53-4a57-9d3e-2f0c6a1b7d11/1795"}
	rebuildJob := memberSpec{Name: "data-c", UID: fixComer, Node: "three", Disk: fixDiskB}
	single := blob{Volume: "data", VolumeUID: fixVolume, Replica: fixHere, Disk: fixDiskA, Path: "/var/lib/drover/a",
		Epoch: 7}
	with := func(b blob, change func(b *blob)) blob {
		change(&b)
		return b
	}
	several := with(single, func(b *blob) { b.Now, b.Members = 9, []memberSpec{here, there} })
	for name, want := range map[string]blob{
		"single":          single,
		"single-readonly": with(single, func(b *blob) { b.ReadOnly = true }),
		"single-borrows": with(single, func(b *blob) {
			b.Lenders = []lender{{fixDiskB, "/var/lib/drover/b"}}
		}),
		"several":          several,
		"several-readonly": with(several, func(b *blob) { b.ReadOnly = true }),
		"several-drop":     with(several, func(b *blob) { b.Next = 10 }),
		"several-join":     with(several, func(b *blob) { b.Next, b.Joining = 10, &rebuildJob }),
		"several-borrows": with(several, func(b *blob) {
			b.Lenders = []lender{{fixDiskB, "/var/lib/drover/b"}, {fixDiskA, "/var/lib/drover/c"}}
		}),
		"elsewhere": {Volume: "data", VolumeUID: fixVolume, Epoch: 7, Now: 7, Members: []memberSpec{there}},
	} {
		raw := likeFixture(t, filepath.Join("blob", name+".json"), want)
		var got blob
		if err := json.Unmarshal(raw, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s says %+v, %v; it said %+v", name, got, err, want)
		}
		// As a session keeps it, which has more fields beside.
		s := &Session{blob: got}
		if again := s.snapshotBlob(); !reflect.DeepEqual(again, want) {
			t.Errorf("a session keeps %s as %+v", name, again)
		}
	}
}

// TestPlacesAreReadAndWrittenAsBefore is about the file that a node's process knows others by before it has the API.
func TestPlacesAreReadAndWrittenAsBefore(t *testing.T) {
	want := remote.Known{Disks: map[api.UID]string{fixDiskA: "/var/lib/drover/a"},
		Nodes: map[string]string{"two": "192.0.2.2:7000", "three": "[2001:db8::3]:7000"},
		Far:   map[string][]sources.Source{string(fixComer): {{Node: "two", Address: "192.0.2.2:7001", Disk: fixDiskB}}}}
	var got remote.Known
	raw := likeFixture(t, "peers.json", want)
	if err := json.Unmarshal(raw, &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("it says %+v, %v; it said %+v", got, err, want)
	}
}
