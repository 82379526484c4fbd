package planner

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// clusterOf is a cluster for tables of cases: nodes a, b and c with a disk each, named like the node, and a replica
// r.NODE on each disk. All replicas are members of volume v with the uid of-v.
type clusterOf struct {
	volume     *api.Volume
	replicas   map[string]*api.Replica // by node
	nodes      map[string]*api.Node
	unfinished map[string]int
	now        time.Time
}

func newCluster() *clusterOf {
	c := &clusterOf{volume: &api.Volume{}, replicas: map[string]*api.Replica{}, nodes: map[string]*api.Node{},
		unfinished: map[string]int{}, now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	c.volume.Name, c.volume.Status.UID = "v", "of-v"
	for _, name := range []string{"a", "b", "c"} {
		rep := &api.Replica{Spec: api.ReplicaSpec{UID: api.UID("uid-" + name), Volume: "v", VolumeUID: "of-v", Node: name,
			Disk: api.UID(name)}, Status: api.ReplicaStatus{Mode: api.ReplicaCurrent}}
		rep.Name = "r." + name
		n := &api.Node{Status: api.NodeStatus{Heartbeat: metav1.NewTime(c.now.Add(-9 * time.Second)),
			Disks: []api.DiskStatus{{Path: "/srv/" + name, UID: api.UID(name), Ready: true}}}}
		n.Name = name
		c.replicas[name], c.nodes[name] = rep, n
		c.volume.Status.Members = append(c.volume.Status.Members, rep.Name)
	}
	return c
}

// lists returns the objects in the order of their names.
func (c *clusterOf) lists() (replicas []api.Replica, nodes []api.Node) {
	for _, name := range []string{"a", "b", "c"} {
		if rep := c.replicas[name]; rep != nil {
			replicas = append(replicas, *rep)
		}
		if n := c.nodes[name]; n != nil {
			nodes = append(nodes, *n)
		}
	}
	return replicas, nodes
}

func (c *clusterOf) silence(node string) { c.nodes[node].Status.Heartbeat.Time = c.now.Add(-time.Hour) }

func (c *clusterOf) only(nodes ...string) {
	for name := range c.replicas {
		if !slices.Contains(nodes, name) {
			delete(c.replicas, name)
		}
	}
}

// TestBackupIsMadeFromTheBestReplica: a replica is a source only if its node and disk answer and the replica holds the
// snapshot. Among these, wholeness counts first, then the node of the device, then the load, then the name.
func TestBackupIsMadeFromTheBestReplica(t *testing.T) {
	deleted := metav1.Now()
	for _, c := range []struct {
		name   string
		change func(*clusterOf)
		want   string // node
		why    string // part of the error
	}{
		{"by name", func(*clusterOf) {}, "a", ""},
		{"not the node with the device", func(c *clusterOf) { c.volume.Status.AttachedNode = "a" }, "b", ""},
		{"the node with the device before none", func(c *clusterOf) { c.volume.Status.AttachedNode = "a"; c.only("a") }, "a", ""},
		{"the least busy node", func(c *clusterOf) { c.unfinished = map[string]int{"a": 2, "b": 1, "c": 1} }, "b", ""},
		{"a busy node before the node with the device", func(c *clusterOf) {
			c.volume.Status.AttachedNode = "c"
			c.unfinished = map[string]int{"a": 2, "b": 1}
		}, "b", ""},
		{"a silent node", func(c *clusterOf) { c.silence("a") }, "b", ""},
		{"a node that does not exist", func(c *clusterOf) { delete(c.nodes, "a") }, "b", ""},
		{"a disk that is not ready", func(c *clusterOf) { c.nodes["a"].Status.Disks[0].Ready = false }, "b", ""},
		{"a disk that the node does not have", func(c *clusterOf) { c.nodes["a"].Status.Disks = nil }, "b", ""},
		{"a former member", func(c *clusterOf) { c.volume.Status.Members = []string{"r.b", "r.c"} }, "b", ""},
		{"of an earlier volume", func(c *clusterOf) { c.replicas["a"].Spec.VolumeUID = "earlier" }, "b", ""},
		{"being deleted", func(c *clusterOf) { c.replicas["a"].DeletionTimestamp = &deleted }, "b", ""},
		{"not current", func(c *clusterOf) { c.replicas["a"].Status.Mode = api.ReplicaStale }, "b", ""},
		{"fetches layers", func(c *clusterOf) { c.replicas["a"].Status.Fetching = "2 layers" }, "b", ""},
		{"a whole replica on the node with the device before one that fetches", func(c *clusterOf) {
			c.only("a", "b")
			c.replicas["a"].Status.Fetching, c.volume.Status.AttachedNode = "2 layers", "b"
		}, "b", ""},
		{"damaged", func(c *clusterOf) { c.replicas["a"].Status.Damage = []api.LayerDamage{{}} }, "b", ""},
		{"beyond repair before none", func(c *clusterOf) { c.only("a"); c.replicas["a"].Status.BeyondRepair = true }, "a", ""},
		{"each replica is explained", func(c *clusterOf) {
			c.silence("a")
			c.nodes["b"].Status.Disks[0].Ready, c.nodes["b"].Status.Disks[0].Message = false, "no such file system"
			c.replicas["c"].Status.Mode = api.ReplicaFailed
		}, "", "replica r.a: node a gives no sign of life; replica r.b: disk /srv/b of node b is not ready: no such file " +
			"system; replica r.c: the replica is failed"},
		{"no member", func(c *clusterOf) { c.only() }, "", "no replica is a member"},
	} {
		in := newCluster()
		c.change(in)
		replicas, nodes := in.lists()
		rep, err := chooseSource(sourceView{volume: in.volume, replicas: replicas, nodes: nodes, now: in.now,
			unfinished: in.unfinished, snapshot: &api.Snapshot{Status: api.SnapshotStatus{VolumeUID: "of-v"}}})
		switch {
		case c.want != "" && (err != nil || rep.Spec.Node != c.want):
			t.Errorf("%s: %+v, %v; want node %s", c.name, rep, err, c.want)
		case c.want == "" && (!api.Is(err, api.Unavailable) || !strings.HasSuffix(err.Error(), c.why)):
			t.Errorf("%s: %v", c.name, err)
		}
		if slices.ContainsFunc(replicas, func(rep api.Replica) bool { return rep.Name == "" }) {
			t.Errorf("%s: the choice has changed the list of the cache", c.name)
		}
	}
}

// TestNodeLosesABackupThatItCannotMake: a backup stays with its node while the node, the disk and the replica are as
// they were when the replica was chosen, whatever else changes.
func TestNodeLosesABackupThatItCannotMake(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*clusterOf)
		why    string // part of the reason; empty: the node keeps the backup
	}{
		{"nothing", func(*clusterOf) {}, ""},
		{"the volume is attached there", func(c *clusterOf) { c.volume.Status.AttachedNode = "a" }, ""},
		{"the node is busy", func(c *clusterOf) { c.unfinished["a"] = 9 }, ""},
		{"the mode alone", func(c *clusterOf) { c.replicas["a"].Status.Mode = api.ReplicaStale }, ""},
		{"another node is silent", func(c *clusterOf) { c.silence("b") }, ""},
		{"the node is silent", func(c *clusterOf) { c.silence("a") }, "gives no sign of life"},
		{"the node does not exist", func(c *clusterOf) { delete(c.nodes, "a") }, "node a does not exist"},
		{"the disk is not ready", func(c *clusterOf) { c.nodes["a"].Status.Disks[0].Ready = false }, "is not ready"},
		{"a former member", func(c *clusterOf) { c.volume.Status.Members = []string{"r.b", "r.c"} }, "has no member"},
		{"the replica does not exist", func(c *clusterOf) { delete(c.replicas, "a") }, "has no member"},
		{"another replica of the name", func(c *clusterOf) { c.replicas["a"].Spec.UID = "other" }, "has no member"},
		{"the volume does not exist", func(c *clusterOf) { c.volume = &api.Volume{} }, "volume v has no member"},
		{"the volume is a later volume of the name", func(c *clusterOf) {
			c.volume.Status.UID, c.replicas["a"].Spec.VolumeUID = "later", "later"
		}, "has no member"},
		{"the disk has moved", func(c *clusterOf) { c.replicas["a"].Spec.Node = "b" }, "node b now"},
	} {
		in := newCluster()
		c.change(in)
		replicas, nodes := in.lists()
		source := &api.ExportFact{Volume: "v", VolumeUID: "of-v", Replica: "uid-a", Node: "a", Disk: "a"}
		silent := func(n *api.Node) bool { return in.now.Sub(n.Status.Heartbeat.Time) >= n.SilentAfter() }
		why := explainLoss(source, in.volume, replicas, nodes, silent)
		if (why == "") != (c.why == "") || !strings.Contains(why, c.why) {
			t.Errorf("%s: %q, want %q", c.name, why, c.why)
		}
	}
}

