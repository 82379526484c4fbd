package cluster

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

func whole(v *api.Volume) bool {
	return len(v.Status.Members) == 3 && v.Status.Robustness == api.RobustHealthy
}

// TestSnapshotsOfThree takes snapshots of a volume with three replicas under verified load, with kills of data
// processes at random moments of the cut. Each snapshot has, on every node, all writes acknowledged before the
// request, and no write issued after the snapshot was ready; clones on each node read each snapshot back.
func TestSnapshotsOfThree(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	seed := suite.Seed(t)
	r := rand.New(rand.NewPCG(seed, 2))
	const size = 32 << 20
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 3}}
	v.Name = "v"
	must(t, c.Objects.Create(t.Context(), v))
	awaitVolume(t, c, "v", "made", func(v *api.Volume) bool { return len(v.Status.Members) == 3 })
	c.attach(t, "v", c.Nodes[0].Name)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &a))
	awaitVolume(t, c, "v", "healthy", whole)
	load, ended := NewLoad(size, 8<<20), make(chan error, 1)
	load.Workers = 3
	load.Pace.Store(int64(min(pace, 20*time.Millisecond))) // each snapshot is taken between writes
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() { ended <- load.Run(ctx, a.Status.Device) }()

	kills := []struct {
		what string
		at   []*Machine
	}{
		{"nothing", nil},
		{"the engine's data process is killed", c.Nodes[:1]},
		{"a member's data process is killed", c.Nodes[1:2]},
		{"both other members' are", c.Nodes[1:]},
		{"all of them are", c.Nodes},
	}
	list := map[string]*Instant{}
	rounds := 1
	if suite.All() {
		rounds = 2
	}
	for n := range rounds * len(kills) {
		k, name := kills[n%len(kills)], fmt.Sprintf("s%d", n)
		wait := time.Duration(r.IntN(60)) * time.Millisecond
		i := load.Before()
		list[name] = i
		s := api.NewSnapshot(v, name)
		began := time.Now()
		must(t, c.Objects.Create(t.Context(), s))
		timer := time.NewTimer(wait)
		<-timer.C
		for _, m := range k.at {
			kill(t, m, "data")
		}
		_, err := await.Until(soon(t), c.Objects, name, func(s *api.Snapshot) (bool, error) { return s.Status.ReadyToUse, nil })
		must(t, err)
		load.After(i)
		t.Logf("snapshot %s, %s after %v: ready after %v", name, k.what, wait, time.Since(began).Round(time.Millisecond))
	}
	c.command(t, "snapshot", "delete", "s3")
	delete(list, "s3")
	select {
	case err := <-ended:
		t.Fatal(err)
	default:
	}
	awaitVolume(t, c, "v", "healthy", whole)
	stop()
	must(t, errors.Join(<-ended, load.Verify(a.Status.Device, false)))
	t.Logf("%d writes, longest request %v", load.Writes(), load.Worst())
	c.detach(t, "v")
	must(t, c.connect())
	for name, i := range list {
		clone := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 3, DataSource: "snap://v/" + name}}
		clone.Name = "of-" + name
		must(t, c.Objects.Create(t.Context(), clone))
		awaitVolume(t, c, clone.Name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == 3 })
		for _, m := range c.Nodes { // the node's own replica serves the reads
			c.attach(t, clone.Name, m.Name)
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: clone.Name}, &a))
			if err := i.Verify(a.Status.Device); err != nil {
				t.Errorf("snapshot %s on %s: %v", name, m.Name, err)
			}
			c.detach(t, clone.Name)
		}
	}
}

// TestSnapshotOfALostEngine powers the engine's machine off in the middle of a snapshot. The volume is attached
// elsewhere; then the snapshot exists, with the same data on the remaining nodes.
func TestSnapshotOfALostEngine(t *testing.T) {
	c := start(t, Options{Nodes: 3})
	r := rand.New(rand.NewPCG(suite.Seed(t), 3))
	const size = 32 << 20
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 3}}
	v.Name = "v"
	must(t, c.Objects.Create(t.Context(), v))
	awaitVolume(t, c, "v", "made", func(v *api.Volume) bool { return len(v.Status.Members) == 3 })
	c.attach(t, "v", c.Nodes[0].Name)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &a))
	awaitVolume(t, c, "v", "healthy", whole)
	load, ended := NewLoad(size, 8<<20), make(chan error, 1)
	go func() { ended <- load.Run(t.Context(), a.Status.Device) }()
	first := load.Before()
	c.command(t, "snapshot", "create", "v", "first")
	load.After(first)
	i := load.Before()
	must(t, c.Objects.Create(t.Context(), api.NewSnapshot(v, "cut")))
	timer := time.NewTimer(time.Duration(r.IntN(30)) * time.Millisecond)
	<-timer.C
	must(t, c.Nodes[0].PowerOff())
	<-ended // the device is gone
	load.After(i)
	must(t, c.Objects.Delete(t.Context(), &a))
	awaitVolume(t, c, "v", "detached", func(v *api.Volume) bool { return v.Status.State == api.VolumeDetached })
	c.attach(t, "v", c.Nodes[1].Name)
	_, err := await.Until(soon(t), c.Objects, "cut", func(s *api.Snapshot) (bool, error) { return s.Status.ReadyToUse, nil })
	must(t, err)
	c.detach(t, "v")
	for name, i := range map[string]*Instant{"first": first, "cut": i} {
		clone := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 2, DataSource: "snap://v/" + name}}
		clone.Name = "of-" + name
		must(t, c.Objects.Create(t.Context(), clone))
		awaitVolume(t, c, clone.Name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == 2 })
		for _, m := range c.Nodes[1:] {
			c.attach(t, clone.Name, m.Name)
			must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: clone.Name}, &a))
			if err := i.Verify(a.Status.Device); err != nil {
				t.Errorf("snapshot %s on %s: %v", name, m.Name, err)
			}
			c.detach(t, clone.Name)
		}
	}
}
