package planner

import (
	"fmt"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

const gib = int64(1) << 30

// field has two nodes with two disks each, a0 a1 on a and b0 b1 on b, of 100 GiB each.
func field() clusterView {
	t := clusterView{copies: map[api.UID]api.ImageState{}, overPct: 200, minFreePc: 10}
	for _, name := range []string{"a", "b"} {
		n := api.Node{}
		n.Name = name
		n.Spec.Tags = []string{"rack-" + name}
		for i := range 2 {
			path := fmt.Sprintf("/%s%d", name, i)
			n.Spec.Disks = append(n.Spec.Disks, api.DiskSpec{Path: path, Tags: []string{fmt.Sprint("t", i)}})
			n.Status.Disks = append(n.Status.Disks, api.DiskStatus{Path: path, UID: api.UID(path[1:]), Ready: true,
				Capacity: 100 * gib, Available: 90 * gib})
		}
		t.nodes = append(t.nodes, n)
	}
	t.promised = func(api.UID) int64 { return 0 }
	return t
}

// zones puts a and b into one zone, and adds c in another zone.
func zones(f *clusterView) {
	c := *f.nodes[1].DeepCopy()
	c.Name = "c"
	for i := range c.Spec.Disks {
		c.Spec.Disks[i].Path = fmt.Sprint("/c", i)
		c.Status.Disks[i].Path, c.Status.Disks[i].UID = fmt.Sprint("/c", i), api.UID(fmt.Sprint("c", i))
	}
	f.nodes = append(f.nodes, c)
	for i, zone := range []string{"east", "east", "west"} {
		f.nodes[i].Labels = map[string]string{api.LabelZone: zone}
	}
}

func TestPlace(t *testing.T) {
	off := false
	for name, c := range map[string]struct {
		change func(*api.Volume, *clusterView)
		want   api.UID // or
		why    []string
	}{
		"first of equals": {func(*api.Volume, *clusterView) {}, "a0", nil},
		"most room": {func(_ *api.Volume, f *clusterView) {
			f.promised = func(d api.UID) int64 {
				if d == "b1" {
					return 0
				}
				return gib
			}
		}, "b1", nil},
		"disk tag": {func(v *api.Volume, _ *clusterView) { v.Spec.DiskSelector = []string{"t1"} }, "a1", nil},
		"node tag": {func(v *api.Volume, _ *clusterView) { v.Spec.NodeSelector = []string{"rack-b"} }, "b0", nil},
		"disk tag of the image": {func(_ *api.Volume, f *clusterView) {
			f.image = &api.BackingImage{ObjectMeta: apitest.Named("debian"), Spec: api.BackingImageSpec{DiskSelector: []string{"t1"}}}
		}, "a1", nil},
		"node tag of the image": {func(_ *api.Volume, f *clusterView) {
			f.image = &api.BackingImage{ObjectMeta: apitest.Named("debian"), Spec: api.BackingImageSpec{NodeSelector: []string{"rack-b"}}}
		}, "b0", nil},
		"the volume's tags and the image's": {func(v *api.Volume, f *clusterView) {
			v.Spec.DiskSelector, v.Spec.NodeSelector = []string{"t0"}, []string{"rack-a"}
			f.image = &api.BackingImage{ObjectMeta: apitest.Named("debian"), Spec: api.BackingImageSpec{
				DiskSelector: []string{"t1"}, NodeSelector: []string{"rack-a"}}}
		}, "", []string{"disk /a0 of node a: it lacks the tag t1, which backing image debian asks for",
			"disk /a1 of node a: it lacks the tag t0", "node b: it lacks the tag rack-a"}},
		"topology":   {func(v *api.Volume, _ *clusterView) { v.Spec.Nodes = []string{"b"} }, "b0", nil},
		"image":      {func(_ *api.Volume, f *clusterView) { f.copies["b1"] = api.ImageReady }, "b1", nil},
		"image soon": {func(_ *api.Volume, f *clusterView) { f.copies["a1"] = api.ImageInProgress }, "a1", nil},
		"image ready beats image soon": {func(_ *api.Volume, f *clusterView) {
			f.copies["a1"], f.copies["b0"] = api.ImageInProgress, api.ImageReady
		}, "b0", nil},
		"failed copy is none": {func(_ *api.Volume, f *clusterView) { f.copies["b1"] = api.ImageFailed }, "a0", nil},
		"other node first": {func(_ *api.Volume, f *clusterView) {
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a1"}}}
		}, "b0", nil},
		"one node is not enough": {func(v *api.Volume, f *clusterView) {
			v.Spec.Nodes = []string{"a"}
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "", []string{"disk /a1 of node a: the node has a replica of the volume already",
			"replica-soft-anti-affinity", "disk /a0 of node a: it has a replica", "replica-disk-soft-anti-affinity"}},
		"one that goes is no neighbour": {func(v *api.Volume, f *clusterView) {
			v.Spec.Nodes = []string{"a"}
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
			f.mine[0].Name = "v.1"
			f.leaving = []string{"v.1"}
			f.nodes[0].Spec.Disks[0].EvictionRequested = true
		}, "a1", nil},
		"other zone first": {func(_ *api.Volume, f *clusterView) {
			zones(f)
			f.softZone = true
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "c0", nil},
		"one zone is not enough": {func(v *api.Volume, f *clusterView) {
			zones(f)
			v.Spec.Nodes = []string{"a", "b"}
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "", []string{"zone east has a replica of the volume already", "replica-zone-soft-anti-affinity"}},
		"same zone where it must be": {func(v *api.Volume, f *clusterView) {
			zones(f)
			v.Spec.Nodes = []string{"a", "b"}
			f.softZone = true
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "b0", nil},
		"node is silent": {func(_ *api.Volume, f *clusterView) {
			f.silent = func(n string) bool { return n == "a" }
		}, "b0", nil},
		"all are silent": {func(_ *api.Volume, f *clusterView) { f.silent = func(string) bool { return true } }, "",
			[]string{"node a: it gives no sign of life"}},
		"on a node that has no room": {func(_ *api.Volume, f *clusterView) {
			f.on, f.promised = "b", func(d api.UID) int64 { return map[api.UID]int64{"b0": 500 * gib, "b1": 500 * gib}[d] }
		}, "", []string{"disk /b0 of node b: 500 GiB are promised"}},
		"for a while, whatever speaks against it": {func(v *api.Volume, f *clusterView) {
			f.transient, f.only, v.Spec.Nodes = true, "b1", []string{"a"}
			f.promised = func(api.UID) int64 { return 500 * gib }
		}, "b1", nil},
		"not on a disk that fails": {func(_ *api.Volume, f *clusterView) {
			f.transient, f.only = true, "b1"
			f.nodes[1].Status.Disks[1].Ready, f.nodes[1].Status.Disks[1].Message = false, "not mounted"
		}, "", []string{"not ready: not mounted"}},
		"node is evicted": {func(_ *api.Volume, f *clusterView) { f.nodes[0].Spec.EvictionRequested = true }, "b0", nil},
		"near":            {func(_ *api.Volume, f *clusterView) { f.prefer = "b" }, "b0", nil},
		"apart before near": {func(_ *api.Volume, f *clusterView) {
			f.prefer, f.softNode = "a", true
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "b0", nil},
		"same disk where it must be": {func(v *api.Volume, f *clusterView) {
			f.softNode, f.softDisk = true, true
			v.Spec.DiskSelector, v.Spec.Nodes = []string{"t0"}, []string{"a"}
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "a0", nil},
		"same node, other disk": {func(v *api.Volume, f *clusterView) {
			f.softNode = true
			v.Spec.Nodes = []string{"a"}
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "a1", nil},
		"never the same disk": {func(v *api.Volume, f *clusterView) {
			v.Spec.DiskSelector, v.Spec.Nodes = []string{"t0"}, []string{"a"}
			f.mine = []api.Replica{{Spec: api.ReplicaSpec{Node: "a", Disk: "a0"}}}
		}, "", []string{"has a replica of the volume already"}},
		"unschedulable": {func(_ *api.Volume, f *clusterView) {
			f.nodes[0].Spec.Schedulable = &off
			f.nodes[1].Spec.Disks[0].Schedulable = &off
		}, "b1", nil},
		"evicted": {func(_ *api.Volume, f *clusterView) { f.nodes[0].Spec.Disks[0].EvictionRequested = true }, "a1", nil},
		"nothing suits": {func(v *api.Volume, f *clusterView) {
			v.Spec.DiskSelector = []string{"nvme"}
			f.nodes[1].Status.Disks[0].Ready, f.nodes[1].Status.Disks[0].Message = false, "not mounted"
			f.nodes[0].Spec.Schedulable = &off
		}, "", []string{"node a: scheduling is turned off", "disk /b0 of node b: not ready: not mounted",
			"disk /b1 of node b: it lacks the tag nvme"}},
		"promised too much": {func(_ *api.Volume, f *clusterView) {
			f.promised = func(api.UID) int64 { return 191 * gib }
		}, "", []string{"191 GiB are promised to volumes and the limit is 200 GiB (200 % of 100 GiB"}},
		"the mount of a backup takes what is read": {func(v *api.Volume, f *clusterView) {
			f.promised = func(api.UID) int64 { return 191 * gib }
			v.Labels = map[string]string{api.LabelBackupMount: "b"}
		}, "a0", nil},
		"just enough": {func(_ *api.Volume, f *clusterView) { f.promised = func(api.UID) int64 { return 190 * gib } }, "a0", nil},
		"the reserve is not ours": {func(_ *api.Volume, f *clusterView) {
			for i := range f.nodes {
				for j := range f.nodes[i].Spec.Disks {
					f.nodes[i].Spec.Disks[j].ReservedBytes = 96 * gib
				}
			}
		}, "", []string{"the limit is 8 GiB"}},
		"nearly full": {func(_ *api.Volume, f *clusterView) { f.nodes[0].Status.Disks[0].Available = 9 * gib }, "a1", nil},
		"no nodes":    {func(_ *api.Volume, f *clusterView) { f.nodes = nil }, "", []string{"the cluster has no nodes"}},
		"no disks": {func(_ *api.Volume, f *clusterView) {
			f.nodes = f.nodes[:1]
			f.nodes[0].Spec.Disks = nil
		}, "", []string{"it has no disks, add one"}},
	} {
		f := field()
		v := apitest.Volume("v", 10*gib)
		c.change(v, &f)
		s, err := choosePlacement(v, f)
		if s.disk != c.want {
			t.Errorf("%s: %q, want %q (%v)", name, s.disk, c.want, err)
		}
		if (err != nil) != (c.want == "") || err != nil && !api.Is(err, api.Full) {
			t.Errorf("%s: %v", name, err)
		}
		for _, part := range c.why {
			if err == nil || !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v does not say %q", name, err, part)
			}
		}
	}
}