// TestUnfinishedBackupsCountForTheirNode: a node's load is its backups that have not ended.
func TestUnfinishedBackupsCountForTheirNode(t *testing.T) {
	on := func(node string, s api.BackupState) api.Backup {
		return api.Backup{Spec: api.BackupSpec{Source: &api.ExportFact{Node: node}}, Status: api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: s}}}
	}
	count := map[string]int{}
	for _, b := range []api.Backup{on("a", api.BackupPending), on("a", api.BackupInProgress), on("a", api.BackupCompleted),
		on("a", api.BackupError), on("b", ""), {}} {
		addUnfinished(count, &b)
	}
	if len(count) != 2 || count["a"] != 2 || count["b"] != 1 {
		t.Errorf("%v", count)
	}
}

// TestNodesThatMatterWakeBackups: a heartbeat alone wakes no backup, the return of a silent node and a change of its
// disks do.
func TestNodesThatMatterWakeBackups(t *testing.T) {
	old := newCluster().nodes["a"]
	for name, c := range map[string]struct {
		change func(*api.Node)
		want   bool
	}{
		"a heartbeat":       {func(n *api.Node) { n.Status.Heartbeat.Time = n.Status.Heartbeat.Add(10 * time.Second) }, false},
		"less room":         {func(n *api.Node) { n.Status.Disks[0].Available = 1 }, false},
		"a late heartbeat":  {func(n *api.Node) { n.Status.Heartbeat.Time = n.Status.Heartbeat.Add(time.Minute) }, true},
		"a disk is unready": {func(n *api.Node) { n.Status.Disks[0].Ready = false }, true},
		"another disk":      {func(n *api.Node) { n.Status.Disks[0].UID = "other" }, true},
		"no disk":           {func(n *api.Node) { n.Status.Disks = nil }, true},
	} {
		now := old.DeepCopy()
		c.change(now)
		if got := nodeChanged(old, now); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// lateVolumes is a cache that does not know the last change of a volume.
type lateVolumes struct {
	client.Client
	volume *api.Volume
}

func (c lateVolumes) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if v, ok := o.(*api.Volume); ok {
		c.volume.DeepCopyInto(v)
		return nil
	}
	return c.Client.Get(ctx, key, o, opts...)
}

// TestDroppedMemberIsNoSource: a replica that is no member any more is no source, although the cache is late. Its
// snapshot may be of another instant than the members'.
func TestDroppedMemberIsNoSource(t *testing.T) {
	w := newWorld(t)
	w.addNodes("n1", "n2")
	v := w.addVolume("v", "n1", "n2")
	w.addTarget("t")
	s := w.addSnapshot(v, "s")
	late := v.DeepCopy()
	apitest.EditStatus(w.Server, v, func(v *api.Volume) { v.Status.Members = []string{"v.n2"} })
	b := w.addBackup("b", "v", s.Name)
	w.awaitSource("b", "n2") // so that the cache has the objects
	r := &backupReconciler{Client: lateVolumes{w.cached, late}, live: w.Client, log: w.Log, began: time.Now().Add(-time.Hour)}
	source, err := r.findSource(w.Ctx, r.Client, b)
	if err != nil || source.Node != "n2" {
		t.Errorf("source %+v, %v", source, err)
	}
}
