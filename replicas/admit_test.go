package replicas

import (
	"context"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/peer"
)

// replicaOn is the replica of a volume on a node.
func (w *world) replicaOn(volume, node string) *api.Replica {
	w.t.Helper()
	var list api.ReplicaList
	if err := w.c.List(w.ctx, &list); err != nil {
		w.t.Fatal(err)
	}
	for i := range list.Items {
		if r := &list.Items[i]; r.Spec.Volume == volume && r.Spec.Node == node {
			return r
		}
	}
	w.t.Fatalf("volume %s has no replica on node %s", volume, node)
	return nil
}

// asks is a node's client of a replica on another node.
func (o *other) asks(r *api.Replica) *peer.Member {
	o.w.t.Helper()
	thread, err := o.data.Threads.Pick()
	if err != nil {
		o.w.t.Fatal(err)
	}
	m, err := o.data.remote.Member(peer.Options{Node: r.Spec.Node, Replica: string(r.Spec.UID),
		Volume: string(r.Spec.VolumeUID), Loop: thread})
	if err != nil {
		o.w.t.Fatal(err)
	}
	o.w.t.Cleanup(func() { _ = m.Close() })
	return m
}

// TestThirdNodeIsRefused: a node without engine, replica and attachment of a volume may not probe a replica of the
// volume, and no replica adopts a session of the node, whatever epoch the node names. The node of another replica may
// probe. The engine's device continues, and the volume stays healthy.
func TestThirdNodeIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	list := w.three()
	a, b, c := list[0], list[1], list[2]
	v := volume("v", 32<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	dev := w.attachTo("a", "v")
	is := func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	}
	now := w.volumeIs("v", "healthy", is)
	w.fill("v", "mine", 8<<20)
	r := w.replicaOn("v", "c")
	if _, _, err := b.asks(r).Probe(w.ctx); !api.Is(err, api.Denied) {
		t.Errorf("a third node learns what the replica is: %v", err)
	}
	if _, _, err := c.asks(w.replicaOn("v", "a")).Probe(w.ctx); err != nil && !api.Is(err, api.Busy) {
		t.Errorf("the node of a member does not learn what another one is: %v", err)
	}
	epoch := now.Status.Epoch
	for _, at := range []int64{epoch - 1, epoch, epoch + 1, epoch + 1000} {
		if err := b.asks(r).Adopt(w.ctx, at, 1<<40, []string{string(r.Spec.UID)}); !api.Is(err, api.Denied) {
			t.Errorf("a third node takes the replica over in epoch %d of %d: %v", at, epoch, err)
		}
		// Past the first check: the second check asks the API, too.
		if err := c.data.remote.AllowSession(w.ctx, "b", string(r.Spec.UID), string(r.Spec.VolumeUID), at); err == nil ||
			at <= epoch && !api.Is(err, api.Denied) {
			t.Errorf("the session of a third node is allowed in epoch %d of %d: %v", at, epoch, err)
		}
	}
	w.tells("v", "AdoptionRefused", "node b")
	w.sh("dd if=/dev/urandom of=" + dev + " bs=1M count=8 oflag=direct conv=notrunc status=none")
	w.reads("v", 8<<20, "mine")
	if now := w.volumeIs("v", "healthy still", is); now.Status.Epoch != epoch {
		t.Errorf("the volume is at epoch %d, it was at %d", now.Status.Epoch, epoch)
	}
	if a.data.attachments.Session("v").Fenced() != nil {
		t.Error("the engine was fenced")
	}
	w.detachFrom("v")
	if _, _, err := b.asks(r).Probe(w.ctx); !api.Is(err, api.Denied) {
		t.Errorf("a third node learns what a detached replica is: %v", err)
	}
	if err := b.asks(r).Adopt(w.ctx, epoch, 1<<40, []string{string(r.Spec.UID)}); !api.Is(err, api.Denied) {
		t.Errorf("a third node takes a detached replica over: %v", err)
	}
}

