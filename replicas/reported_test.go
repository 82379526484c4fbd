package replicas

import (
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestReportedSnapshots: a snapshot was reported if the snapshot's object says so, for the same cut.
func TestReportedSnapshots(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v", 16*mib)
	s := w.snapshot("v", "s1")
	at, err := time.Parse(time.RFC3339Nano, s.Status.CreationTime)
	if err != nil {
		t.Fatal(err)
	}
	cut := stack.Snapshot{UID: string(s.Status.UID), Name: "s1", Created: at}
	ask := func(k stack.Snapshot) (bool, error) { return w.data.snapshots.Reported(w.ctx, "v", k) }
	for name, c := range map[string]struct {
		change func(*stack.Snapshot)
		want   bool
	}{
		"as reported": {func(*stack.Snapshot) {}, true},
		"another try": {func(k *stack.Snapshot) { k.Created = at.Add(time.Second) }, false},
		"another uid": {func(k *stack.Snapshot) { k.UID = string(api.NewUID()) }, false},
		"no object":   {func(k *stack.Snapshot) { k.Name = "s2" }, false},
	} {
		k := cut
		c.change(&k)
		if is, err := ask(k); err != nil || is != c.want {
			t.Errorf("%s: %v, %v", name, is, err)
		}
	}
	if is, err := w.data.snapshots.Reported(w.ctx, "other", cut); err != nil || is {
		t.Errorf("of another volume: %v, %v", is, err)
	}
}
