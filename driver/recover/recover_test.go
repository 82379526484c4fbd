package recover_test

import (
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/cli"
	"drover.io/drover/driver/kubeapi"
	"drover.io/drover/driver/recover"
	"drover.io/drover/replicas/stack"
)

func TestMain(m *testing.M) {
	suite.SystemMain()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

// world is an API server without reconcilers, and disks.
type world struct {
	*testing.T
	client client.WithWatch
}

func newWorld(t *testing.T) *world {
	t.Helper()
	suite.Slow(t)
	ctx, cancel := context.WithCancel(context.Background())
	s, err := kubeapi.Start(ctx, kubeapi.Options{Dir: t.TempDir(), Volatile: true})
	t.Cleanup(func() {
		cancel()
		if s != nil {
			if err := s.Wait(); err != nil {
				t.Error(err)
			}
		}
	})
	w := &world{T: t}
	w.must(err)
	scheme := runtime.NewScheme()
	w.must(api.AddToScheme(scheme))
	w.client, err = client.NewWithWatch(s.Config, client.Options{Scheme: scheme})
	w.must(err)
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) disk() *stack.Disk {
	w.Helper()
	d, err := stack.Add(w.Context(), w.TempDir())
	w.must(err)
	w.Cleanup(func() { d.Close() })
	return d
}

// node makes a node object with the disks, ready or not.
func (w *world) node(name string, ready bool, disks ...*stack.Disk) {
	w.Helper()
	var n api.Node
	if err := w.client.Get(w.Context(), client.ObjectKey{Name: name}, &n); err != nil {
		n = api.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		w.must(w.client.Create(w.Context(), &n))
	}
	n.Status.Disks = nil
	for _, d := range disks {
		n.Status.Disks = append(n.Status.Disks, api.DiskStatus{Path: d.Path(), UID: api.UID(d.UID()), Ready: ready})
	}
	w.must(w.client.Status().Update(w.Context(), &n))
}

func (w *world) replica(d *stack.Disk, volume string, layers ...string) stack.Spec {
	w.Helper()
	s := stack.Spec{UID: string(api.NewUID()), Volume: volume, VolumeUID: string(api.NewUID()), Size: 16 << 20,
		Layers: layers}
	w.must(d.CreateReplica(w.Context(), s))
	return s
}

func (w *world) image(d *stack.Disk, name string) block.Image {
	w.Helper()
	img := block.Image{UID: string(api.NewUID()), Name: name, Layers: []string{string(api.NewUID())}, Format: "raw",
		VirtualSize: 8 << 20, Checksum: strings.Repeat("ab", 64)}
	l, err := d.Create(w.Context(), img.Layers[0], img.VirtualSize)
	w.must(err)
	_, err = l.WriteAt([]byte(name), 4096)
	w.must(err)
	img.Digest, _, err = l.Seal(w.Context())
	w.must(err)
	w.must(d.PutImage(img))
	return img
}

// run recovers without waiting for reconcilers, because no reconciler runs.
func (w *world) run(o cli.RecoverOptions) map[string]cli.Finding {
	w.Helper()
	o.NoWait = true
	all, err := recover.Run(w.Context(), w.client, o)
	w.must(err)
	out := map[string]cli.Finding{}
	for _, f := range all {
		w.Logf("%+v", f)
		out[f.Kind+" "+f.Name] = f
	}
	return out
}

func (w *world) want(got map[string]cli.Finding, key, state, action string, words ...string) {
	w.Helper()
	f, ok := got[key]
	if !ok || f.State != state || f.Action != action {
		w.Errorf("%s: %+v, want %s, %q", key, f, state, action)
	}
	for _, word := range words {
		if !strings.Contains(f.Note, word) {
			w.Errorf("%s: note %q does not say %q", key, f.Note, word)
		}
	}
}

func name(s stack.Spec) string { return s.Volume + "." + s.UID[:8] }

func TestRecordsBecomeObjects(t *testing.T) {
	w := newWorld(t)
	d := w.disk()
	w.node("one", true, d)
	img := w.image(d, "golden")
	a, b := w.replica(d, "a"), w.replica(d, "b", img.Layers[0])
	got := w.run(cli.RecoverOptions{})
	w.want(got, "BackingImage golden", cli.FoundMissing, "create", "upload")
	w.want(got, "Volume a", cli.FoundMissing, "create", "epoch 1")
	w.want(got, "Replica "+name(b), cli.FoundMissing, "create")
	var list api.VolumeList
	if w.must(w.client.List(t.Context(), &list)); len(list.Items) > 0 {
		t.Fatal("a dry run creates")
	}
	got = w.run(cli.RecoverOptions{Apply: true})
	w.want(got, "Volume b", cli.FoundMissing, "created")
	w.want(w.run(cli.RecoverOptions{Apply: true}), "Volume a", cli.FoundThere, "")

	var i api.BackingImage
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: "golden"}, &i))
	r, err := i.Recovered()
	if err != nil || string(r.UUID) != img.UID || r.Digest != img.Digest || len(r.Copies) != 1 ||
		r.Copies[0].Node != "one" {
		t.Errorf("image: %+v, %v", r, err)
	}
	var v api.Volume
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: "b"}, &v))
	rv, err := v.Recovered()
	if err != nil || string(rv.UID) != b.VolumeUID || !slices.Equal(rv.Members, []string{name(b)}) ||
		v.Spec.BackingImage != "golden" || v.Spec.Size != b.Size {
		t.Errorf("volume: %+v, %+v, %v", rv, v.Spec, err)
	}
	var rep api.Replica
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: name(a)}, &rep))
	if string(rep.Spec.UID) != a.UID || string(rep.Spec.Disk) != d.UID() || rep.Spec.Node != "one" {
		t.Errorf("replica: %+v", rep.Spec)
	}
}

