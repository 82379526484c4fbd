package remote

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/listener"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// oneVolume is an API with one volume and the volume's replica on this node.
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
	return apierrors.NewNotFound(schema.GroupResource{}, "v")
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

// TestFormerEngineIsRefused: the node of a detached volume's former engine cannot open a session in the epoch that
// the replica adopted from this engine, also if the controller has begun a later epoch without an engine, as a drop of
// a replica does. The node may return in a session that the API names, also while the cache is behind.
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
		refusals: map[string]*listener.Tally{}, events: events.NewFakeRecorder(16), questions: map[string]chan struct{}{},
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
		{"detached, in a later epoch", 7, "", api.Denied, false},
		{"the cache is behind", 4, "", 0, true},
	} {
		has.v.Status.Epoch, has.v.Status.EngineNode = c.epoch, c.engine
		for what, err := range map[string]error{
			"a session": s.AllowSession(t.Context(), "c", uid, volume, 5),
			"an open":   s.AllowOpen(t.Context(), "c", uid, volume),
		} {
			if c.ok && err != nil || !c.ok && !api.Is(err, c.kind) {
				t.Errorf("%s: %s: %v", c.name, what, err)
			}
		}
	}
}

// slowReader counts the questions to the API at the same time.
type slowReader struct {
	*oneVolume
	now, most, all atomic.Int64
}

func (r *slowReader) Get(ctx context.Context, key client.ObjectKey, to client.Object, o ...client.GetOption) error {
	n := r.now.Add(1)
	defer r.now.Add(-1)
	for most := r.most.Load(); n > most && !r.most.CompareAndSwap(most, n); most = r.most.Load() {
	}
	r.all.Add(1)
	late := time.NewTimer(time.Millisecond)
	<-late.C
	return r.oneVolume.Get(ctx, key, to, o...)
}

// TestQuestionsAreBounded: a node, not named by the API, asks for a replica a thousand times at once. The API gets a
// bounded number of questions at the same time.
func TestQuestionsAreBounded(t *testing.T) {
	uid, volume := string(api.NewUID()), string(api.NewUID())
	has := &oneVolume{}
	has.v.Name, has.v.Status.UID = "v", api.UID(volume)
	has.r.Spec = api.ReplicaSpec{UID: api.UID(uid), Volume: "v", VolumeUID: api.UID(volume), Node: "a"}
	slow := &slowReader{oneVolume: has}
	s, err := New(Options{Node: "a", Host: reachedNode{}, Log: slog.New(slog.DiscardHandler),
		Places: NewPlaces("", slog.Default()), Disks: disks.NewRegistry(disks.RegistryOptions{}), Watch: engine.NewWatch()})
	if err != nil {
		t.Fatal(err)
	}
	s.Use(has, slow, events.NewFakeRecorder(16))
	var wg sync.WaitGroup
	for range 1000 {
		wg.Go(func() {
			if err := s.AllowOpen(t.Context(), "c", uid, volume); !api.Is(err, api.Denied) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if slow.most.Load() > questionsAtOnce {
		t.Errorf("%d questions of %d at once", slow.most.Load(), slow.all.Load())
	}
}

// TestFormerSessionIsEnded: an engine keeps a session after the detach of the volume. The replica's node ends the
// session, and the engine can no longer read.
func TestFormerSessionIsEnded(t *testing.T) {
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
	has := &oneVolume{}
	has.v.Name, has.v.Status.UID, has.v.Status.Epoch, has.v.Status.EngineNode = "v", api.UID(volume), 5, "c"
	has.r.Spec = api.ReplicaSpec{UID: api.UID(uid), Volume: "v", VolumeUID: api.UID(volume), Node: "a"}
	log := slog.New(slog.DiscardHandler)
	s, err := New(Options{Node: "a", Host: reachedNode{}, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	s.Use(has, has, events.NewFakeRecorder(16))
	open := func(ctx context.Context, _, _ string) (peer.Replica, peer.Loop, error) {
		rep, err := disk.OpenReplica(ctx, uid, loop)
		if err != nil {
			return nil, nil, err
		}
		b := peer.NewBackend(rep, loop)
		s.mu.Lock()
		s.open[api.UID(uid)] = &Served{Backend: b, volume: "v"}
		s.mu.Unlock()
		return b, loop, nil
	}
	if s.server, err = peer.NewServer(peer.ServerOptions{Node: "a", Open: open, Allow: s.AllowSession, Log: log}); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.server.Serve(ln) }()
	d := &peer.Dialer{Node: "c", Address: func(context.Context, string) (string, error) { return ln.Addr().String(), nil }}
	m := d.Member(peer.Options{Node: "a", Replica: uid, Volume: volume, Loop: loop})
	if err := m.Adopt(t.Context(), 5, 1, []string{uid}); err != nil {
		t.Fatal(err)
	}
	read := func() error {
		_, err := m.Digests(t.Context(), 0, 4096)
		return err
	}
	s.releaseFormer(t.Context())
	if err := read(); err != nil {
		t.Errorf("the engine that the API names: %v", err)
	}
	has.v.Status.EngineNode = ""
	s.releaseFormer(t.Context())
	if err := read(); !api.Is(err, api.Denied) {
		t.Errorf("the former engine: %v", err)
	}
	_ = m.Close()
	d.Close()
	s.server.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
	loop.Close()
	<-ended
	_ = disk.Close()
}
