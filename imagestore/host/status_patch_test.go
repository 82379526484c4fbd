package host

import (
	"encoding/json"
	"testing"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// The server has a message that no cached object ever showed: the next status still replaces all of it.
func TestStatusPatchRemovesWhatTheServerHas(t *testing.T) {
	now := metav1.NewTime(time.Unix(1700000000, 0).UTC())
	full := api.ImageCopyStatus{
		State: api.ImageUnknown, Progress: 10,
		ByteProgress: api.ByteProgress{BytesDone: 1, BytesTotal: 2, EstimatedEnd: &now},
		Message:      "disk d is not there", Attempts: 3,
		NextTry: now, TriedFrom: "node", UploadURL: "https://host/upload", UploadCA: "ca", Layers: []api.UID{"a", "b"},
		Format: "raw", Size: 4, VirtualSize: 5, Checksum: "c", Digest: "d", LastTransition: now, Verified: "token",
		LastVerified: now, Notice: "notice",
	}
	for _, next := range []api.ImageCopyStatus{{}, {State: api.ImageReady, Layers: []api.UID{"b"}}, full} {
		patch, err := statusPatch{next}.Data(nil)
		if err != nil {
			t.Fatal(err)
		}
		server, err := json.Marshal(map[string]any{"status": full})
		if err != nil {
			t.Fatal(err)
		}
		merged, err := jsonpatch.MergePatch(server, patch)
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ Status api.ImageCopyStatus }
		if err := json.Unmarshal(merged, &got); err != nil {
			t.Fatal(err)
		}
		if !equality.Semantic.DeepEqual(got.Status, next) {
			t.Errorf("status after the patch is %+v, want %+v", got.Status, next)
		}
	}
}
