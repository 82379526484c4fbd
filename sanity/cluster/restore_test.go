package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// bucket is an S3 server outside of a cluster.
type bucket struct {
	http.Handler
	sent     atomic.Int64 // bytes of packs
	received atomic.Int64 // bytes of packs
	indexes  atomic.Int64 // files received
	away     atomic.Bool  // every request fails
}

func (b *bucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if b.away.Load() {
		http.Error(w, "away", http.StatusServiceUnavailable)
		return
	}
	if r.Method == http.MethodPut {
		if strings.Contains(r.URL.Path, "/data/") {
			b.received.Add(r.ContentLength)
		} else if strings.Contains(r.URL.Path, "/index/") {
			b.indexes.Add(1)
		}
	}
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/data/") {
		w = &countingWriter{w, &b.sent}
	}
	b.Handler.ServeHTTP(w, r)
}

type countingWriter struct {
	http.ResponseWriter
	sent *atomic.Int64
}

func (w *countingWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.sent.Add(int64(n))
	return n, err
}

// backedUp is a cluster with the backup "friday" of a deleted volume in a bucket.
type backedUp struct {
	*Cluster
	t       *testing.T
	bucket  *bucket
	content []byte
}

// startBackedUp makes a cluster and the backup of a volume with size random bytes.
func startBackedUp(t *testing.T, nodes int, size int64) *backedUp {
	t.Helper()
	backend := s3mem.New()
	must(t, backend.CreateBucket("backups"))
	b := &backedUp{Cluster: start(t, Options{Nodes: nodes}), t: t, content: make([]byte, size),
		bucket: &bucket{Handler: gofakes3.New(backend).Server()}}
	_, _ = rand.NewChaCha8([32]byte{7}).Read(b.content)
	ln, err := net.Listen("tcp", b.OwnerIP()+":0")
	must(t, err)
	server := httptest.NewUnstartedServer(b.bucket)
	_ = server.Listener.Close()
	server.Listener = ln
	server.Start()
	t.Cleanup(server.Close)
	secret := filepath.Join(t.TempDir(), "s3.env")
	must(t, os.WriteFile(secret, fmt.Appendf(nil, "AWS_ACCESS_KEY_ID=key\nAWS_SECRET_ACCESS_KEY=hush\n"+
		"AWS_ENDPOINTS=%s\nBACKUP_PASSWORD=right\n", server.URL), 0o600))
	b.command(t, "target", "create", "default", "s3://backups@us-east-1/drover", "--credentials-file", secret)
	b.command(t, "volume", "create", "data", "--size", fmt.Sprint(size))
	b.attach(t, "data", b.Nodes[0].Name)
	f, err := os.OpenFile(deviceOf(t, b.Cluster, "data"), os.O_WRONLY|os.O_SYNC, 0)
	must(t, err)
	_, err = f.Write(b.content)
	must(t, errors.Join(err, f.Close()))
	b.command(t, "backup", "create", "data", "--name", "friday")
	b.detach(t, "data")
	b.command(t, "volume", "delete", "data")
	return b
}

// limit bounds the bytes per second that each node reads from the bucket.
func (b *backedUp) limit(rate int64) {
	b.t.Helper()
	var target api.BackupTarget
	must(b.t, b.Objects.Get(b.t.Context(), client.ObjectKey{Name: "default"}, &target))
	edit(b.t, b.Cluster, &target, func(o *api.BackupTarget) { o.Spec.MaxDownloadRate = rate })
}

// restore makes the volume v of the backup, with replicas on the nodes. One of the nodes restores.
func (b *backedUp) restore(nodes ...*Machine) {
	b.t.Helper()
	b.restoreLabelled(nil, nodes...)
}

func (b *backedUp) restoreLabelled(labels map[string]string, nodes ...*Machine) {
	b.t.Helper()
	var backup api.Backup
	must(b.t, b.Objects.Get(b.t.Context(), client.ObjectKey{Name: "friday"}, &backup))
	v := &api.Volume{Spec: api.VolumeSpec{Size: int64(len(b.content)), FromBackup: backup.Status.URL,
		NumberOfReplicas: int32(len(nodes))}}
	for _, m := range nodes {
		v.Spec.Nodes = append(v.Spec.Nodes, m.Name)
	}
	v.Name = "v"
	v.Labels = labels
	must(b.t, b.Objects.Create(b.t.Context(), v))
	awaitVolume(b.t, b.Cluster, "v", "made", func(v *api.Volume) bool { return len(v.Status.Members) == len(nodes) })
}

