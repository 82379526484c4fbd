package controller

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestImageSnapshotHasOneCreationTime: the controller lists a snapshot stored as an image after the cut of the volume,
// because the cut sets the creation time. The snapshot keeps the creation time when its image is rebuilt from a disk.
func TestImageSnapshotHasOneCreationTime(t *testing.T) {
	img := &api.BackingImage{
		ObjectMeta: metav1.ObjectMeta{Name: "cut-later", Annotations: map[string]string{annotationSnapshot: "cut-later"}},
		Spec: api.BackingImageSpec{SourceType: api.SourceExport, MinNumberOfCopies: 1,
			SourceParameters: map[string]string{api.ExportVolume: "v"}}}
	must(t, store.Create(t.Context(), img))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), img)) })
	id := imageHandle(img)
	lists := func(one string) (all []*csi.Snapshot) {
		t.Helper()
		res, err := door.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{SnapshotId: one, SourceVolumeId: "v"})
		must(t, err)
		for _, e := range res.Entries {
			all = append(all, e.Snapshot)
		}
		return all
	}
	_, err := door.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	wantKind(t, err, api.NotFound, "yet")
	if one, all := lists(id), lists(""); len(one) > 0 || len(all) > 0 {
		t.Errorf("before the cut: %v, %v", one, all)
	}

	at := time.Now().Add(time.Hour).UTC().Truncate(time.Millisecond)
	img.Status.State = api.ImageStarting
	img.Status.Export = &api.ExportFact{Volume: "v", CreationTime: at.Format(time.RFC3339Nano)}
	must(t, store.Status().Update(t.Context(), img))
	is, err := door.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
	must(t, err)
	if !is.Snapshot.CreationTime.AsTime().Equal(at) || is.Snapshot.ReadyToUse {
		t.Errorf("after the cut: %+v", is.Snapshot)
	}

	var kept api.ImageRecord // as on a disk
	text, err := img.Record()
	must(t, errors.Join(err, json.Unmarshal(text, &kept)))
	img.Annotations = kept.Annotations
	must(t, store.Update(t.Context(), img))
	img.Status = api.BackingImageStatus{State: api.ImagePending} // the copies have not been seen yet
	must(t, store.Status().Update(t.Context(), img))
	if is, err := door.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id}); err != nil || is.Snapshot.ReadyToUse {
		t.Errorf("rebuilt, and not looked at: %+v, %v", is, err)
	}
	img.Status.State = api.ImageReady
	must(t, store.Status().Update(t.Context(), img))
	one, all := lists(id), lists("")
	if len(one) != 1 || len(all) != 1 || !all[0].ReadyToUse || !all[0].CreationTime.AsTime().Equal(at) {
		t.Errorf("rebuilt: %v, %v", one, all)
	}
}
