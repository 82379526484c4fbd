package imagestore_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestLostCopyIsMadeAgain: a copy is made again after the files were removed by hand.
func TestLostCopyIsMadeAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	b := content(3<<20, 1)
	w.image("golden", api.SourceFile, imageFile(t, b))
	img := w.state("golden", api.ImageReady)
	if err := w.disks[0].RemoveImage(string(img.Status.UUID)); err != nil {
		t.Fatal(err)
	}
	w.stop()
	w.start()
	w.eventually("it is back", func() bool {
		_, _, err := w.disks[0].Digest(string(img.Status.Layers[0]))
		return err == nil
	})
	w.holds(0, w.state("golden", api.ImageReady), b)
}

// TestSilentNode: the copies of a silent node are unknown.
func TestSilentNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.image("golden", api.SourceFile, imageFile(t, content(3<<20, 1)))
	w.state("golden", api.ImageReady)
	beat := func(when time.Time) {
		patch := []byte(fmt.Sprintf(`{"status":{"heartbeat":%q}}`, when.UTC().Format(time.RFC3339)))
		n := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node}}
		if err := w.client.Status().Patch(context.Background(), n, client.RawPatch("application/merge-patch+json", patch)); err != nil {
			t.Fatal(err)
		}
	}
	beat(time.Now().Add(-time.Hour))
	img := w.state("golden", api.ImageUnknown)
	if !strings.Contains(img.Status.Message, "does not answer") {
		t.Errorf("message %q", img.Status.Message)
	}
	beat(alive().Time)
	w.state("golden", api.ImageReady)
}

// TestNoSecretsInStatus: the status carries no secret of the spec's address.
func TestNoSecretsInStatus(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.image("golden", api.SourceDownload, map[string]string{"url": "http://user:hunter2@127.0.0.1:1/x?sig=hunter2"})
	img := w.state("golden", api.ImageFailed)
	b, err := json.Marshal(img.Status)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(b), "hunter2") {
		t.Errorf("status shows a secret: %s", b)
	}
}
