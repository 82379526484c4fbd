package stack

import (
	"bytes"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/format"
)

func FuzzStack(f *testing.F) {
	uid := string(api.NewUID())
	m := Meta{UID: uid, Volume: "v", VolumeUID: uid, Size: 1 << 30, Epoch: 3, Incarnation: 9, Members: []string{uid},
		Dirty: true, Layers: []string{uid}, Head: "head", Created: time.Unix(1, 0).UTC(),
		Snapshots: []Snapshot{{UID: uid, Name: "s", Layer: uid}}}
	good, err := format.EncodeMeta(formatStack, m.toRecord())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(bytes.Replace(good, []byte(`"epoch": 3`), []byte(`"epoch": 4`), 1))
	f.Add(bytes.Replace(good, []byte(`"version": 1`), []byte(`"version": 2`), 1))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var rec stackRecord
		if err := format.DecodeMeta(data, formatStack, &rec); err != nil {
			if k := api.KindOf(err); k != api.Corrupt && k != api.Unsupported {
				t.Fatalf("kind %v: %v", k, err)
			}
			return
		}
		if err := rec.toMeta().validate(); err != nil {
			return
		}
		again, err := format.EncodeMeta(formatStack, rec)
		if err != nil {
			t.Fatal(err)
		}
		var other stackRecord
		if err := format.DecodeMeta(again, formatStack, &other); err != nil {
			t.Fatalf("what was read cannot be written and read: %v", err)
		}
	})
}
