package planner

import (
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestImageOfALongNameIsFoundByItsLabel: a replica names its image by a label, which has 63 characters at most. The
// placement of a clone's replicas finds an image with a longer name, with its selectors.
func TestImageOfALongNameIsFoundByItsLabel(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	img := &api.BackingImage{ObjectMeta: apitest.Named("golden-" + strings.Repeat("long-", 18) + "name"),
		Spec: api.BackingImageSpec{SourceType: api.SourceFile, SourceParameters: map[string]string{"path": "/x"},
			NodeSelector: []string{"ssd"}}}
	other := img.DeepCopy()
	other.Name = "golden"
	s.Create(img, other)
	mgr := s.Manager(nil)
	if err := watch.AddIndexes(mgr); err != nil {
		t.Fatal(err)
	}
	defer s.Run(mgr)()
	if !mgr.GetCache().WaitForCacheSync(s.Ctx) {
		t.Fatal("no cache")
	}
	p := &volumeReconciler{client: mgr.GetClient(), reader: s.Client, log: s.Log}
	clone := apitest.Volume("clone", 16<<20)
	replica := api.Replica{}
	replica.Labels = map[string]string{api.LabelImage: api.LabelValue(img.Name)}
	mine := []api.Replica{replica}
	view, _, err := p.viewCluster(s.Ctx, clone, baseImage(clone, nil, mine), mine)
	if err != nil || view.image == nil || view.image.Name != img.Name {
		t.Errorf("image %+v, %v", view.image, err)
	}
	if none, err := watch.FindImage(s.Ctx, p.client, "gold"); none != nil || err != nil {
		t.Errorf("an image that does not exist: %+v, %v", none, err)
	}
}
