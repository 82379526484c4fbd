package cluster

import (
	"errors"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestBackupContinuesOnAnotherNode: a node with a replica loses power while the node backs the volume up. Another node
// completes the backup and sends little twice. The volume, which was detached, is attached and written meanwhile; the
// backup has the bytes of its snapshot.
func TestBackupContinuesOnAnotherNode(t *testing.T) {
	const size = int64(96) << 20
	b := startBackedUp(t, 3, 4<<20)
	b.content = make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{8}).Read(b.content)
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 2, Nodes: []string{b.Nodes[1].Name, b.Nodes[2].Name}}}
	v.Name = "source"
	must(t, b.Objects.Create(t.Context(), v))
	b.attach(t, "source", b.Nodes[1].Name)
	f, err := os.OpenFile(deviceOf(t, b.Cluster, "source"), os.O_WRONLY|os.O_SYNC, 0)
	must(t, err)
	_, err = f.Write(b.content)
	must(t, errors.Join(err, f.Close()))
	b.detach(t, "source")

	limit := func(rate int64) {
		var target api.BackupTarget
		must(t, b.Objects.Get(t.Context(), client.ObjectKey{Name: "default"}, &target))
		edit(t, b.Cluster, &target, func(o *api.BackupTarget) { o.Spec.MaxUploadRate = rate })
	}
	limit(2 << 20)
	b.bucket.received.Store(0)
	indexes := b.bucket.indexes.Load()
	monday := &api.Backup{Spec: api.BackupSpec{Volume: "source"}}
	monday.Name = "monday"
	must(t, b.Objects.Create(t.Context(), monday))
	eventually(t, "the store has a part", func() bool { return b.bucket.received.Load() > size/8 })
	must(t, b.Objects.Get(t.Context(), client.ObjectKey{Name: "monday"}, monday))
	lost, left := b.Nodes[1], b.Nodes[2]
	if monday.Status.OwnerID == left.Name {
		lost, left = left, lost
	}
	began := time.Now()
	b.attach(t, "source", left.Name)
	t.Logf("attached in %v during the backup", time.Since(began).Round(time.Millisecond))
	answered(t, "a write", blockIO(deviceOf(t, b.Cluster, "source"), 2<<20, true))

	eventually(t, "the index has packs", func() bool { return b.bucket.indexes.Load() > indexes })
	must(t, lost.PowerOff())
	limit(0)
	eventually(t, "the backup is complete", func() bool {
		must(t, b.Objects.Get(t.Context(), client.ObjectKey{Name: "monday"}, monday))
		return monday.Status.State == api.BackupCompleted
	})
	if n := b.bucket.received.Load(); monday.Status.OwnerID != left.Name || n > size+size/2 {
		t.Errorf("node %s completed the backup of node %s; the store received %d bytes for %d", monday.Status.OwnerID,
			lost.Name, n, size)
	}
	must(t, lost.PowerOn())
	must(t, lost.Serve(t.Context()))
	b.command(t, "backup", "restore", "monday", "--name", "v")
	b.attach(t, "v", b.Nodes[0].Name)
	b.compare()
	b.detach(t, "v")
	b.detach(t, "source")
}