// TestResumesWithoutTheAPI: after a restart without the API, a replica's process admits the engine whose session the
// replica had adopted, and no other engine.
func TestResumesWithoutTheAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	list := w.three()
	a, c := list[0], list[2]
	v := volume("v", 32<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	w.attachTo("a", "v")
	now := w.volumeIs("v", "healthy", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	w.fill("v", "mine", 8<<20)
	r := w.replicaOn("v", "c")
	uid, volume := string(r.Spec.UID), string(r.Spec.VolumeUID)
	c.stop()
	c.startAlone()
	if err := c.data.remote.AllowOpen(w.ctx, "b", uid, volume); !api.Is(err, api.Unavailable) {
		t.Errorf("another node may look: %v", err)
	}
	if err := c.data.remote.AllowOpen(w.ctx, "a", uid, volume); err != nil {
		t.Errorf("the engine's node may not look: %v", err)
	}
	l := w.lentSoon(c, uid)
	epoch := l.Meta().Epoch
	if epoch < now.Status.Epoch {
		t.Fatalf("the replica is at epoch %d, the volume was at %d", epoch, now.Status.Epoch)
	}
	if err := c.data.remote.AllowSession(w.ctx, "a", uid, volume, epoch); err != nil {
		t.Errorf("the engine's session is refused: %v", err)
	}
	for _, o := range []struct {
		node  string
		epoch int64
	}{{"b", epoch}, {"a", epoch + 1}} {
		if err := c.data.remote.AllowSession(w.ctx, o.node, uid, volume, o.epoch); !api.Is(err, api.Unavailable) {
			t.Errorf("a session of node %s in epoch %d of %d: %v", o.node, o.epoch, epoch, err)
		}
	}
	w.reads("v", 8<<20, "mine")
	c.stop()
	c.start()
	w.volumeIs("v", "whole", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	if a.data.attachments.Session("v").Fenced() != nil {
		t.Error("the engine was fenced")
	}
	w.detachFrom("v")
}

// TestServesBeforeTheAPIAnswers: a data process restarted while the API is away, with reconcilers that wait for the
// API, opens replicas for the engine in the record.
func TestServesBeforeTheAPIAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.three()[2]
	v := volume("v", 32<<20)
	v.Spec.NumberOfReplicas, v.Spec.Nodes = 2, []string{"a", "c"}
	w.create(v)
	w.volumeState("v", api.VolumeDetached)
	w.attachTo("a", "v")
	w.volumeIs("v", "healthy", func(v *api.Volume) bool {
		return len(v.Status.Members) == 2 && v.Status.Robustness == api.RobustHealthy
	})
	w.detachFrom("v")
	r := w.replicaOn("v", "c")
	uid, volume := string(r.Spec.UID), string(r.Spec.VolumeUID)
	c.stop()
	c.startAlone()
	skip, away := true, make(chan struct{})
	cfg := rest.CopyConfig(w.api.Config)
	cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return silent{rt, away} })
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{Scheme: w.c.Scheme(),
		Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: &skip},
		Logger: logr.Discard(), MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) {
			return w.c.RESTMapper(), nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	if err := SetupData(mgr, c.data); err != nil {
		t.Fatal(err)
	}
	stop := w.run(mgr)
	ctx, cancel := context.WithTimeout(w.ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	defer func() { // the manager does not end before its caches have synced
		close(away)
		for !c.data.APIReached() && w.ctx.Err() == nil {
			<-tick.C
		}
		stop()
	}()
	for started := false; !started; <-tick.C {
		look, over := context.WithTimeout(ctx, 10*time.Millisecond)
		err := mgr.GetClient().List(look, &api.VolumeList{})
		over()
		started = !errors.As(err, new(*cache.ErrCacheNotStarted))
	}
	if err := c.data.remote.AllowOpen(ctx, "a", uid, volume); err != nil {
		t.Errorf("the engine's node may not look: %v", err)
	}
	opened, _, err := c.data.remote.Open(ctx, uid, volume)
	if err != nil {
		t.Fatalf("the replica is not opened: %v", err)
	}
	if err := c.data.remote.AllowSession(ctx, "a", uid, volume, c.data.remote.Opened(uid).Meta().Epoch); err != nil {
		t.Errorf("the engine's session is refused: %v", err)
	}
	if err := opened.Close(); err != nil {
		t.Error(err)
	}
}

// silent is the way to an API server without answers, until released.
type silent struct {
	http.RoundTripper
	released chan struct{}
}

func (s silent) RoundTrip(r *http.Request) (*http.Response, error) {
	select {
	case <-s.released:
		return s.RoundTripper.RoundTrip(r)
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
}

// startAlone starts a node's data process without the API.
func (o *other) startAlone() {
	w := o.w
	w.t.Helper()
	host, err := device.Open(w.ctx, filepath.Join(o.dir, "run"))
	if err != nil {
		w.t.Fatal(err)
	}
	var ln net.Listener
	if ln, err = ListenPeers("127.0.0.1", o.dir); err != nil {
		w.t.Fatal(err)
	}
	o.data, err = NewData(DataOptions{Node: o.name, Host: host, Log: w.log, Peers: PeerOptions{
		Identity: w.identity(o.ca, o.name, o.dir), Listener: ln, State: filepath.Join(o.dir, "peers.json")}})
	if err != nil {
		w.t.Fatal(err)
	}
	data := o.data
	o.stopData = func() {
		if err := data.Close(); err != nil {
			w.t.Error(err)
		}
	}
}

// lentSoon waits until an engine of another node has a replica open.
func (w *world) lentSoon(o *other, uid string) *remote.Served {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if l := o.data.remote.Opened(uid); l != nil && slices.Contains(l.Meta().Members, uid) {
			return l
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatalf("no engine opened replica %s on node %s", uid, o.name)
		}
	}
}
