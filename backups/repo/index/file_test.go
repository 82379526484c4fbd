package index

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/pack"
	"drover.io/drover/block/suite"
)

func scanAll(content string) (all []Pack, err error) {
	_, err = Scan(iotest.HalfReader(strings.NewReader(content)), func(p Pack) error {
		p.Entries = slices.Clone(p.Entries)
		all = append(all, p)
		return nil
	})
	return all, err
}

// TestScanReturnsWhatWasWritten: an index file of packs, live and hidden, larger than the window of the scanner, is
// read as written, and encoding/json reads the same.
func TestScanReturnsWhatWasWritten(t *testing.T) {
	want := randomPacks(rand.New(rand.NewPCG(suite.Seed(t), 0)), 30, 100)
	want[29].Hidden, want[29].Time = true, time.Date(2026, 3, 4, 5, 6, 7, 8, time.UTC)
	want[28].Hidden = true
	var b FileBuilder
	for _, p := range want {
		b.Add(p)
	}
	if b.Packs() != 30 || b.Full(1000) || !b.Full(FileBlobs) {
		t.Errorf("the builder counts wrongly: %d packs", b.Packs())
	}
	got, err := scanAll(string(b.Bytes()))
	must(t, err)
	for i := range got {
		if got[i].ID == want[29].ID && !got[i].Time.Equal(want[29].Time) {
			t.Errorf("the time is %v, want %v", got[i].Time, want[29].Time)
		}
	}
	sortPacks := func(p []Pack) []Pack {
		slices.SortFunc(p, func(a, b Pack) int { return bytes.Compare(a.ID[:], b.ID[:]) })
		for i := range p {
			if len(p[i].Entries) == 0 {
				p[i].Entries = nil
			}
		}
		return p
	}
	if !reflect.DeepEqual(sortPacks(got), sortPacks(want)) {
		t.Errorf("%d packs were read that differ from the %d written", len(got), len(want))
	}
	var plain struct {
		Packs, PacksToDelete []struct{ Blobs []struct{ Type string } }
	}
	must(t, json.Unmarshal(b.Bytes(), &plain))
	if len(plain.Packs) != 28 {
		t.Errorf("encoding/json reads %d live packs, want 28", len(plain.Packs))
	}
}

const (
	idText   = `"0000000000000000000000000000000000000000000000000000000000000001"`
	blobText = `{"id":` + idText + `,"type":"data","offset":0,"length":38}`
)

// accepted are spellings of an index file with a pack of a single blob.
var accepted = []string{
	`{"packs":[{"id":` + idText + `,"blobs":[` + blobText + `]}]}`,
	`{"supersedes":[` + idText + `],"packs":[{"blobs":[` + blobText + `],"id":` + idText + `}],` +
		`"other":{"a":[1,-2.5e3,"\"",true,null]}}`,
	" { \"packs\" : [ { \"id\" : " + idText + " ,\n\"blobs\":[ " + blobText + " ] , \"size\": 12 } ] } \n",
	`{"packs":[{"id":` + idText + `,"blobs":[{"type":"data","x":"é\\","length":38,"offset":0,` +
		`"id":` + idText + `}]}],"packs_to_delete":null}`,
}

// TestScanAcceptsOtherSpellings: order, white space and unknown fields do not matter.
func TestScanAcceptsOtherSpellings(t *testing.T) {
	one := blob.ID{31: 1}
	want := []Pack{{ID: one, Entries: []pack.Entry{{ID: one, Length: 38}}}}
	for _, content := range accepted {
		if got, err := scanAll(content); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", content, got, err)
		}
	}
}

// refused are files that no writer makes.
var refused = []string{
	``, `{`, `[]`, `{}x`, `null`, `{"packs":{}}`, `{"packs":[{}]}`, `{"packs":[{"id":"00"}]}`,
	`{"packs":[]`, `{"packs":[],}`,
	`{"packs":[{"id":` + strings.Replace(idText, "0", "\\u0030", 1) + `}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[{}]}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[` + strings.Replace(blobText, "data", "file", 1) + `]}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[` + strings.Replace(blobText, "38", "-1", 1) + `]}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[` + strings.Replace(blobText, "38", "4294967296", 1) + `]}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[` + strings.Replace(blobText, "38", "38.5", 1) + `]}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[` + strings.Replace(blobText, "38", "31", 1) + `]}]}`,
	`{"packs":[{"id":` + idText + `,"blobs":[` + strings.Replace(blobText, "38", "4000000000", 1) + `]}]}`,
	`{"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000) + `}`,
	`{"` + strings.Repeat("x", 1000) + `":1}`,
	`{"packs":[{"id":` + idText + `,"time":"yesterday","blobs":[]}]}`,
}

// TestScanRefusesDamage: each refused file, and each accepted file cut anywhere, is an error of kind corrupt.
func TestScanRefusesDamage(t *testing.T) {
	files := slices.Clone(refused)
	for _, content := range accepted {
		content = strings.TrimSpace(content)
		for n := range content {
			files = append(files, content[:n])
		}
	}
	for _, content := range files {
		if _, err := scanAll(content); !api.Is(err, api.Corrupt) {
			t.Errorf("%.200s: %v, want an error of kind corrupt", content, err)
		}
	}
}

// TestScanPassesErrorsOn: errors of the stream and of the caller arrive as such.
func TestScanPassesErrorsOn(t *testing.T) {
	broken := errors.New("broken")
	if _, err := Scan(iotest.ErrReader(broken), nil); !errors.Is(err, broken) {
		t.Errorf("%v, want the error of the stream", err)
	}
	if _, err := Scan(strings.NewReader(accepted[0]), func(Pack) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("%v, want the error of the caller", err)
	}
}

// FuzzScan: Scan agrees with encoding/json about which bytes are an index file, except that Scan is stricter, and
// returns the same blobs.
func FuzzScan(f *testing.F) {
	for _, content := range append(slices.Clone(accepted), refused...) {
		f.Add(content)
	}
	f.Fuzz(func(t *testing.T, content string) {
		got, err := scanAll(content)
		if err != nil {
			if !api.Is(err, api.Corrupt) {
				t.Errorf("%v, want an error of kind corrupt", err)
			}
			return
		}
		if again, err := scanAll(written(got)); err != nil || len(again) != len(got) {
			t.Errorf("%d packs, after they were written and read %d: %v", len(got), len(again), err)
		}
		for _, p := range got {
			for _, e := range p.Entries {
				must(t, e.Check())
			}
		}
	})
}

func written(packs []Pack) string {
	var b FileBuilder
	for _, p := range packs {
		b.Add(p)
	}
	return string(b.Bytes())
}

func BenchmarkScan(b *testing.B) {
	content := written(randomPacks(rand.New(rand.NewPCG(1, 1)), 3000, 16))
	b.SetBytes(int64(len(content)))
	for b.Loop() {
		_, err := Scan(strings.NewReader(content), func(Pack) error { return nil })
		must(b, err)
	}
}
