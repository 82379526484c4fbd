package attach

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/sources"
)

// testdata/v1, v2, ... have the blobs that a released version leaves with the holder for each kind of session, and
// the file of a node's places, both byte for byte. A process of a later version resumes devices by these files, and
// an older process may follow, so the files never change. A version with another blob adds a folder with the new blob
// alone, here v3, with
//
//	DROVER_WRITE_FIXTURES=v3 go test -run 'TestBlobs|TestPlaces' ./replicas/host/attach
//
// and a row of the test; this version still reads blobs of the older rows, and writes the same.

// likeFixture compares the present encoding of a value with a fixture of a version, and returns the fixture.
func likeFixture(t *testing.T, version, name string, value any) []byte {
	t.Helper()
	now, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", version, name)
	if os.Getenv("DROVER_WRITE_FIXTURES") == version {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) // O_EXCL keeps a released file
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
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(now) != string(was) {
		t.Errorf("%s is written as\n%s\nand was\n%s", path, now, was)
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

// TestBlobsOfEverySessionAreReadAndWrittenAsBefore: this version reads the device records of each released version,
// and writes the same bytes, for each kind of session.
func TestBlobsOfEverySessionAreReadAndWrittenAsBefore(t *testing.T) {
	here := memberSpec{Name: "data-a", UID: fixHere, Node: "one", Disk: fixDiskA, Path: "/var/lib/drover/a"}
	there := memberSpec{Name: "data-b", UID: fixThere, Node: "two", Disk: fixDiskB,
		Boot: "5f3c8e0a-4b53-4a57-9d3e-2f0c6a1b7d11/1795"}
	joining := memberSpec{Name: "data-c", UID: fixComer, Node: "three", Disk: fixDiskB}
	single := blob{Volume: "data", VolumeUID: fixVolume, Replica: fixHere, Disk: fixDiskA, Path: "/var/lib/drover/a",
		Epoch: 7}
	with := func(b blob, change func(b *blob)) blob {
		change(&b)
		return b
	}
	several := with(single, func(b *blob) { b.Now, b.Members = 9, []memberSpec{here, there} })
	missing := there
	missing.Missing = true
	// A volume with one replica has a member since v2, and notes no intents.
	alone := with(single, func(b *blob) { b.Now, b.Members, b.Alone = 7, []memberSpec{here}, true })
	for name, want := range map[string]blob{
		"v1/blob/single":          single,
		"v1/blob/single-readonly": with(single, func(b *blob) { b.ReadOnly = true }),
		"v1/blob/single-borrows": with(single, func(b *blob) {
			b.Lenders = []lender{{fixDiskB, "/var/lib/drover/b"}}
		}),
		"v1/blob/several":          several,
		"v1/blob/several-readonly": with(several, func(b *blob) { b.ReadOnly = true }),
		"v1/blob/several-drop":     with(several, func(b *blob) { b.Next = 10 }),
		"v1/blob/several-join":     with(several, func(b *blob) { b.Next, b.Joining = 10, &joining }),
		"v1/blob/several-borrows": with(several, func(b *blob) {
			b.Lenders = []lender{{fixDiskB, "/var/lib/drover/b"}, {fixDiskA, "/var/lib/drover/c"}}
		}),
		"v1/blob/elsewhere": {Volume: "data", VolumeUID: fixVolume, Epoch: 7, Now: 7, Members: []memberSpec{there}},

		"v2/blob/single":          alone,
		"v2/blob/single-readonly": with(alone, func(b *blob) { b.ReadOnly = true }),
		"v2/blob/single-join":     with(alone, func(b *blob) { b.Alone, b.Next, b.Joining = false, 10, &joining }),
		"v2/blob/elsewhere": {Volume: "data", VolumeUID: fixVolume, Epoch: 7, Now: 7, Alone: true,
			Members: []memberSpec{there}},
		"v2/blob/several-missing": with(several, func(b *blob) { b.Members = []memberSpec{here, missing} }),
	} {
		version, file, _ := strings.Cut(name, "/")
		raw := likeFixture(t, version, file+".json", want)
		var got blob
		if err := json.Unmarshal(raw, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s says %+v, %v; it said %+v", name, got, err, want)
		}
		// A session keeps the blob beside more fields.
		s := &Session{blob: got}
		if again := s.snapshotBlob(); !reflect.DeepEqual(again, want) {
			t.Errorf("a session keeps %s as %+v", name, again)
		}
	}
	// A blob of v1 names no member of a volume with one replica, and equals a blob of v2 but for the object's name.
	single.upgrade("one")
	if alone.Members[0].Name = ""; !reflect.DeepEqual(single, alone) {
		t.Errorf("the blob of v1 becomes\n%+v, not\n%+v", single, alone)
	}
}

// TestPlacesAreReadAndWrittenAsBefore: this version reads and writes the same file as a released version, by which a
// node's process knows other nodes before the process has the API.
func TestPlacesAreReadAndWrittenAsBefore(t *testing.T) {
	want := remote.Known{Disks: map[api.UID]string{fixDiskA: "/var/lib/drover/a"},
		Nodes: map[string]string{"two": "192.0.2.2:7000", "three": "[2001:db8::3]:7000"},
		Far:   map[string][]sources.Source{string(fixComer): {{Node: "two", Address: "192.0.2.2:7001", Disk: fixDiskB}}}}
	var got remote.Known
	raw := likeFixture(t, "v1", "peers.json", want)
	if err := json.Unmarshal(raw, &got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("it says %+v, %v; it said %+v", got, err, want)
	}
}
