package tags

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestTagsKeepFacts: Parse returns the facts of Tags, with every label within the bounds, also among tags of users.
func TestTagsKeepFacts(t *testing.T) {
	for name, change := range map[string]func(*Facts){
		"all":      func(*Facts) {},
		"least":    func(f *Facts) { *f = Facts{Backup: "b", Volume: "v", Object: uid(1)} },
		"no label": func(f *Facts) { f.Labels = nil },
		"record": func(f *Facts) {
			f.Record = &api.RecordedVolume{StorageClassName: "<fast>", Claim: "db/data", Labels: map[string]string{"a/b": "c"},
				NumberOfReplicas: 3, DataLocality: "best-effort", NodeSelector: []string{"ssd", "a,b=c"}}
		},
		"image": func(f *Facts) {
			*f = Facts{Backup: "b", Image: "golden", Object: uid(1), ImageDigest: strings.Repeat("ab", 32),
				ImageRecord: &api.RecordedImage{Labels: map[string]string{"a/b": "c"}, MinNumberOfCopies: 3,
					NodeSelector: []string{"ssd"}, DiskSelector: []string{"a,b=c"}}}
		},
		"labels": func(f *Facts) {
			f.Labels = map[string]string{"": "dropped", "=": "=", "%3D": "%", "long": strings.Repeat("x", labelValueLimit+1),
				"drover.io/x": "ü", "bad": "\xff"}
		},
	} {
		f := factsOf("daily-1")
		change(&f)
		got, ok := Parse(append([]string{"mine", "mine=x"}, f.Tags()...))
		for _, dropped := range []string{"", "long", "bad"} {
			delete(f.Labels, dropped)
		}
		if !ok || !reflect.DeepEqual(got, f) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, ok, f)
		}
	}
}

// TestUnusableOriginIsUnknown: tags of users, or of another cluster, may have any cluster, node and origin; the backup
// counts without them.
func TestUnusableOriginIsUnknown(t *testing.T) {
	f := factsOf("b")
	f.Cluster, f.Node, f.Origin = "", "", ""
	got, ok := Parse(append(f.Tags(), "cluster=Prod EU", "node=..", "origin="+strings.Repeat("x", NameLimit+1)))
	if !ok || !reflect.DeepEqual(got, f) {
		t.Errorf("%+v, %v", got, ok)
	}
	f.Node = strings.Repeat("n.", 100) + "n" // longer than a tag may be
	if got, ok := Parse(f.Tags()); !ok || got.Node != "" {
		t.Errorf("%+v, %v", got, ok)
	}
}

// TestTagsAreDistrusted: Parse refuses tags that Drover does not write.
func TestTagsAreDistrusted(t *testing.T) {
	good := factsOf("daily-1").Tags()
	with := func(key, value string) []string {
		tags := slices.DeleteFunc(slices.Clone(good), func(tag string) bool {
			return strings.HasPrefix(tag, key+"=") || tag == key
		})
		return append(tags, key+"="+value)
	}
	for name, tags := range map[string][]string{
		"none":            nil,
		"of restic":       {"daily"},
		"without drover":  slices.Clone(good[1:]),
		"other kind":      with("kind", "image"),
		"twice":           append(slices.Clone(good), "backup=other"),
		"path":            with("backup", "../../etc"),
		"long name":       with("backup", strings.Repeat("a", NameLimit+1)),
		"no name":         with("backup", ""),
		"no volume":       with("volume", ""),
		"bad volume":      with("volume", "A\x00"),
		"bad object":      with("object", "x"),
		"no object":       with("object", ""),
		"bad uid":         with("uid", "../x"),
		"negative size":   with("size", "-1"),
		"huge size":       with("size", "999999999999999999999"),
		"too large size":  with("size", fmt.Sprint(int64(1)<<62)),
		"odd size":        with("size", "+1"),
		"bad time":        with("created", "yesterday"),
		"year 10000":      with("created", "9999-12-31T23:59:59-23:59"),
		"year 0":          with("created", "0000-12-31T23:59:59Z"),
		"too large sum":   with("uploaded", fmt.Sprint(int64(1)<<62)),
		"bad mode":        with("mode", "partial"),
		"bad image":       with("image", "a/b"),
		"bad snapshot":    with("snapshot", "a b"),
		"bad snapshotUID": with("snapshot-uid", "a b"),
		"too many":        append(slices.Clone(good), make([]string, tagsLimit)...),
	} {
		if f, ok := Parse(tags); ok {
			t.Errorf("%s: accepted as %+v", name, f)
		}
	}
	if _, ok := Parse(with("size", "1")); !ok {
		t.Error("the test refuses good tags")
	}
}

