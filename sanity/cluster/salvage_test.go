package cluster

import (
	"os/exec"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestSalvage: a volume without a current replica waits; only a user's salvage takes a stale replica, and a replica
// that returns later is resynced from the salvaged replica.
func TestSalvage(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	l := newLoaded(t, c, "v", 64<<20, 2)
	var v api.Volume
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &v))
	at := map[string]*Machine{}
	for _, m := range c.Nodes {
		at[m.Name] = m
	}
	var r api.Replica
	var have []*Machine
	for _, name := range v.Status.Members {
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: name}, &r))
		have = append(have, at[r.Spec.Node])
		delete(at, r.Spec.Node)
	}
	var user *Machine
	for _, m := range at {
		user = m
	}
	old, last := have[0], have[1]
	l.attach(user)
	l.works(200)
	l.halt()
	awaitVolume(t, c, "v", "whole", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustHealthy })
	mark := l.load.Mark()
	must(t, old.PowerOff())
	awaitVolume(t, c, "v", "degraded", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
	l.begin()
	l.works(200)
	must(t, c.Set(t.Context(), "all-replicas-lost-timeout", "2"))
	must(t, last.PowerOff())
	if err := <-l.ended; err == nil { // the setting says that I/O fails after 2 s
		t.Fatal("I/O went on without a replica")
	}
	l.stop()
	must(t, c.Set(t.Context(), "all-replicas-lost-timeout", "0"))
	c.command(t, "volume", "detach", "v", "--force")
	must(t, old.PowerOn())
	must(t, old.Serve(t.Context()))

	// The volume does not attach: no current replica exists.
	out, err := exec.CommandContext(t.Context(), program, "volume", "attach", "v", "--node", user.Name, "--kubeconfig",
		c.Kubeconfig, "--timeout", "8s").CombinedOutput()
	if err == nil {
		t.Fatalf("a volume without a current replica was attached: %s", out)
	}
	c.command(t, "volume", "detach", "v", "--force")
	var stale string
	awaitVolume(t, c, "v", "without a member", func(v *api.Volume) bool {
		return v.Status.Robustness == api.RobustUnknown || v.Status.Robustness == api.RobustFaulted
	})
	eventually(t, "the old replica says what it has", func() bool {
		reps := replicasOf(t, c, "v")
		stale = reps[old.Name].Name
		return reps[old.Name].Status.Mode == api.ReplicaStale && reps[old.Name].Status.LastWrite != nil
	})
	list := c.command(t, "volume", "salvage", "v")
	if !strings.Contains(list, "--replica "+stale+" --yes") {
		t.Errorf("salvage proposes:\n%s", list)
	}
	t.Logf("\n%s", list)
	t.Log(c.command(t, "volume", "salvage", "v", "--replica", stale, "--yes"))
	c.attach(t, "v", user.Name)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &a))
	l.device = a.Status.Device
	l.load.Rewind(mark)
	must(t, l.load.Verify(l.device, true)) // as of the old replica's last current state, or later
	l.begin()
	l.works(100)

	// The replica with newer writes returns, and is resynced from the salvaged replica.
	must(t, last.PowerOn())
	must(t, last.Serve(t.Context()))
	awaitVolume(t, c, "v", "whole", func(v *api.Volume) bool { return v.Status.Robustness == api.RobustHealthy })
	l.halt()
	c.detach(t, "v")
	must(t, old.PowerOff())
	l.attach(last)
	l.works(20)
	l.halt()
	c.detach(t, "v")
	var again strings.Builder
	cmd := exec.CommandContext(t.Context(), program, "volume", "salvage", "v", "--yes", "--kubeconfig", c.Kubeconfig)
	cmd.Stderr = &again
	if err := cmd.Run(); err == nil || !strings.Contains(again.String(), "needs no salvage") {
		t.Errorf("a volume that can be used was salvaged: %v, %s", err, again.String())
	}
}
