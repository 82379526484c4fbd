package cli_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// answerImport plays the controller role for the volume of an import: the volume has a hidden image.
func answerImport(t *testing.T, volume, image string) {
	t.Helper()
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceUpload,
		SourceParameters: map[string]string{}}}
	img.Name, img.Labels = image, map[string]string{api.LabelHidden: api.LabelValue(volume)}
	if err := store.Create(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Delete(context.Background(), img) })
	pen(t, volume, func(v *api.Volume) {
		v.Status.State = api.VolumeCreating
		v.Status.RestoreStatus = &api.RestoreStatus{State: api.CloneInitiated, BackingImage: image}
	})
}

func imageFile(t *testing.T, name string, size int) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestVolumeImportSendsTheFile: the volume names the file's size and checksum, the node gets the file, and the command
// ends when the volume can be used. A second import under the name is refused, and leaves the volume alone.
func TestVolumeImportSendsTheFile(t *testing.T) {
	sum := make([]byte, 128)
	for i := range sum {
		sum[i] = 'a'
	}
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil || n != 3<<20 {
			t.Errorf("%d bytes, %v", n, err)
		}
		if err := status(t.Context(), "restore-sent", func(i *api.BackingImage) {
			i.Status.State, i.Status.VirtualSize = api.ImageReady, 3<<20
		}); err != nil {
			t.Error(err)
		}
		if err := status(t.Context(), "sent-file", detached); err != nil {
			t.Error(err)
		}
	}))
	defer node.Close()
	cp := copyAsking(t, "restore-sent", node.URL)
	answerImport(t, "sent-file", "restore-sent")
	file := imageFile(t, "Sent_file.raw", 3<<20)
	drover(t, kubeconfig("volume", "import", file, "--checksum", string(sum), "--label", "a=b")...).
		mustSay(t, 0, `volume "sent-file" created: 10 MiB, imported`, "sending, 100 %, 3 MiB of 3 MiB")
	var v api.Volume
	if err := store.Get(t.Context(), client.ObjectKey{Name: "sent-file"}, &v); err != nil || v.Spec.ImportFrom == nil ||
		v.Spec.ImportFrom.SourceType != api.SourceUpload || v.Spec.ImportFrom.SourceParameters["size"] != "3145728" ||
		v.Spec.ImportFrom.Checksum != string(sum) || v.Labels["a"] != "b" {
		t.Errorf("%v, %+v", err, v.Spec)
	}
	drover(t, kubeconfig("volume", "import", file)...).mustSay(t, 5, "already")
	for _, o := range []client.Object{cp, &v} {
		if err := store.Delete(t.Context(), o); err != nil {
			t.Error(err)
		}
	}
}

// importBegun waits for the effect of answerImport.
func importBegun(ctx context.Context, volume string) error {
	if err := created[*api.Volume](ctx, volume); err != nil {
		return err
	}
	_, err := await.Until(ctx, store, volume, func(v *api.Volume) (bool, error) {
		return v.Status.RestoreStatus != nil, nil
	})
	return err
}

// growTo plays the planner, which enlarges the volume of a larger file.
func growTo(ctx context.Context, volume string, size int64) error {
	if err := importBegun(ctx, volume); err != nil {
		return err
	}
	if _, err := await.Edit(ctx, store, volume, func(v *api.Volume) (bool, error) {
		v.Spec.Size = size
		return true, nil
	}); err != nil {
		return err
	}
	return status(ctx, volume, detached)
}

// TestVolumeImportLeavesNothing: the volume of an import that fails, that is interrupted, or that is larger than the
// user asked for, is deleted.
func TestVolumeImportLeavesNothing(t *testing.T) {
	gone := func(name string) {
		t.Helper()
		drover(t, kubeconfig("volume", "show", name)...).mustSay(t, 3)
	}
	url := "https://h.example/"
	answerImport(t, "bad", "restore-bad")
	pen(t, "restore-bad", func(i *api.BackingImage) {
		i.Status.State, i.Status.Message = api.ImageFailed, "SHA-512 is 12…, expected 34…"
	})
	drover(t, kubeconfig("volume", "import", url+"bad.raw")...).mustSay(t, 1, "the import failed: SHA-512 is 12")
	gone("bad")

	answerImport(t, "small", "restore-small")
	pen(t, "restore-small", func(i *api.BackingImage) { i.Status.State = api.ImageReady })
	grown := make(chan error, 1)
	go func() { grown <- growTo(t.Context(), "small", 64<<20) }()
	t.Cleanup(func() {
		if err := <-grown; err != nil {
			t.Error(err)
		}
	})
	drover(t, kubeconfig("volume", "import", url+"x.raw", "--name", "small", "--size", "32Mi")...).
		mustSay(t, 2, "32 MiB is less than the 64 MiB")
	gone("small")

	answerImport(t, "halted-import", "restore-halted")
	ctx, interrupt := context.WithTimeout(t.Context(), 5*time.Minute)
	defer interrupt()
	done := make(chan result, 1)
	go func() {
		done <- droverIn(ctx, kubeconfig("volume", "import", url+"halted-import.raw")...)
	}()
	if err := importBegun(ctx, "halted-import"); err != nil {
		t.Fatal(err)
	}
	interrupt()
	r := <-done
	r.mustSay(t, 130, `volume "halted-import" is not imported`)
	gone("halted-import")
}

// TestAttachedVolumeOfAFailedImportStays: a user can attach the volume while its data arrives. A failed import then
// leaves the volume, however long the name is.
func TestAttachedVolumeOfAFailedImportStays(t *testing.T) {
	name := "used-" + strings.Repeat("long-", 18) + "name" // longer than the value of a label
	answerImport(t, name, "restore-used")
	a := &api.Attachment{Spec: api.AttachmentSpec{Volume: name, Node: "n"}}
	a.Name, a.Labels = name, map[string]string{api.LabelVolume: api.LabelValue(name)}
	if err := store.Create(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	v := &api.Volume{}
	v.Name = name
	t.Cleanup(func() { _, _ = store.Delete(context.Background(), a), store.Delete(context.Background(), v) })
	pen(t, "restore-used", func(i *api.BackingImage) {
		i.Status.State, i.Status.Message = api.ImageFailed, "SHA-512 is 12…, expected 34…"
	})
	drover(t, kubeconfig("volume", "import", "https://h.example/used.raw", "--name", name)...).
		mustSay(t, 1, "the import failed", "may be in use", "drover volume delete "+name)
	if err := store.Get(t.Context(), client.ObjectKeyFromObject(v), v); err != nil || v.DeletionTimestamp != nil {
		t.Errorf("the volume is deleted: %v, %v", v.DeletionTimestamp, err)
	}
}