// TestRecordsAreDistrusted: a record that is no JSON or too large says nothing, and labels that no volume of another
// cluster may take over are left out.
func TestRecordsAreDistrusted(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want *api.RecordedVolume
	}{
		"no JSON":     {`{"claim":`, nil},
		"other types": {`{"labels":"x"}`, nil},
		"too large":   {`{"claim":"` + strings.Repeat("x", 16<<10) + `"}`, nil},
		"grows":       {`{"claim":"` + strings.Repeat("<", 8<<10) + `"}`, nil}, // JSON of Go escapes the character
		"labels": {`{"labels":{"job":"daily","drover.io/volume":"x","bad key":"x","bad":"a b"},"nodeSelector":[],"new":1}`,
			&api.RecordedVolume{Labels: map[string]string{"job": "daily"}}},
		"a name that no target can have": {`{"backupTargetName":"../x"}`, &api.RecordedVolume{}},
	} {
		facts, ok := Parse(append(factsOf("b").Tags(), "record="+c.text))
		if !ok || !reflect.DeepEqual(facts.Record, c.want) {
			t.Errorf("%s: %+v, %v", name, facts.Record, ok)
		}
	}
}

// TestImageRecordsAreDistrusted: neither do they ask for labels of this cluster, nor for any number of copies.
func TestImageRecordsAreDistrusted(t *testing.T) {
	image := Facts{Backup: "b", Image: "golden", Object: uid(1), ImageDigest: strings.Repeat("ab", 32)}
	for text, want := range map[string]*api.RecordedImage{
		`{"labels":`:                     nil,
		`{"minNumberOfCopies":"x"}`:      nil,
		`{"minNumberOfCopies":-1}`:       {},
		`{"minNumberOfCopies":2000000}`:  {MinNumberOfCopies: 100},
		`{"labels":{"drover.io/x":"y"}}`: {},
	} {
		facts, ok := Parse(append(image.Tags(), "record="+text))
		if !ok || !reflect.DeepEqual(facts.ImageRecord, want) || facts.Record != nil {
			t.Errorf("%s: %+v, %v", text, facts.ImageRecord, ok)
		}
	}
}

// TestLabelsAreBounded: a store cannot fill an object with labels.
func TestLabelsAreBounded(t *testing.T) {
	tags := factsOf("b").Tags()
	for i := range labelsLimit + 10 {
		tags = append(tags, fmt.Sprintf("%s%d=x", labelTag, i))
	}
	f, ok := Parse(tags)
	if !ok || len(f.Labels) != labelsLimit || len(f.Tags()) > tagsLimit {
		t.Errorf("%d labels, %d tags, %v", len(f.Labels), len(f.Tags()), ok)
	}
}

// FuzzParse: accepted tags are facts that Tags writes and Parse reads again.
func FuzzParse(f *testing.F) {
	f.Add(strings.Join(factsOf("daily-1").Tags(), "\n"))
	f.Add("drover\nkind=volume\nvolume=v\nbackup=b\nobject=00000000-0000-4000-8000-000000000000\nlabel:%253D=x\n" +
		"label:=y\n" + `record={"labels":{"a":"b"},"nodeSelector":[],"numberOfReplicas":2}`)
	f.Fuzz(func(t *testing.T, text string) {
		facts, ok := Parse(strings.Split(text, "\n"))
		if !ok {
			return
		}
		again, ok := Parse(facts.Tags())
		if !ok || !reflect.DeepEqual(again, facts) {
			t.Errorf("%+v became %+v, %v", facts, again, ok)
		}
		if !isName(facts.Backup) || !isName(facts.Volume) || len(facts.Labels) > labelsLimit || facts.VolumeSize < 0 {
			t.Errorf("accepted %+v", facts)
		}
	})
}

// uid is the UID with a number.
func uid(n int) api.UID {
	return api.UID(strings.Replace("00000000-0000-4000-8000-000000000000", "00000000",
		string(bytes.Repeat([]byte{"0123456789abcdef"[n%16]}, 8)), 1))
}

// factsOf are the facts of a backup of volume vol.
func factsOf(name string) Facts {
	return Facts{Backup: name, Volume: "vol", Object: uid(1), VolumeUID: uid(2), Snapshot: "snap", SnapshotUID: uid(3),
		SnapshotCreated: "2026-01-02T03:04:05Z", VolumeSize: 10 << 20, Uploaded: 3 << 20, Mode: api.BackupFull,
		Image: "golden", Labels: map[string]string{"a=b%": "c=d,e"}, Cluster: "prod-eu", Node: "node-1", Origin: "daily-0"}
}
