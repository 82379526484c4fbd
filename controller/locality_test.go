package controller

import (
	"context"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"drover.io/drover/api"
)

// TestStrictLocal: a strict-local volume has a single replica and is accessible on the replica's node alone; any other
// volume is accessible everywhere.
func TestStrictLocal(t *testing.T) {
	for _, n := range []string{"strict-a", "strict-b"} {
		node := &api.Node{}
		node.Name = n
		must(t, store.Create(t.Context(), node))
		t.Cleanup(func() { must(t, store.Delete(context.Background(), node)) })
	}
	loops(t, func(v *api.Volume) { // the planner: a replica on the preferred node
		if v.Spec.DataLocality != "strict-local" && v.Spec.DataLocality != "best-effort" || len(v.Status.Members) > 0 {
			ready(t)(v)
			return
		}
		node := v.Annotations[api.AnnotationPrefer]
		if node == "" && len(v.Spec.Nodes) > 0 {
			node = v.Spec.Nodes[0]
		}
		r := &api.Replica{Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: v.Name, Node: node}}
		r.Name, r.Labels = v.Name+".1", map[string]string{api.LabelVolume: v.Name}
		if err := store.Create(t.Context(), r); err != nil {
			return
		}
		v.Status.Members = []string{r.Name}
		ready(t)(v)
	}, attached(t))
	term := func(n string) *csi.Topology { return &csi.Topology{Segments: map[string]string{api.TopologyNode: n}} }
	ask := func(name string, kv ...string) *csi.CreateVolumeRequest {
		r := request(name)
		r.Parameters = map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			r.Parameters[kv[i]] = kv[i+1]
		}
		// As the provisioner asks for a first consumer on strict-b.
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{term("strict-a"), term("strict-b")},
			Preferred: []*csi.Topology{term("strict-b"), term("strict-a")}}
		return r
	}
	_, err := door.CreateVolume(t.Context(), ask("strict-two", "dataLocality", "strict-local", "numberOfReplicas", "2"))
	wantKind(t, err, api.Invalid, "strict-local", "numberOfReplicas")
	v, err := door.CreateVolume(t.Context(), ask("strict-one", "dataLocality", "strict-local"))
	must(t, err)
	if at := v.Volume.AccessibleTopology; len(at) != 1 || at[0].Segments[api.TopologyNode] != "strict-b" {
		t.Errorf("a strict-local volume is accessible from %v", at)
	}
	id := v.Volume.VolumeId
	publish := func(id, node string) error {
		_, err := door.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node,
			VolumeCapability: request("x").VolumeCapabilities[0]})
		return err
	}
	wantKind(t, publish(id, "strict-a"), api.InUse, "strict-local", "strict-b")
	must(t, publish(id, "strict-b"))
	modify := func(id, key, value string) error {
		_, err := door.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: id,
			MutableParameters: map[string]string{key: value}})
		return err
	}
	wantKind(t, modify(id, "numberOfReplicas", "2"), api.Invalid, "strict-local")
	must(t, modify(id, "dataLocality", "best-effort"))
	must(t, modify(id, "dataLocality", "strict-local")) // the attachment is on the replica's node

	v, err = door.CreateVolume(t.Context(), ask("strict-not", "dataLocality", "best-effort", "replicaAutoBalance", "least-effort"))
	must(t, err)
	if at := v.Volume.AccessibleTopology; len(at) != 0 {
		t.Errorf("a volume that can be used anywhere is accessible from %v", at)
	}
	vol, err := door.readVolume(t.Context(), v.Volume.VolumeId)
	must(t, err)
	if vol.Spec.Nodes != nil && slices.Contains(nodeNames(t), "strict-a") && len(nodeNames(t)) == 2 {
		t.Errorf("all nodes that there are keep it from those to come: %v", vol.Spec.Nodes)
	}
	if vol.Spec.ReplicaAutoBalance != "least-effort" {
		t.Errorf("spec %+v", vol.Spec)
	}
	must(t, publish(vol.Name, "strict-a"))
	wantKind(t, modify(vol.Name, "dataLocality", "strict-local"), api.InUse, "strict-b")
	must(t, modify(vol.Name, "replicaAutoBalance", "best-effort"))
	wantKind(t, modify(vol.Name, "replicaAutoBalance", "always"), api.Invalid, "least-effort")
	if vol, err = door.readVolume(t.Context(), vol.Name); err != nil || vol.Spec.ReplicaAutoBalance != "best-effort" {
		t.Errorf("modified: %+v, %v", vol, err)
	}
}

func nodeNames(t *testing.T) (names []string) {
	t.Helper()
	var list api.NodeList
	must(t, store.List(t.Context(), &list))
	for _, n := range list.Items {
		names = append(names, n.Name)
	}
	return names
}
