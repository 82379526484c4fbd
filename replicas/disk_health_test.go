package replicas

import (
	"os"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// TestReplicaOnDeadDiskIsNotCurrent: a live node cannot use the disk of a member. The member is not current, the
// volume says so, and another replica can be salvaged.
func TestReplicaOnDeadDiskIsNotCurrent(t *testing.T) {
	t.Parallel()
	w, disk := twoDisks(t)
	v := volume("v", 16*mib)
	v.Spec.NumberOfReplicas, v.Spec.ReplicaSoftAntiAffinity = 2, "enabled"
	w.create(v)
	now := w.volumeIs("v", "whole", func(v *api.Volume) bool {
		return v.Status.State == api.VolumeDetached && len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	on := map[api.UID]string{}
	for _, name := range now.Status.Members {
		var r api.Replica
		if err := w.c.Get(w.ctx, clientKey(name), &r); err != nil {
			t.Fatal(err)
		}
		on[r.Spec.Disk] = name
	}
	// The planner takes a wish to leave back once the wish has no reason any more.
	r := &api.Replica{ObjectMeta: named(on[disk["near"]])}
	edit(w, r, func(r *api.Replica) { r.Spec.Leave = true })
	await(w, r, &api.ReplicaList{}, "to stay", func(r *api.Replica) bool { return !r.Spec.Leave })

	lost, left := on[disk["far"]], on[disk["near"]]
	far, err := w.disks.Get(disk["far"])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(far.Path(), far.Path()+".away"); err != nil {
		t.Fatal(err)
	}
	w.volumeIs("v", "degraded", func(v *api.Volume) bool {
		return v.Status.Robustness == api.RobustDegraded && strings.Contains(v.Status.Message, "is not ready")
	})
	// As if the replica had been the last current replica.
	editStatus(w, v, func(v *api.Volume) { v.Status.Members = []string{lost} })
	w.volumeIs("v", "without a member", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustFaulted })
	edit(w, v, func(v *api.Volume) { v.Spec.Salvage = &api.SalvageWish{Replica: lost, ID: "1"} })
	w.volumeIs("v", "not salvaged", func(v *api.Volume) bool {
		s := v.Status.Salvaged
		return s != nil && s.ID == "1" && !s.Done && strings.Contains(s.Message, "its disk is not ready")
	})
	edit(w, v, func(v *api.Volume) { v.Spec.Salvage = &api.SalvageWish{Replica: left, ID: "2"} })
	w.volumeIs("v", "salvaged", func(v *api.Volume) bool {
		s := v.Status.Salvaged
		return s != nil && s.ID == "2" && s.Done && len(v.Status.Members) == 1 && v.Status.Members[0] == left
	})
	if err := os.Rename(far.Path()+".away", far.Path()); err != nil {
		t.Fatal(err)
	}
}
