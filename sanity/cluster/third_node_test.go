package cluster

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// TestLayersOfAnImageOnAThirdNode: a client with the certificate of a node without a copy of an image reads no layer
// of the image from a node with a copy. Once the image is to have a copy on the node, the reads succeed.
func TestLayersOfAnImageOnAThirdNode(t *testing.T) {
	c := start(t, Options{Nodes: 2})
	has, bare := c.Nodes[0], c.Nodes[1]
	c.command(t, "image", "import", servePattern(t, c, 16<<20), "--name", "golden")
	img := ready(t, c, "golden", 1)
	if img.Status.Copies[0].Node == bare.Name {
		has, bare = bare, has
	}
	disk, layer := string(img.Status.Copies[0].Disk), string(img.Status.Layers[0])
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: api.AuthoritySecret}}
	must(t, c.Objects.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
	authority, err := wire.LoadAuthority(secret.Data[api.AuthorityKey])
	must(t, err)
	id, err := wire.OpenIdentity(t.TempDir(), bare.Name)
	must(t, err)
	request, err := id.Request()
	must(t, err)
	cert, _, err := authority.Sign(request, bare.Name, wire.CertificateLife)
	must(t, err)
	must(t, id.Put(cert, authority.PEM()))
	var n api.Node
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: has.Name}, &n))
	asks := wire.NewClient(id, has.Name, n.Status.LayerAddress)
	defer asks.Close()
	for what, err := range map[string]error{
		"its record":  second(asks.Image(t.Context(), disk, string(img.Status.UUID))),
		"its digests": second(asks.Sums(t.Context(), disk, layer, api.MaxVolumeSize)),
		"its size":    second(asks.Open(t.Context(), disk, layer)),
		"a block":     asks.Read(t.Context(), disk, layer, make([]byte, 4096), 0),
		"a place":     second(asks.Send(t.Context(), disk)),
	} {
		var said *wire.Error
		if !errors.As(err, &said) || said.Kind != api.Denied.String() {
			t.Errorf("a third node gets %s: %v", what, err)
		}
	}
	edit(t, c, img, func(i *api.BackingImage) { i.Spec.MinNumberOfCopies = 2 })
	ready(t, c, "golden", 2)
	if err := asks.Read(t.Context(), disk, layer, make([]byte, 4096), 0); err != nil {
		t.Errorf("a node that has a copy may not read the image: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }
