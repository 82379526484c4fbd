package replicas

import (
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
)

// A volume that was made after its image began to go is refused, and does not hold the image; when an image of that
// name is there again, it is made. One that was made before may still be placed: the deletion waits for it.
func TestVolumeOfAnImageThatGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	img := &api.BackingImage{ObjectMeta: named("golden"), Spec: api.BackingImageSpec{SourceType: api.SourceFile}}
	img.Finalizers = []string{api.Finalizer}
	w.create(img)
	of := func(name string) *api.Volume {
		v := volume(name, 16*mib)
		v.Spec.BackingImage = "golden"
		return v
	}
	w.create(of("before"))
	w.volumeIs("before", "waiting for the image", func(v *api.Volume) bool {
		return strings.Contains(v.Status.Message, "being prepared")
	})
	<-time.After(1100 * time.Millisecond) // times in the API have whole seconds
	w.remove(img)
	w.create(of("after"))
	after := w.volumeIs("after", "refused", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeFaulted && strings.Contains(v.Status.Message, "was being deleted when")
	})
	before := w.volumeIs("before", "waiting still", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeCreating && strings.Contains(v.Status.Message, "being prepared")
	})
	now := &api.BackingImage{ObjectMeta: named("golden")}
	await(w, now, &api.BackingImageList{}, "going", func(i *api.BackingImage) bool {
		if i.DeletionTimestamp == nil {
			return false
		}
		if !api.HoldsImage(before, i) || api.HoldsImage(after, i) {
			t.Errorf("before holds it: %v, after: %v", api.HoldsImage(before, i), api.HoldsImage(after, i))
		}
		edit(w, i, func(i *api.BackingImage) { i.Finalizers = nil })
		return true
	})
	w.volumeIs("after", "waiting for an image", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeCreating && strings.Contains(v.Status.Message, "does not exist")
	})
	for _, name := range []string{"before", "after"} {
		w.remove(volume(name, 0))
		gone(w, volume(name, 0), &api.VolumeList{})
	}
}
