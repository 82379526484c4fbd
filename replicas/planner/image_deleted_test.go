package planner

import (
	"errors"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestVolumeOfAnImageThatGoes: the planner refuses a volume created after the deletion of the volume's image began,
// and the volume does not hold the image. After the deletion the volume waits for a new image of the same name. A
// volume created before the deletion may still be placed: the deletion waits for the volume.
func TestVolumeOfAnImageThatGoes(t *testing.T) {
	t.Parallel()
	s := apitest.Start(t)
	mgr := s.Manager(nil)
	if err := errors.Join(watch.AddIndexes(mgr), watch.AddBackupIndexes(mgr), Setup(mgr, s.Log)); err != nil {
		t.Fatal(err)
	}
	s.Run(mgr)
	if !mgr.GetCache().WaitForCacheSync(s.Ctx) {
		t.Fatal("the cache does not start")
	}
	img := &api.BackingImage{ObjectMeta: apitest.Named("golden"), Spec: api.BackingImageSpec{SourceType: api.SourceFile}}
	img.Finalizers = []string{api.Finalizer}
	s.Create(img)
	of := func(name string) *api.Volume {
		v := apitest.Volume(name, 16<<20)
		v.Spec.BackingImage = "golden"
		return v
	}
	s.Create(of("before"))
	s.AwaitVolume("before", "waiting for the image", func(v *api.Volume) bool {
		return strings.Contains(v.Status.Message, "being prepared")
	})
	<-time.After(1100 * time.Millisecond) // times in the API have whole seconds
	s.Delete(img)
	s.Create(of("after"))
	after := s.AwaitVolume("after", "refused", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeFaulted && strings.Contains(v.Status.Message, "was being deleted when")
	})
	before := s.AwaitVolume("before", "waiting still", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeCreating && strings.Contains(v.Status.Message, "being prepared")
	})
	now := &api.BackingImage{ObjectMeta: apitest.Named("golden")}
	apitest.Await(s, now, &api.BackingImageList{}, "going", func(i *api.BackingImage) bool {
		if i.DeletionTimestamp == nil {
			return false
		}
		if !api.HoldsImage(before, i) || api.HoldsImage(after, i) {
			t.Errorf("before holds it: %v, after: %v", api.HoldsImage(before, i), api.HoldsImage(after, i))
		}
		apitest.Edit(s, i, func(i *api.BackingImage) { i.Finalizers = nil })
		return true
	})
	s.AwaitVolume("after", "waiting for an image", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeCreating && strings.Contains(v.Status.Message, "does not exist")
	})
	for _, name := range []string{"before", "after"} {
		s.Delete(apitest.Volume(name, 0))
		s.AwaitDeleted(apitest.Volume(name, 0), &api.VolumeList{})
	}
}
