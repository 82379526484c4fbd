package planner

import (
	"flag"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/driver/kubeapi/apitest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Main(m))
}

// world is an API server with a running planner. The test writes what the nodes would write.
type world struct {
	*apitest.Server
	cached client.Client // of the planner
}

func newWorld(t *testing.T) *world {
	t.Helper()
	s := apitest.Start(t)
	mgr := s.Manager(nil)
	for _, err := range []error{watch.AddIndexes(mgr), watch.AddBackupIndexes(mgr),
		setupSince(mgr, s.Log, time.Now().Add(-time.Hour))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s.Run(mgr)
	return &world{s, mgr.GetClient()}
}

// heartbeat is recent until the test ends.
func heartbeat() metav1.Time { return metav1.NewTime(time.Now().Add(time.Hour)) }

func diskOf(node string) api.UID {
	return api.UID("0b3c9a52-6f0e-4a38-9f6f-0d3b7c5d1a1" + node[len(node)-1:])
}

// addNodes creates nodes with a ready disk each.
func (w *world) addNodes(names ...string) {
	w.T.Helper()
	for _, name := range names {
		n := &api.Node{ObjectMeta: apitest.Named(name), Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: "/srv/" + name}}}}
		w.Create(n)
		apitest.EditStatus(w.Server, n, func(n *api.Node) {
			n.Status.Heartbeat = heartbeat()
			n.Status.Disks = []api.DiskStatus{{Path: "/srv/" + name, UID: diskOf(name), Ready: true}}
		})
	}
}

// editNode changes the status of a node.
func (w *world) editNode(name string, change func(*api.NodeStatus)) {
	w.T.Helper()
	apitest.EditStatus(w.Server, &api.Node{ObjectMeta: apitest.Named(name)}, func(n *api.Node) { change(&n.Status) })
}

// addVolume creates a detached volume with a member on each node.
func (w *world) addVolume(name string, nodes ...string) *api.Volume {
	w.T.Helper()
	v := apitest.Volume(name, 16<<20)
	v.Finalizers = []string{api.Finalizer}
	w.Create(v)
	w.addMembers(v, nodes...)
	return v
}

func (w *world) addMembers(v *api.Volume, nodes ...string) {
	w.T.Helper()
	uid := api.NewUID()
	var members []string
	for _, node := range nodes {
		rep := &api.Replica{ObjectMeta: apitest.Named(v.Name + "." + node), Spec: api.ReplicaSpec{UID: api.NewUID(),
			Volume: v.Name, VolumeUID: uid, Node: node, Disk: diskOf(node), Size: v.Spec.Size}}
		w.Create(rep)
		apitest.EditStatus(w.Server, rep, func(rep *api.Replica) { rep.Status.Mode = api.ReplicaCurrent })
		members = append(members, rep.Name)
	}
	apitest.EditStatus(w.Server, v, func(v *api.Volume) {
		v.Status.UID, v.Status.Members, v.Status.State = uid, members, api.VolumeDetached
	})
}

// addTarget creates an available backup target.
func (w *world) addTarget(name string) *api.BackupTarget {
	w.T.Helper()
	t := &api.BackupTarget{ObjectMeta: apitest.Named(name), Spec: api.BackupTargetSpec{BackupTargetURL: "file:///srv/" + name}}
	w.Create(t)
	apitest.EditStatus(w.Server, t, func(t *api.BackupTarget) { t.Status.Available = true })
	return t
}

// addSnapshot creates a ready snapshot of a user.
func (w *world) addSnapshot(v *api.Volume, name string) *api.Snapshot {
	w.T.Helper()
	s := api.NewSnapshot(v, name)
	w.Create(s)
	return w.cut(s, v)
}

// cut makes a snapshot ready, as the node of a volume would.
func (w *world) cut(s *api.Snapshot, v *api.Volume) *api.Snapshot {
	w.T.Helper()
	apitest.EditStatus(w.Server, s, func(s *api.Snapshot) {
		s.Status.ReadyToUse, s.Status.UID, s.Status.VolumeUID = true, api.UID(s.UID), v.Status.UID
		s.Status.CreationTime = time.Now().UTC().Format(time.RFC3339Nano)
	})
	return s
}