// restoring tells which of two nodes restores the volume v.
func (b *backedUp) restoring(one, two *Machine) (restoring, other *Machine) {
	b.t.Helper()
	var copies api.ImageCopyList
	must(b.t, b.Objects.List(b.t.Context(), &copies))
	for _, c := range copies.Items {
		switch {
		case c.Spec.From == "" && c.Spec.Node == one.Name:
			return one, two
		case c.Spec.From == "" && c.Spec.Node == two.Name:
			return two, one
		}
	}
	b.t.Fatal("no node restores the volume")
	return nil, nil
}

// awaitRestored waits until every replica has all data.
func (b *backedUp) awaitRestored(replicas int) {
	b.t.Helper()
	awaitVolume(b.t, b.Cluster, "v", "restored", func(v *api.Volume) bool {
		return v.Status.RestoreStatus != nil && v.Status.RestoreStatus.State == api.CloneCompleted &&
			len(v.Status.Members) == replicas && v.Status.Robustness == api.RobustHealthy
	})
}

// compare compares the attached volume v with the backup.
func (b *backedUp) compare() {
	b.t.Helper()
	f, err := os.OpenFile(deviceOf(b.t, b.Cluster, "v"), os.O_RDONLY|unix.O_DIRECT, 0)
	must(b.t, err)
	defer f.Close()
	got := block.AlignedBuffer(4 << 20)
	for off := int64(0); off < int64(len(b.content)); off += int64(len(got)) {
		n := min(int64(len(got)), int64(len(b.content))-off)
		if _, err := f.ReadAt(got[:n], off); err != nil && err != io.EOF {
			b.t.Fatalf("read at %d: %v", off, err)
		}
		if !bytes.Equal(got[:n], b.content[off:off+n]) {
			b.t.Fatalf("the volume has other bytes than its backup at %d", off)
		}
	}
}

