package images

import (
	"context"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// copies are the ImageCopies of an API, of images that their names describe.
type copies struct {
	client.Reader
	items []api.ImageCopy
}

func (c copies) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	switch img := o.(*api.BackingImage); key.Name {
	case "restored":
		img.Spec.SourceType = api.SourceRestore
	case "cloned":
		img.Spec.SourceType = api.SourceClone
	case "replaced":
		img.Status.UUID = "another"
	}
	return nil
}

func (c copies) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	list.(*api.ImageCopyList).Items = c.items
	return nil
}

// disk opens layers, and notes them.
type disk struct {
	block.SnapshotDisk
	opened string
	size   int64
}

func (d *disk) OpenStack(layers []string, size int64) (block.Source, error) {
	d.opened, d.size = strings.Join(layers, " "), size
	return nil, nil
}

// TestOnlyReadyCopiesOfTheChecksumAreOpened: on a disk of the node that answers; the error tells where else the image is.
func TestOnlyReadyCopiesOfTheChecksumAreOpened(t *testing.T) {
	here := api.ImageCopy{Spec: api.ImageCopySpec{Image: "golden", Node: "node-1", Disk: "d1", Layers: []api.UID{"a", "b"}},
		Status: api.ImageCopyStatus{State: api.ImageReady, Checksum: "abc", VirtualSize: 5000, Format: "raw"}}
	there, other, half, broken, packed := here, here, here, here, here
	restored, cloned, replaced := here, here, here
	restored.Spec.Image, cloned.Spec.Image, replaced.Spec.Image = "restored", "cloned", "replaced"
	packed.Status.Format = "raw.gz"
	there.Spec.Node = "node-2"
	other.Status.Checksum = ""
	half.Status.State = api.ImageInProgress
	broken.Spec.Disk = "d2"
	for _, c := range []struct {
		items  []api.ImageCopy
		kind   api.Kind
		part   string
		opened string
	}{
		{[]api.ImageCopy{other, half, there, broken, here}, 0, "", "a b"},
		{[]api.ImageCopy{other, half, restored, packed, cloned, replaced}, api.NotFound, "no ready image", ""},
		{[]api.ImageCopy{there, half}, api.NotFound, "golden", ""},
		{[]api.ImageCopy{there, broken}, api.Unavailable, "golden", ""},
	} {
		d := &disk{}
		disks := Disks{Reader: copies{items: c.items}, Node: "node-1", Disk: func(uid api.UID) (block.SnapshotDisk, error) {
			if uid != "d1" {
				return nil, api.Errorf(api.Unavailable, "disk %s does not answer", uid)
			}
			return d, nil
		}}
		src, err := disks.Open(t.Context(), "abc")
		if err == nil && (d.size != 8192 || src.Size() != 5000) {
			t.Errorf("layers of %d bytes are opened as %d", d.size, src.Size())
		}
		if d.opened != c.opened || c.kind == 0 && err != nil ||
			c.kind != 0 && (!api.Is(err, c.kind) || !strings.Contains(err.Error(), c.part)) {
			t.Errorf("opened %q, %v; want kind %v with %q", d.opened, err, c.kind, c.part)
		}
	}
}