// TestConflicts: recover names every contradiction between two sources, and leaves the objects alone.
func TestConflicts(t *testing.T) {
	w := newWorld(t)
	d, e := w.disk(), w.disk()
	w.node("one", true, d, e)
	twice := w.replica(d, "twice")
	w.must(e.CreateReplica(t.Context(), twice)) // two disks claim a replica
	w.replica(d, "same")
	w.replica(e, "same") // two volumes of the same name
	w.image(d, "same")
	w.image(e, "same")
	w.replica(d, "other")
	w.must(w.client.Create(t.Context(), &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "other"},
		Spec: api.VolumeSpec{Size: 16 << 20}}))
	fine := w.replica(e, "fine")
	torn := w.replica(d, "torn")
	path := filepath.Join(d.Path(), "replicas", torn.UID, "stack.json")
	w.must(os.WriteFile(path, []byte("{"), 0o600))

	got := w.run(cli.RecoverOptions{Apply: true})
	w.want(got, "Replica "+name(twice), cli.FoundConflict, "", "2 disks")
	w.want(got, "Volume same", cli.FoundConflict, "", "several volumes")
	w.want(got, "BackingImage same", cli.FoundConflict, "", "several images")
	w.want(got, "Volume other", cli.FoundConflict, "", "another volume")
	w.want(got, "Replica (unreadable)", cli.FoundDamaged, "")
	w.want(got, "Volume fine", cli.FoundMissing, "created")
	w.want(got, "Replica "+name(fine), cli.FoundMissing, "created")
	var reps api.ReplicaList
	w.must(w.client.List(t.Context(), &reps))
	if len(reps.Items) != 1 {
		t.Errorf("%d replicas were created, want one", len(reps.Items))
	}

	// A copy of a whole disk. (os.CopyFS fills holes: Drover refuses such a copy.)
	copied := t.TempDir()
	w.must(exec.Command("cp", "-a", "--sparse=auto", e.Path()+"/.", copied).Run())
	got = w.run(cli.RecoverOptions{Disks: []string{e.Path(), copied}})
	w.want(got, "Disk "+copied, cli.FoundConflict, "", "same uid")
	if _, ok := got["Volume fine"]; ok {
		t.Error("one of two copies of a disk was believed")
	}
}

// TestDiskThatMoved: a disk from another machine takes the replicas along; a disk claimed by two nodes does not.
func TestDiskThatMoved(t *testing.T) {
	w := newWorld(t)
	d := w.disk()
	w.node("one", true, d)
	s := w.replica(d, "v")
	w.run(cli.RecoverOptions{Apply: true})
	w.node("two", true, d)
	w.want(w.run(cli.RecoverOptions{}), "Disk "+d.Path(), cli.FoundConflict, "", "one and two")
	w.node("one", false, d)
	w.want(w.run(cli.RecoverOptions{}), "Replica "+name(s), cli.FoundMoved, "move", "from node one to two")
	att := &api.Attachment{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: api.AttachmentSpec{Volume: "v", Node: "one"}}
	w.must(w.client.Create(t.Context(), att))
	w.want(w.run(cli.RecoverOptions{Apply: true}), "Replica "+name(s), cli.FoundConflict, "", "detach")
	w.must(w.client.Delete(t.Context(), att))
	w.want(w.run(cli.RecoverOptions{Apply: true}), "Replica "+name(s), cli.FoundMoved, "moved")
	var r api.Replica
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: name(s)}, &r))
	if r.Spec.Node != "two" || r.Labels[api.LabelNode] != "two" {
		t.Errorf("%+v %v", r.Spec, r.Labels)
	}
}

// TestDiskOfADeadMachine: a machine is dead, and its disk is in another machine, mounted at the same path. The dead
// node's last status no longer counts.
func TestDiskOfADeadMachine(t *testing.T) {
	w := newWorld(t)
	d := w.disk()
	w.node("one", true, d)
	s := w.replica(d, "v")
	w.run(cli.RecoverOptions{Apply: true})
	w.node("two", true, d)
	var n api.Node
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: "two"}, &n))
	n.Status.Heartbeat = metav1.NewTime(time.Now().Add(time.Hour))
	w.must(w.client.Status().Update(t.Context(), &n))
	w.want(w.run(cli.RecoverOptions{Apply: true}), "Replica "+name(s), cli.FoundMoved, "moved")

	// The heartbeat of the dead node is not old yet, but the user knows of the death.
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: "one"}, &n))
	n.Status.Heartbeat, n.Status.HeartbeatSeconds = metav1.NewTime(time.Now().Add(time.Hour)), 1
	w.must(w.client.Status().Update(t.Context(), &n))
	again := w.replica(d, "again")
	w.want(w.run(cli.RecoverOptions{Apply: true}), "Disk "+d.Path(), cli.FoundConflict, "", "one and two")
	w.want(w.run(cli.RecoverOptions{Apply: true, DeadNodes: []string{"one"}}), "Replica "+name(again), cli.FoundMissing, "created")
	var r api.Replica
	w.must(w.client.Get(t.Context(), client.ObjectKey{Name: name(again)}, &r))
	if r.Spec.Node != "two" {
		t.Errorf("the replica is on node %s", r.Spec.Node)
	}
}

func TestDiskOfNoNode(t *testing.T) {
	w := newWorld(t)
	d := w.disk()
	w.replica(d, "v")
	w.want(w.run(cli.RecoverOptions{Disks: []string{d.Path()}}), "Disk "+d.Path(), cli.FoundConflict, "", "disk add")
	if _, err := recover.Run(t.Context(), w.client, cli.RecoverOptions{}); !api.Is(err, api.NotFound) {
		t.Errorf("no disk at all: %v", err)
	}
}