// TestRestoreOfTwoReplicasReadsTheStoreOnce: two nodes have all data of a backup that the store sent once.
func TestRestoreOfTwoReplicasReadsTheStoreOnce(t *testing.T) {
	const size = int64(96) << 20
	b := startBackedUp(t, 3, size)
	b.bucket.sent.Store(0)
	b.restore(b.Nodes[1], b.Nodes[2])
	b.awaitRestored(2)
	if n := b.bucket.sent.Load(); n < size || n > size+size/50 {
		t.Errorf("the store sent %d bytes for %d of a backup", n, size)
	}
	for i, m := range []*Machine{b.Nodes[1], b.Nodes[2]} {
		other := b.Nodes[2-i]
		b.attach(t, "v", m.Name)
		must(t, other.PowerOff())
		b.compare()
		must(t, other.PowerOn())
		must(t, other.Serve(t.Context()))
		awaitVolume(t, b.Cluster, "v", "healthy", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
		b.detach(t, "v")
	}
}

// TestRestoringNodeIsLost: a volume is attached on a node whose replica hydrates from another node. The other node is
// lost, by a loss of power or of the network, while the store has most of the data: I/O waits, at most, until a node
// restores the layer again. With the node back, every replica has all data.
func TestRestoringNodeIsLost(t *testing.T) {
	const size = int64(64) << 20
	for name, loss := range map[string]struct {
		lose, back func(*backedUp, *Machine) error
	}{
		"power": {func(_ *backedUp, m *Machine) error { return m.PowerOff() },
			func(_ *backedUp, m *Machine) error { return errors.Join(m.PowerOn(), m.Serve(t.Context())) }},
		"network": {func(b *backedUp, m *Machine) error { b.Net.Isolate(m, b.Machines()...); return nil },
			func(b *backedUp, _ *Machine) error { b.Net.Heal(); return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			b := startBackedUp(t, 3, size)
			b.limit(256 << 10)
			b.restore(b.Nodes[1], b.Nodes[2])
			lost, left := b.restoring(b.Nodes[1], b.Nodes[2])
			b.attach(t, "v", left.Name)
			device := deviceOf(t, b.Cluster, "v")
			answered(t, "a read from the other node", blockIO(device, 32<<20, false))
			must(t, loss.lose(b, lost))
			began := time.Now()
			read := blockIO(device, size-(4<<20), false)
			answered(t, "a write", blockIO(device, 2<<20, true))
			t.Logf("a write took %v", time.Since(began).Round(time.Millisecond))
			clear(b.content[2<<20:][:4096])
			answered(t, "a read of bytes that only the store has", read)
			t.Logf("a read took %v", time.Since(began).Round(time.Millisecond))
			must(t, loss.back(b, lost))
			b.limit(0)
			b.awaitRestored(2)
			b.compare()
			b.detach(t, "v")
		})
	}
}

// TestReplicaReturnsDuringRestore: a node with a replica that hydrates is away for a part of the restore. With the node
// back, both replicas have all data, and the writes that came meanwhile.
func TestReplicaReturnsDuringRestore(t *testing.T) {
	const size = int64(64) << 20
	b := startBackedUp(t, 3, size)
	b.limit(256 << 10)
	b.restore(b.Nodes[1], b.Nodes[2])
	restoring, other := b.restoring(b.Nodes[1], b.Nodes[2])
	b.attach(t, "v", restoring.Name)
	device := deviceOf(t, b.Cluster, "v")
	must(t, other.PowerOff())
	answered(t, "a write", blockIO(device, 2<<20, true))
	clear(b.content[2<<20:][:4096])
	awaitVolume(t, b.Cluster, "v", "without the node", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	must(t, other.PowerOn())
	must(t, other.Serve(t.Context()))
	began, sent := time.Now(), b.bucket.sent.Load()
	awaitVolume(t, b.Cluster, "v", "with both", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
	t.Logf("a member again after %v, and %d bytes from the store", time.Since(began).Round(time.Millisecond),
		b.bucket.sent.Load()-sent)
	b.limit(0)
	b.awaitRestored(2)
	b.detach(t, "v")
	b.attach(t, "v", other.Name)
	must(t, restoring.PowerOff())
	b.compare()
	must(t, restoring.PowerOn())
	must(t, restoring.Serve(t.Context()))
	b.detach(t, "v")
}

// TestStoreIsAwayDuringRestore: reads wait for a store that is away, also through kill -9 of all programs of the node,
// and the volume says why. With the store back the reads end; the restore continues, and the store sends little again.
func TestStoreIsAwayDuringRestore(t *testing.T) {
	const size = int64(96) << 20
	b := startBackedUp(t, 2, size)
	b.limit(2 << 20)
	b.restore(b.Nodes[1])
	m := b.Nodes[1]
	b.attach(t, "v", m.Name)
	device := deviceOf(t, b.Cluster, "v")
	eventually(t, "the store has sent the half", func() bool { return b.bucket.sent.Load() > size/2 })
	b.bucket.away.Store(true)
	read := blockIO(device, size-(2<<20), false)
	must(t, m.Kill("serve", "data"))
	m.Gone()
	sent := b.bucket.sent.Load()
	must(t, m.Serve(t.Context()))
	awaitVolume(t, b.Cluster, "v", "waiting for the store", func(v *api.Volume) bool {
		return strings.Contains(v.Status.RestoreStatus.Message, "503")
	})
	select {
	case err := <-read:
		t.Errorf("a read without the store ends: %v", err)
	default:
	}
	b.limit(0)
	b.bucket.away.Store(false)
	answered(t, "the read that waited", read)
	b.awaitRestored(1)
	if n := b.bucket.sent.Load() - sent; n > size*7/8 { // the half, and the requests that were cut
		t.Errorf("after the half of the restore, the store sent %d of %d bytes again", n, size)
	}
	b.compare()
	b.detach(t, "v")
}

// TestReaderOutlivesTheStore: a volume of a mounted backup fetches what is read. Its store is away for DROVER_AWAY
// seconds, ten minutes where the run wants all: a read waits, without an error, while a block that the node has is read. With the store back the read ends.
func TestReaderOutlivesTheStore(t *testing.T) {
	const size = int64(32) << 20
	away := time.Duration(suite.Count(t, "DROVER_AWAY", 5, 600)) * time.Second
	b := startBackedUp(t, 2, size)
	m := b.Nodes[1]
	b.restoreLabelled(map[string]string{api.LabelBackupMount: "friday"}, m)
	b.attach(t, "v", m.Name)
	device := deviceOf(t, b.Cluster, "v")
	answered(t, "the first read", blockIO(device, 0, false))
	b.bucket.away.Store(true)
	read := blockIO(device, 16<<20, false)
	answered(t, "a read of a block that the node has", blockIO(device, 4096, false))
	outage := time.NewTimer(away)
	defer outage.Stop()
	select {
	case err := <-read:
		t.Errorf("a read without the store ends: %v", err)
	case <-outage.C:
	}
	b.bucket.away.Store(false)
	began := time.Now()
	answered(t, "the read that waited", read)
	t.Logf("after %v without the store, the read ended %v after its return", away, time.Since(began).Round(time.Millisecond))
	b.compare()
	b.detach(t, "v")
}
