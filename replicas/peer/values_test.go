package peer

import (
	"bytes"
	"runtime"
	"testing"

	"drover.io/drover/api"
)

// TestListsTakeLittleMemory: a frame of empty objects takes no more than a few times its size.
func TestListsTakeLittleMemory(t *testing.T) {
	list := []byte("[" + string(bytes.Repeat([]byte("{},"), maxControl/3-1)) + "{}]")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for name, decode := range map[string]func() error{
		"seal":   func() error { _, err := decodeJSON[sealArgs](list); return err },
		"broken": func() error { _, err := decodeBroken(list, none{}, limits{}); return err },
		"meta": func() error {
			_, err := decodeMeta([]byte(`{"Snapshots":`+string(list)+`}`), none{}, limits{})
			return err
		},
		"sizes": func() error { _, err := decodeSizes(list, none{}, limits{}); return err },
	} {
		if err := decode(); !api.Is(err, api.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if runtime.ReadMemStats(&after); after.TotalAlloc-before.TotalAlloc > 64<<20 {
		t.Errorf("%d MiB were allocated", (after.TotalAlloc-before.TotalAlloc)>>20)
	}
}
