package heal

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
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

// snapshotDisk is a disk with snapshots.
type snapshotDisk struct {
	block.SnapshotDisk
	opened []string
	lacks  map[string]error
}

func (d *snapshotDisk) OpenSnapshot(_ string, s block.SnapshotCut) (block.Source, error) {
	d.opened = append(d.opened, s.UID)
	return nil, d.lacks[s.UID]
}

// newDisks is a node with a disk and a replica of volume v with the snapshots 0 to n-1, the newest last.
func newDisks(t *testing.T, n int) (*Disks, *snapshotDisk) {
	disk := &snapshotDisk{lacks: map[string]error{}}
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
	}}, disk
}

// TestSnapshotsAreOpenedNewestFirst: a heal may open the snapshots of a volume, the newest first. The error of a
// snapshot keeps its kind, which tells the heal whether the disk has the snapshot.
func TestSnapshotsAreOpenedNewestFirst(t *testing.T) {
	d, disk := newDisks(t, 4)
	disk.lacks["2"] = api.Errorf(api.NotFound, "the replica does not have the snapshot")
	disk.lacks["1"] = api.Errorf(api.Busy, "a merge is in progress")
	var kinds []api.Kind
	for open, err := range d.atPlaces(t.Context(), manifest.Description{Kind: manifest.Volume, Name: "v"}) {
		if err == nil {
			_, err = open(t.Context())
		}
		kinds = append(kinds, api.KindOf(err))
	}
	if want := []string{"3", "2", "1", "0"}; !slices.Equal(disk.opened, want) || len(kinds) != 4 ||
		kinds[1] != api.NotFound || kinds[2] != api.Busy {
		t.Errorf("opened %v, want %v; kinds %v", disk.opened, want, kinds)
	}
}

// TestHealSearchesReadyDisks: a heal searches the layers of the node's disks, without a disk that is not ready.
func TestHealSearchesReadyDisks(t *testing.T) {
	d, disk := newDisks(t, 0)
	var got []block.LayerReader
	for on, err := range d.readyDisks(t.Context()) {
		if err != nil {
			t.Error(err)
		}
		got = append(got, on)
	}
	if len(got) != 1 || got[0] != disk {
		t.Errorf("disks %v", got)
	}
}
