package planner

import (
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestReplicaWakesAnImageOfALongName: a replica names its image by a label, which has 63 characters at most. The event
// of the replica requests an image with a longer name.
func TestReplicaWakesAnImageOfALongName(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	img := &api.BackingImage{ObjectMeta: apitest.Named("golden-" + strings.Repeat("long-", 18) + "name"),
		Spec: api.BackingImageSpec{SourceType: api.SourceFile, SourceParameters: map[string]string{"path": "/x"}}}
	s.Create(img)
	r := &imageReconciler{Client: s.Client}
	rep := &api.Replica{Spec: api.ReplicaSpec{Layers: []api.UID{"l"}}}
	rep.Labels = map[string]string{api.LabelImage: api.LabelValue(img.Name)}
	if got := r.imageOfReplica(s.Ctx, rep); len(got) != 1 || got[0].Name != img.Name {
		t.Errorf("requests %v", got)
	}
}