// addBackup creates a Backup in target t.
func (w *world) addBackup(name, volume, snapshot string) *api.Backup {
	w.T.Helper()
	b := &api.Backup{ObjectMeta: apitest.Named(name),
		Spec: api.BackupSpec{Volume: volume, SnapshotName: snapshot, BackupTargetName: "t"}}
	w.Create(b)
	return b
}

func (w *world) awaitBackup(name, what string, ok func(*api.Backup) bool) *api.Backup {
	w.T.Helper()
	return apitest.Await(w.Server, &api.Backup{ObjectMeta: apitest.Named(name)}, &api.BackupList{}, what, ok)
}

// awaitState waits for a state with a message that mentions part.
func (w *world) awaitState(name string, state api.BackupState, part string) *api.Backup {
	w.T.Helper()
	return w.awaitBackup(name, string(state)+": "+part, func(b *api.Backup) bool {
		return b.Status.State == state && strings.Contains(b.Status.Message, part)
	})
}

// awaitSource waits until a backup has a source on a node.
func (w *world) awaitSource(name, node string) *api.Backup {
	w.T.Helper()
	return w.awaitBackup(name, "has its source on "+node, func(b *api.Backup) bool {
		return b.Spec.Source != nil && b.Spec.Source.Node == node
	})
}

// awaitSnapshot waits for the own snapshot of a backup.
func (w *world) awaitSnapshot(b *api.Backup) *api.Snapshot {
	w.T.Helper()
	return apitest.Await(w.Server, &api.Snapshot{ObjectMeta: apitest.Named(b.OwnSnapshotName())}, &api.SnapshotList{}, "taken",
		func(*api.Snapshot) bool { return true })
}

// complete ends a backup as its node would.
func (w *world) complete(b *api.Backup) {
	w.T.Helper()
	w.completeWith(b, func(*api.Backup) {})
}

// completeWith is complete with further facts.
func (w *world) completeWith(b *api.Backup, more func(*api.Backup)) {
	w.T.Helper()
	apitest.EditStatus(w.Server, b, func(b *api.Backup) {
		x := b.Spec.Source
		b.Status = api.BackupStatus{SnapshotName: x.Snapshot, SnapshotCreatedAt: x.CreationTime, VolumeName: x.Volume,
			VolumeUID: x.VolumeUID}
		b.Status.State, b.Status.SnapshotID, b.Status.OwnerID = api.BackupCompleted, "0123", x.Node
		more(b)
	})
}

// awaitLeaving waits until the planner has deleted an object, and then lets go of the object as its node would.
func awaitLeaving[X any, T interface {
	*X
	client.Object
}](w *world, obj T, list client.ObjectList) {
	w.T.Helper()
	apitest.Await(w.Server, obj, list, "deleted", func(o T) bool { return o.GetDeletionTimestamp() != nil })
	apitest.Edit(w.Server, obj, func(o T) { o.SetFinalizers(nil) })
}

// stays fails the test if another reconcile changes the backup.
func (w *world) stays(name, what string) {
	w.T.Helper()
	b := w.awaitBackup(name, "in the cache of the planner", func(b *api.Backup) bool {
		var seen api.Backup
		return w.cached.Get(w.Ctx, client.ObjectKey{Name: name}, &seen) == nil && seen.ResourceVersion == b.ResourceVersion
	})
	w.reconcile(&backupReconciler{Client: w.cached, live: w.Client, log: w.Log, began: time.Now().Add(-time.Hour)}, name)
	var now api.Backup
	err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(b), &now)
	if err != nil || now.ResourceVersion != b.ResourceVersion {
		w.T.Fatalf("%s: backup %s has changed: %v\nbefore %+v\nafter  %+v", what, name, err, b, now)
	}
}
