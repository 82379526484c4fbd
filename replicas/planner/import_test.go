package planner

import (
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// importWorld has the volume "dr" with an import in place of the standby volume.
func importWorld(t *testing.T, from api.VolumeImport) *standbyWorld {
	w := newStandbyWorld(t)
	old := w.volume()
	w.Delete(old)
	w.AwaitDeleted(old, &api.VolumeList{})
	v := apitest.Volume("dr", 16<<20)
	v.Spec.ImportFrom, v.Spec.NumberOfReplicas = &from, 1
	w.Create(v)
	return w
}

// TestImportedVolumeGrowsToItsFile: a hidden image brings the file, the volume has the size of the disk inside before its
// first replica exists, and the deletion of the volume deletes the image.
func TestImportedVolumeGrowsToItsFile(t *testing.T) {
	t.Parallel()
	sum := strings.Repeat("a", 128)
	w := importWorld(t, api.VolumeImport{SourceType: api.SourceDownload, Checksum: sum,
		SourceParameters: map[string]string{"url": "https://h.example/x"}, SecretRef: &api.SecretRef{Name: "s", Namespace: "n"}})
	v := w.reconcile()
	img := w.image(v.RestoreImage(), api.ImageInProgress)
	if s := img.Spec; s.SourceType != api.SourceDownload || s.SourceParameters["url"] != "https://h.example/x" ||
		s.Checksum != sum || s.SecretRef == nil || s.SecretRef.Name != "s" || !img.IsHidden() {
		t.Errorf("image %+v", img)
	}
	v = w.reconcile()
	var replicas api.ReplicaList
	if err := w.Client.List(w.Ctx, &replicas); err != nil {
		t.Fatal(err)
	}
	if mine := replicas.OfVolume("dr"); v.Spec.Size != 64<<20 || len(mine) != 1 || mine[0].Spec.Size != 64<<20 ||
		mine[0].Labels[api.LabelImage] != img.Name {
		t.Errorf("size %d, replicas %+v", v.Spec.Size, mine)
	}
	w.Delete(v)
	w.reconcile()
	if !w.isDeleted(img.Name) {
		t.Error("the image of the deleted volume stays")
	}
}

// TestImpossibleImportIsFaulted: no image is made for an import that no image can have.
func TestImpossibleImportIsFaulted(t *testing.T) {
	t.Parallel()
	w := importWorld(t, api.VolumeImport{SourceType: api.SourceFile, SourceParameters: map[string]string{"path": "x"}})
	if v := w.reconcile(); v.Status.State != api.VolumeFaulted || !strings.Contains(v.Status.Message, "must be absolute") {
		t.Errorf("status %+v", v.Status)
	}
}
