package attach

import (
	"context"
	"encoding/json"
	"path/filepath"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/stack"
)

// TestSwapOfADeadProcess: once the successor of a dead process has asked the API, the successor has found the dead
// process's swap, or the API refuses the swap from then on.
func TestSwapOfADeadProcess(t *testing.T) {
	server := apitest.Start(t)
	as := attachmentsWithoutAPI(t)
	as.reach(server)
	v := volumeOf(server, "v")
	ask := func() (blob, *api.Volume) {
		apitest.EditStatus(server, v, func(v *api.Volume) { v.Status.EngineNode = as.Name })
		late := v.DeepCopy()
		late.Status.Epoch++
		late.Status.Members = append(late.Status.Members, "joining")
		return blob{Volume: "v", VolumeUID: v.Status.UID, Now: v.Status.Epoch, Next: v.Status.Epoch + 1,
			Members: []memberSpec{{Name: v.Status.Members[0]}}, Joining: &memberSpec{Name: "joining"}}, late
	}
	b, late := ask()
	if err := as.resolveSwap(server.Ctx, &b); err != nil {
		t.Fatal(err)
	}
	if len(b.Members) != 1 || b.Next != 0 || b.Joining != nil {
		t.Errorf("the swap was not made, and is found: %+v", b)
	}
	if err := server.Client.Status().Update(server.Ctx, late); !apierrors.IsConflict(err) {
		t.Fatalf("the swap is made after the successor has asked: %v", err)
	}
	now := server.AwaitVolume("v", "there", func(*api.Volume) bool { return true })
	if now.Status.Epoch != b.Now {
		t.Errorf("epoch %d, the successor has %d", now.Status.Epoch, b.Now)
	}
	b, late = ask()
	if err := server.Client.Status().Update(server.Ctx, late); err != nil {
		t.Fatal(err)
	}
	if err := as.resolveSwap(server.Ctx, &b); err != nil {
		t.Fatal(err)
	}
	if len(b.Members) != 2 || b.Members[1].Name != "joining" || b.Now != late.Status.Epoch {
		t.Errorf("the swap was made, and is not found: %+v", b)
	}
}

// TestTheAPISaysWhoseTheVolumeIs: the current volume in the API answers the engine's question about the owner.
func TestTheAPISaysWhoseTheVolumeIs(t *testing.T) {
	server := apitest.Start(t)
	as := attachmentsWithoutAPI(t)
	as.Client, as.Reader = server.Client, server.Client
	v := volumeOf(server, "v")
	b := blob{Volume: "v", VolumeUID: v.Status.UID}
	if err := as.ownerOf(b)(server.Ctx, 6); !api.Is(err, api.Unavailable) {
		t.Errorf("without the API: %v", err)
	}
	as.ReachedAPI()
	for _, c := range []struct {
		node        string
		epoch, asks int64
		kind        api.Kind
	}{
		{as.Name, 7, 7, api.Other}, {as.Name, 8, 7, api.Other}, // the engine's own swap
		{as.Name, 9, 7, api.Denied}, {as.Name, 6, 7, api.Denied}, {"b", 7, 7, api.Denied}, {"", 7, 7, api.Denied},
	} {
		apitest.EditStatus(server, v, func(v *api.Volume) { v.Status.EngineNode, v.Status.Epoch = c.node, c.epoch })
		err := as.ownerOf(b)(server.Ctx, c.asks)
		if (err == nil) != (c.kind == api.Other) || err != nil && !api.Is(err, c.kind) {
			t.Errorf("the API names node %q in epoch %d, asked about epoch %d: %v", c.node, c.epoch, c.asks, err)
		}
	}
}

// TestBlobsAreKeptInTheirOrder: no older device record overtakes a newer record on the way to the holder.
func TestBlobsAreKeptInTheirOrder(t *testing.T) {
	suite.System(t)
	as := attachmentsWithoutAPI(t)
	ctx := context.Background()
	disk, err := stack.Add(ctx, filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	volume, uid := api.NewUID(), api.NewUID()
	err = disk.CreateReplica(ctx, stack.Spec{UID: string(uid), Volume: "v", VolumeUID: string(volume), Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := disk.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := as.openSession(ctx, blob{Volume: "v", VolumeUID: volume, Epoch: 3, Now: 3, Alone: true, Members: []memberSpec{
		{Name: "v-1", UID: uid, Node: as.Name, Disk: api.UID(disk.UID()), Path: disk.Path()}}}, 1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := s.deviceSpec()
	if err != nil {
		t.Fatal(err)
	}
	if s.dev, err = as.host.Attach(ctx, spec, s.loop.Loop, s.engine); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.dev.Detach(ctx); err != nil {
			t.Error(err)
		}
		if err := as.closeSession(s); err != nil {
			t.Error(err)
		}
	}()
	for range 100 {
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				s.membership.mu.Lock()
				s.Now++
				s.membership.mu.Unlock()
				if err := as.writeBlob(s); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		var b blob
		if err := json.Unmarshal(s.dev.Spec().Blob, &b); err != nil || b.Now != s.snapshotBlob().Now {
			t.Fatalf("%d is kept after %d was: %v", b.Now, s.snapshotBlob().Now, err)
		}
	}
}

// TestDropBeforeAPI: an engine that resumed before the node reached the API, and has to drop a member, is refused for
// now. The device record has no swap without a request to the API: the next process could not resume without the API.
func TestDropBeforeAPI(t *testing.T) {
	as := attachmentsWithoutAPI(t)
	b := blob{Volume: "v", VolumeUID: api.NewUID(), Epoch: 3, Now: 3,
		Members: []memberSpec{{Name: "v-1", UID: api.NewUID(), Node: "a"}, {Name: "v-2", UID: api.NewUID(), Node: "b"}}}
	thread, err := as.Threads.Pick()
	if err != nil {
		t.Fatal(err)
	}
	s := as.newSession(b, thread)
	if err := as.dropperOf(s)(context.Background(), 3, string(b.Members[1].UID)); !api.Is(err, api.Unavailable) {
		t.Errorf("a drop without the API: %v", err)
	}
	if now := s.snapshotBlob(); now.Next != 0 || len(now.Members) != 2 {
		t.Errorf("the device record: %+v", now)
	}
}

// TestNoSwapBeginsWithoutARecord: a process that ends hands over the devices before the end of the engines. A swap in
// between would have no record, and the next process would end the device as another engine's.
func TestNoSwapBeginsWithoutARecord(t *testing.T) {
	as := attachmentsWithoutAPI(t)
	thread, err := as.Threads.Pick()
	if err != nil {
		t.Fatal(err)
	}
	s := as.newSession(blob{Volume: "v", VolumeUID: api.NewUID(), Now: 5}, thread)
	if err := as.recordProposal(s, 6, nil); err != nil {
		t.Fatal(err)
	}
	as.recordSwap(s, 6, func(*blob) {})
	s.membership.endSwaps()
	if err := as.recordProposal(s, 7, nil); !api.Is(err, api.Unavailable) {
		t.Errorf("a swap of a process that ends: %v", err)
	}
	if s.askedEpoch() != 6 || s.Next != 0 {
		t.Errorf("the session has asked for epoch %d, and waits for the outcome of %d", s.askedEpoch(), s.Next)
	}
}
