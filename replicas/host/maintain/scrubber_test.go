package maintain

import (
	"log/slog"
	"testing"
	"time"

	"k8s.io/client-go/tools/events"

	"drover.io/drover/api"
)

// TestRepairBetweenAScrubAndItsReport: a repair removes damage after a scrub found the damage, and before the scrubber
// reports the scrub. In the end the replica's status has no damage.
func TestRepairBetweenAScrubAndItsReport(t *testing.T) {
	disk := frozen(t, 1)
	defer disk.Close()
	list, err := disk.Replicas()
	if err != nil || len(list) != 1 {
		t.Fatalf("replicas %v, %v", list, err)
	}
	r := &api.Replica{Spec: api.ReplicaSpec{UID: api.UID(list[0].UID), Volume: "v"}}
	s := NewScrubber(&fakeNode{}, "n", nil, slog.New(slog.DiscardHandler))
	s.Use(nil, events.NewFakeRecorder(10))
	s.Reconcile(t.Context(), r, disk)
	s.found[r.Spec.UID] = &scrubFound{at: time.Now(),
		damage: []api.LayerDamage{{Layer: api.UID(list[0].Layers[0]), Offset: 0, Length: 2 << 20}}} // the disk's record is empty
	s.Reconcile(t.Context(), r, disk)
	if len(r.Status.Damage) != 1 || r.Status.LastScrubbed == nil {
		t.Fatalf("the findings are not reported: %+v", r.Status)
	}
	s.Reconcile(t.Context(), r, disk) // the status has the findings
	if len(r.Status.Damage) > 0 {
		t.Errorf("the status has the damage of before the repair: %v", r.Status.Damage)
	}
}
