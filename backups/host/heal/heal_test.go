package heal

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/host/holders"
	"drover.io/drover/backups/manifest"
	"drover.io/drover/block"
)

// objects are the objects of an API.
type objects struct {
	client.Reader
	replicas  []api.Replica
	snapshots []api.Snapshot
}

// Get finds node n, with disk d and a broken disk.
func (o objects) Get(_ context.Context, _ client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	if n, is := object.(*api.Node); is {
		n.Status.Disks = []api.DiskStatus{{UID: "broken"}, {UID: "d", Ready: true}}
	}
	return nil
}

func (o objects) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch l := list.(type) {
	case *api.ReplicaList:
		l.Items = slices.Clone(o.replicas)
	case *api.SnapshotList:
		l.Items = slices.Clone(o.snapshots)
	}
	return nil
}

// heldDisk is a disk with snapshots, and with the hold of one holder at most.
type heldDisk struct {
	block.SnapshotDisk
	t      *testing.T
	holder string
	source *source // the open one
	lacks  map[string]error
	layers []string // of other volumes
	size   int64    // of the layers
}

func (d *heldDisk) LayerNames() ([]string, error) { return d.layers, nil }

func (d *heldDisk) Sums(uid string) ([]byte, error) { return make([]byte, 64), d.lacks[uid] }

func (d *heldDisk) Open(uid string) (block.Source, error) {
	if d.source != nil {
		d.t.Errorf("layer %s is open beside another one", uid)
	}
	d.source = &source{disk: d, layer: uid, size: d.size}
	return d.source, nil
}

func (d *heldDisk) HoldSnapshot(_ context.Context, holder, _, _ string, s block.SnapshotCut) ([]string, int64, error) {
	if d.holder != "" || d.source != nil {
		d.t.Errorf("snapshot %s is held beside another one", s.UID)
	}
	if err := d.lacks[s.UID]; err != nil {
		return nil, 0, err
	}
	d.holder = holder
	return []string{s.UID}, block.ChunkSize, nil
}

func (d *heldDisk) OpenStack(layers []string, _ int64) (block.Source, error) {
	d.source = &source{disk: d, layer: layers[0]}
	return d.source, nil
}

func (d *heldDisk) ReleaseSnapshot(holder string) error {
	if d.holder == holder {
		d.holder = ""
	}
	return nil
}

type source struct {
	block.DigestSource
	disk  *heldDisk
	layer string
	size  int64
}

func (s *source) Size() int64 { return s.size }

func (s *source) Close() error {
	s.disk.source = nil
	return nil
}

// newDisks is a node with a disk and a replica of volume v with the snapshots 0 to n-1, the newest last.
func newDisks(t *testing.T, n int) (*Disks, *heldDisk) {
	disk := &heldDisk{t: t, lacks: map[string]error{}}
	o := objects{replicas: []api.Replica{{Spec: api.ReplicaSpec{Volume: "v", Node: "n", Disk: "d"}}}}
	for i := range n {
		var s api.Snapshot
		s.Spec.Volume = "v"
		s.Status.UID, s.Status.CreationTime = api.UID(fmt.Sprint(i)), fmt.Sprintf("2026-01-%02dT03:04:05Z", i+1)
		o.snapshots = append(o.snapshots, s)
	}
	return &Disks{Live: o, Node: "n", Disk: func(uid api.UID) (block.SnapshotDisk, error) {
		if uid != "d" {
			t.Errorf("disk %s is not ready, and is opened", uid)
		}
		return disk, nil
	},
		Holders: &holders.Set{}, Log: slog.New(slog.DiscardHandler)}, disk
}

var volume = manifest.Description{Kind: manifest.Volume, Name: "v"}

// TestOneSnapshotIsOpenAtATime: a heal opens snapshots one after the other, the newest first. A snapshot that the disk
// lacks is left out, and a snapshot that cannot be opened is an error. The heal releases all snapshots.
func TestOneSnapshotIsOpenAtATime(t *testing.T) {
	d, disk := newDisks(t, 5)
	disk.lacks["3"] = api.Errorf(api.NotFound, "the replica does not have the snapshot")
	disk.lacks["1"] = fmt.Errorf("open: %w", syscall.EMFILE)
	var got []string
	for src, err := range d.sources(t.Context(), volume) {
		if err != nil {
			got = append(got, "error")
			continue
		}
		got = append(got, src.(*heldSource).DigestSource.(*source).layer)
	}
	if want := []string{"4", "2", "error", "0"}; !slices.Equal(got, want) || disk.holder != "" || disk.source != nil {
		t.Errorf("snapshots %v, want %v; %q holds, %v is open", got, want, disk.holder, disk.source)
	}
}

// TestCollectorKeepsTheHoldsOfAHeal: the collector, which knows no object for the hold of a heal, leaves the hold until
// the heal has read the source.
func TestCollectorKeepsTheHoldsOfAHeal(t *testing.T) {
	d, disk := newDisks(t, 2)
	var holder string
	collect := func() error {
		return d.Holders.Release(holders.Hold{Disk: "d", Holder: holder}, func() error {
			return disk.ReleaseSnapshot(holder)
		})
	}
	for _, err := range d.sources(t.Context(), volume) {
		if err != nil {
			t.Fatal(err)
		}
		holder = disk.holder
		if err := collect(); err != nil || disk.holder == "" {
			t.Errorf("the collector released the hold of a heal in progress, err %v", err)
		}
		break
	}
	if disk.holder != "" {
		t.Error("the heal has ended and left its hold")
	}
	disk.holder = holder // of a killed process
	if err := collect(); err != nil || disk.holder != "" {
		t.Errorf("the collector left the hold of a killed process, err %v", err)
	}
}

// TestLayersComeAfterSnapshots: after the snapshots of the volume, a heal opens all layers of ready disks, one after the
// other. An unfinished layer is left out, and the failure to open a layer is an error. A layer larger than the backup
// ends before the backup's short last chunk.
func TestLayersComeAfterSnapshots(t *testing.T) {
	d, disk := newDisks(t, 1)
	disk.layers, disk.size = []string{"a", "b", "c", "d"}, 2*block.ChunkSize
	disk.lacks["b"] = api.Errorf(api.NotFound, "the layer is not finished")
	disk.lacks["c"] = fmt.Errorf("open: %w", syscall.EMFILE)
	for size, want := range map[int64]int64{
		2*block.ChunkSize - 512:                 2 * block.ChunkSize,
		2*block.ChunkSize - block.Size:          block.ChunkSize,
		block.ChunkSize:                         block.ChunkSize,
		5 * block.ChunkSize:                     2 * block.ChunkSize,
		block.ChunkSize + block.ChunkSize/2 + 1: block.ChunkSize,
	} {
		var got []string
		of := volume
		of.Size = size
		for src, err := range d.sources(t.Context(), of) {
			if err != nil {
				got = append(got, "error")
				continue
			}
			got = append(got, disk.source.layer)
			if _, is := src.(*heldSource); !is && src.Size() != want {
				t.Errorf("layer %s has %d bytes for a backup of %d, want %d", disk.source.layer, src.Size(), size, want)
			}
		}
		if want := []string{"0", "a", "error", "d"}; !slices.Equal(got, want) || disk.holder != "" || disk.source != nil {
			t.Errorf("sources %v, want %v; %q holds, %v is open", got, want, disk.holder, disk.source)
		}
	}
}
