package host

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// objects stands in for a cache or an API server; err is the answer of an unreachable server.
type objects struct {
	nodeNeeds
	err error
	n   int // lists of copies
}

func (o *objects) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	panic("nobody gets one")
}

func (o *objects) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch l := list.(type) {
	case *api.ImageCopyList:
		o.n++
		l.Items = o.copies
	case *api.ReplicaList:
		l.Items = o.replicas
	}
	return o.err
}

func lent(node string, disk, uuid api.UID, layers ...api.UID) api.ImageCopy {
	return api.ImageCopy{Spec: api.ImageCopySpec{Node: node, Disk: disk, UUID: uuid, Layers: layers}}
}

// TestLayersForThoseWhoNeedThem: a node may read the layers of an ImageCopy or a Replica on the node, and nothing else.
func TestLayersForThoseWhoNeedThem(t *testing.T) {
	exported := lent("a", "disk-a", "export")
	exported.Status.Layers = []api.UID{"snap"}
	own := lent("d", "disk-d", "foreign") // a node's own status does not count
	own.Status.Layers = []api.UID{"secret"}
	n := nodeNeeds{copies: []api.ImageCopy{lent("a", "disk-a", "debian", "base", "top"), lent("b", "disk-b", "debian", "base", "top"),
		exported, lent("c", "disk-c", "export"), own},
		replicas: []api.Replica{{Spec: api.ReplicaSpec{Node: "e", Layers: []api.UID{"base"}}}}}
	for _, c := range []struct {
		node, uid string
		may       bool
	}{
		{"b", "base", true}, {"b", "top", true}, {"b", "debian", true}, {"b", "", true}, {"b", "snap", false},
		{"c", "snap", true}, {"c", "export", true}, {"c", "base", false}, {"c", "debian", false},
		{"d", "base", false}, {"d", "secret", false}, {"d", "debian", false}, {"d", "", false},
		{"e", "base", true}, {"e", "top", false}, {"e", "debian", false}, {"", "base", false},
	} {
		if n.needsLayer(c.node, "disk-a", c.uid) != c.may {
			t.Errorf("node %q, %q: %v", c.node, c.uid, !c.may)
		}
	}
}

// TestLayerAccessAsksTheAPI: layerAccess looks up unknown layers in the API, at a bounded rate; without the API,
// layerAccess serves the layers known to the cache.
func TestLayerAccessAsksTheAPI(t *testing.T) {
	cached, live := &objects{}, &objects{}
	live.copies = []api.ImageCopy{lent("b", "disk-b", "debian", "base")}
	l := newLayerAccess(cached, live, slog.New(slog.DiscardHandler))
	for range 3 {
		if err := l.checkAccess(t.Context(), "b", "disk-a", "base"); err != nil {
			t.Errorf("what the API knows: %v", err)
		}
		if err := l.checkAccess(t.Context(), "c", "disk-a", "base"); !api.Is(err, api.Denied) {
			t.Errorf("a third node: %v", err)
		}
	}
	if live.n > 4 {
		t.Errorf("the API was asked %d times", live.n)
	}
	live.err = api.Errorf(api.Unavailable, "away")
	cached.copies = []api.ImageCopy{lent("d", "disk-d", "debian", "base")}
	if err := l.checkAccess(t.Context(), "d", "disk-a", "base"); err != nil {
		t.Errorf("what the cache knows: %v", err)
	}
	if err := l.checkAccess(t.Context(), "e", "disk-a", "base"); !api.Is(err, api.Unavailable) {
		t.Errorf("what nobody knows: %v", err)
	}
}

// waiting is an API server which answers nothing before the release.
type waiting struct {
	objects
	asked, release chan struct{}
}

func (w *waiting) List(ctx context.Context, list client.ObjectList, o ...client.ListOption) error {
	w.asked <- struct{}{}
	<-w.release
	return w.objects.List(ctx, list, o...)
}

// TestLayerAccessWaitsForNoOtherNode: while the API does not answer about a node, other nodes get the layers known to
// the cache.
func TestLayerAccessWaitsForNoOtherNode(t *testing.T) {
	cached := &objects{nodeNeeds: nodeNeeds{copies: []api.ImageCopy{lent("d", "disk-d", "debian", "base")}}}
	live := &waiting{asked: make(chan struct{}, 2), release: make(chan struct{})}
	l := newLayerAccess(cached, live, slog.New(slog.DiscardHandler))
	third := make(chan error, 1)
	go func() { third <- l.checkAccess(t.Context(), "c", "disk-a", "base") }()
	<-live.asked
	known := make(chan error, 1)
	go func() { known <- l.checkAccess(t.Context(), "d", "disk-a", "base") }()
	select {
	case err := <-known:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("a node that the cache knows waits for the API's answer about another one")
	}
	close(live.release)
	if err := <-third; !api.Is(err, api.Denied) {
		t.Errorf("a third node: %v", err)
	}
}
