package controller

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestImagesThatCannotBe: the controller refuses an impossible image before creating an object.
func TestImagesThatCannotBe(t *testing.T) {
	for _, c := range []struct {
		name       string
		parameters []string
		say        string
	}{
		{"a name too long", []string{"backingImage", strings.Repeat("i", 64), "backingImageURL", "http://x/y"}, "63"},
		{"a scheme", []string{"backingImage", "bad-image", "backingImageURL", "ftp://x/y"}, "ftp"},
		{"no host", []string{"backingImage", "bad-image", "backingImageURL", "http:///y"}, "host"},
		{"an unknown key", []string{"backingImage", "bad-image", "backingImageDataSourceType", "download",
			"backingImageDataSourceParameters", `{"url":"http://x/y","uri":"z"}`}, "uri"},
		{"copies of no image", []string{"backingImageMinNumberOfCopies", "2"}, "backingImage"},
		{"a secret of no image", []string{"backingImageSecretName", "s"}, "backingImage"},
		{"a secret of no server", []string{"backingImage", "bad-image", "backingImageSecretName", "s",
			"backingImageDataSourceType", "clone", "backingImageDataSourceParameters", `{"backingImage":"x"}`}, "of a server"},
		{"a namespace of no secret", []string{"backingImage", "bad-image", "backingImageURL", "http://x/y",
			"backingImageSecretNamespace", "n"}, "without backingImageSecretName"},
		{"a secret that cannot be", []string{"backingImage", "bad-image", "backingImageURL", "http://x/y",
			"backingImageSecretName", "../s"}, "Secret"},
		{"no registry", []string{"backingImage", "bad-image", "backingImageURL", "docker://x"}, "docker://HOST"},
		{"restore", []string{"backingImage", "bad-image", "backingImageDataSourceType", "restore"}, "backup-url"},
		{"export", []string{"backingImage", "bad-image", "backingImageDataSourceType", "export-from-volume"},
			"volume-name"},
		{"tags of no image", []string{"backingImageDiskSelector", "ssd"}, "backingImage"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := door.CreateVolume(ctx, request("of-a-bad-image", c.parameters...))
			wantKind(t, err, api.Invalid, c.say)
			imgs := &api.BackingImageList{}
			must(t, store.List(t.Context(), imgs))
			for i := range imgs.Items {
				t.Errorf("image %s was made", imgs.Items[i].Name)
				must(t, store.Delete(t.Context(), &imgs.Items[i]))
			}
		})
	}
}

// TestImageWishes: the image gets the Secret and the registry named by the class.
func TestImageWishes(t *testing.T) {
	w := &wish{}
	must(t, w.parseParameters(map[string]string{"backingImage": "i", "backingImageURL": "docker://h.example/a:b",
		"backingImageSecretName": "s"}))
	must(t, w.image.completeSource())
	if i := w.image; i.source != api.SourceRegistry || i.parameters["url"] != "docker://h.example/a:b" ||
		i.secret != (api.SecretRef{Name: "s", Namespace: "default"}) {
		t.Errorf("%+v", i)
	}
}

// TestChecksumOfAnImageThatWasNotReady: the controller compares the wanted checksum with the image's, also if the image
// becomes ready during the call.
func TestChecksumOfAnImageThatWasNotReady(t *testing.T) {
	loops(t, ready(t), nil)
	img := &api.BackingImage{}
	img.Name = "late"
	img.Spec = api.BackingImageSpec{SourceType: api.SourceDownload, SourceParameters: map[string]string{"url": "http://x/y"}}
	must(t, store.Create(t.Context(), img))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), img)) })
	ended := make(chan error, 1)
	go func() {
		_, err := door.CreateVolume(t.Context(), request("of-late", "backingImage", "late", "backingImageChecksum",
			strings.Repeat("1", 128)))
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	img.Status.State, img.Status.VirtualSize, img.Status.Checksum = api.ImageReady, 48<<20, strings.Repeat("0", 128)
	must(t, store.Status().Update(t.Context(), img))
	err := <-ended
	if err == nil {
		_, _ = door.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "of-late"})
	}
	wantKind(t, err, api.Invalid, "late", "checksum")
}

// TestNumbersInImageParameters: numbers in a JSON object keep all digits.
func TestNumbersInImageParameters(t *testing.T) {
	w := &wish{}
	must(t, w.parseParameters(map[string]string{"backingImage": "i", "backingImageDataSourceType": "download",
		"backingImageDataSourceParameters": `{"url":"http://x/y","n":10737418240}`}))
	if n := w.image.parameters["n"]; n != "10737418240" {
		t.Errorf("n is %s", n)
	}
}

// TestFaultedVolumesAreListed: a faulted volume exists, so ListVolumes shows the volume.
func TestFaultedVolumesAreListed(t *testing.T) {
	loops(t, ready(t), nil)
	id := create(t, request("will-fault")).VolumeId
	v := &api.Volume{}
	must(t, store.Get(t.Context(), client.ObjectKey{Name: id}, v))
	v.Status.State, v.Status.Robustness = api.VolumeFaulted, api.RobustFaulted
	must(t, store.Status().Update(t.Context(), v))
	r, err := door.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range r.Entries {
		if e.Volume.VolumeId == id {
			return
		}
	}
	t.Errorf("not in %v", r.Entries)
}

// TestExpansionWithoutRoomIsNotWished: an expansion without room changes nothing, so a smaller expansion works
// afterwards.
func TestExpansionWithoutRoomIsNotWished(t *testing.T) {
	loops(t, ready(t), nil)
	n := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: "tight"}, Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: "/d"}}}}
	must(t, store.Create(t.Context(), n))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), n)) })
	n.Status.Disks = []api.DiskStatus{{Path: "/d", UID: "tight-d", Ready: true, Capacity: 100 << 20, Available: 100 << 20}}
	must(t, store.Status().Update(t.Context(), n)) // 200 % of the capacity: 200 MiB
	id := create(t, request("grows")).VolumeId
	r := &api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "grows.r"}, Spec: api.ReplicaSpec{Volume: id, Disk: "tight-d",
		Node: "tight", Size: 64 << 20}}
	must(t, store.Create(t.Context(), r))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), r)) })
	expand := func(size int64) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := door.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id,
			CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
		return err
	}
	wantKind(t, expand(1<<30), api.Full, "tight", "storage-over-provisioning-percentage")
	v, err := door.readVolume(t.Context(), id)
	must(t, err)
	if v.Spec.Size != 64<<20 {
		t.Errorf("the wish is %d bytes now", v.Spec.Size)
	}
	must(t, expand(128<<20))
}
