package remote

import (
	"context"
	"log/slog"
	"testing"

	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/listener"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// oneVolume is an API with one volume and its replica on this node.
type oneVolume struct {
	client.Client
	v api.Volume
	r api.Replica
}

func (o *oneVolume) Get(_ context.Context, _ client.ObjectKey, to client.Object, _ ...client.GetOption) error {
	if v, is := to.(*api.Volume); is {
		o.v.DeepCopyInto(v)
		return nil
	}
	return api.Errorf(api.NotFound, "it does not exist")
}

func (o *oneVolume) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	if l, is := list.(*api.ReplicaList); is {
		l.Items = []api.Replica{o.r}
	}
	return nil
}

// reachedNode has reached the API.
type reachedNode struct{ Node }

func (reachedNode) APIReached() bool { return true }

// TestFormerEngineIsRefused: the node of the former engine of a detached volume cannot come back in the epoch that the
// replica adopted from it. In a session that the API names it comes back, also while the cache is behind.
func TestFormerEngineIsRefused(t *testing.T) {
	disk, err := stack.Add(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	loop, err := uring.New(16)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- loop.Run() }()
	uid, volume := string(api.NewUID()), string(api.NewUID())
	spec := stack.Spec{UID: uid, Volume: "v", VolumeUID: volume, Size: 1 << 20}
	if err := disk.CreateReplica(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	rep, err := disk.OpenReplica(t.Context(), uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := rep.Close(); err != nil {
			t.Error(err)
		}
		loop.Close()
		<-ended
		_ = disk.Close()
	}()
	if err := rep.AdoptFor(t.Context(), "c", 5, 1, []string{uid}); err != nil {
		t.Fatal(err)
	}
	has := &oneVolume{}
	has.v.Name, has.v.Status.UID, has.v.Status.Epoch = "v", api.UID(volume), 5
	has.r.Spec = api.ReplicaSpec{UID: api.UID(uid), Volume: "v", VolumeUID: api.UID(volume), Node: "a"}
	s := &Server{o: Options{Node: "a", Host: reachedNode{}, Log: slog.New(slog.DiscardHandler)}, client: has, reader: has,
		refusals: map[string]*listener.Tally{}, events: events.NewFakeRecorder(16),
		open: map[api.UID]*Served{api.UID(uid): {Backend: peer.NewBackend(rep, loop), volume: "v"}}}
	for _, c := range []struct {
		name   string
		epoch  int64
		engine string
		kind   api.Kind
		ok     bool
	}{
		{"attached", 5, "c", 0, true},
		{"detached", 5, "", api.Denied, false},
		{"attached elsewhere", 6, "b", api.Denied, false},
		{"the cache is behind", 4, "", 0, true},
	} {
		has.v.Status.Epoch, has.v.Status.EngineNode = c.epoch, c.engine
		err := s.AllowSession(t.Context(), "c", uid, volume, 5)
		if c.ok && err != nil || !c.ok && !api.Is(err, c.kind) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}
