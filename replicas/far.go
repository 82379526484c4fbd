package replicas

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/stack"
)

// A replica whose image is on other nodes only reads it there, until the copy is here that the image's loops make: the
// volume need not wait for that. What it reads it keeps, so no chunk travels twice for the guest; the copy is made
// beside it, from a source of its own.

// farTime bounds one try to read a chunk; a node that is silent for farSilent is not the only one asked any more.
const (
	farTime   = 10 * time.Second
	farSilent = time.Second
)

// farLayers are the connections that layers of other nodes are read through.
type farLayers struct {
	mu      sync.Mutex
	clients map[remote.Place]*wire.Client // by node and address
	bad     map[remote.Place]time.Time    // when one failed: the others are asked first
}

// to is the client for a place.
func (f *farLayers) to(id *wire.Identity, p remote.Place) *wire.Client {
	p.Disk = ""
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.clients == nil {
		f.clients, f.bad = map[remote.Place]*wire.Client{}, map[remote.Place]time.Time{}
	}
	if f.clients[p] == nil {
		f.clients[p] = wire.NewClient(id, p.Node, p.Address)
	}
	return f.clients[p]
}

func (f *farLayers) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.clients {
		c.Close()
	}
	f.clients = nil
}

func (f *farLayers) failed(p remote.Place) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.bad != nil {
		f.bad[p] = time.Now()
	}
}

// order puts places that failed a moment ago last.
func (f *farLayers) order(list []remote.Place) {
	f.mu.Lock()
	defer f.mu.Unlock()
	slices.SortStableFunc(list, func(a, b remote.Place) int { return f.bad[a].Compare(f.bad[b]) })
}

// farPlaces are the disks of other nodes that have an image with a layer. While the API cannot be asked they are where
// they were.
func (d *Data) farPlaces(ctx context.Context, uid string) []remote.Place {
	known := d.places.Get().Far[uid]
	if !d.api.Load() {
		return known
	}
	var copies api.ImageCopyList
	var nodes api.NodeList
	if d.client.List(ctx, &copies, client.UnsafeDisableDeepCopy) != nil ||
		d.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy) != nil {
		return known
	}
	var list []remote.Place
	for i := range copies.Items {
		c := &copies.Items[i]
		if c.Spec.Node == d.Node || c.Status.State != api.ImageReady || !slices.Contains(c.Spec.Layers, api.UID(uid)) ||
			c.Spec.Export != nil && c.Status.Digest == "" { // not everywhere digests yet
			continue
		}
		n := slices.IndexFunc(nodes.Items, func(n api.Node) bool { return n.Name == c.Spec.Node })
		if n >= 0 && nodes.Items[n].Status.LayerAddress != "" {
			list = append(list, remote.Place{Node: c.Spec.Node, Address: nodes.Items[n].Status.LayerAddress,
				Disk: c.Spec.Disk})
		}
	}
	if len(list) > 0 && !slices.Equal(list, known) {
		d.places.Change(func(st *remote.Known) { st.Far[uid] = slices.Clone(list) })
	}
	return list
}

// fetchFar reads a part of a layer of another node.
func (d *Data) fetchFar(ctx context.Context, uid string, off int64, buf []byte, check func([]byte) error) error {
	list := d.farPlaces(ctx, uid)
	if len(list) == 0 {
		return api.Errorf(api.Unavailable, "no node has layer %s", uid)
	}
	d.far.order(list)
	err := readFirst(ctx, len(list), farSilent, buf, func(ctx context.Context, i int, b []byte) error {
		ctx, cancel := context.WithTimeout(ctx, farTime)
		defer cancel()
		late := time.AfterFunc(farSilent, func() { d.far.failed(list[i]) }) // the other nodes are asked first from now on
		defer late.Stop()
		err := d.far.to(d.Peers.Identity, list[i]).Read(ctx, string(list[i].Disk), uid, b, off)
		if err == nil {
			err = check(b)
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			d.far.failed(list[i])
		}
		return err
	})
	if err != nil {
		return api.Errorf(api.Unavailable, "layer %s: %w", uid, err)
	}
	return nil
}

// readFirst reads from the first of some sources that answers. It asks the next one as soon as one fails, and beside
// one that is silent for a while.
func readFirst(ctx context.Context, sources int, silent time.Duration, buf []byte,
	read func(ctx context.Context, i int, b []byte) error) error {
	type answer struct {
		b   []byte
		err error
	}
	var asked sync.WaitGroup
	defer asked.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers, next := make(chan answer, sources), 0
	late := time.NewTimer(silent)
	defer late.Stop()
	ask := func() {
		if next == sources {
			return
		}
		i, b := next, make([]byte, len(buf))
		next++
		late.Reset(silent)
		asked.Go(func() { answers <- answer{b, read(ctx, i, b)} })
	}
	var errs []error
	for ask(); len(errs) < sources; {
		select {
		case a := <-answers:
			if a.err == nil {
				copy(buf, a.b)
				return nil
			}
			errs = append(errs, a.err)
			ask()
		case <-late.C:
			ask()
		}
	}
	return errors.Join(errs...)
}

// readFar lets the layers of an image be read that are on other nodes only, and reports whether all can be read then.
func (d *Data) readFar(ctx context.Context, disk *stack.Disk, layers []api.UID) (bool, error) {
	if d.Peers.Identity == nil {
		return false, nil
	}
	for _, uid := range layers {
		if lacks, err := disk.LackingOf([]string{string(uid)}); err != nil {
			return false, err
		} else if len(lacks) == 0 || disk.Hydrating(string(uid)) {
			continue
		}
		list := d.farPlaces(ctx, string(uid))
		d.far.order(list)
		done := false
		for _, p := range list {
			err := d.describeFar(ctx, disk, string(uid), p)
			if err == nil {
				done = true
				break
			}
			d.far.failed(p)
			d.Log.Warn("a layer of another node cannot be read yet", "layer", uid, "node", p.Node, "err", err)
		}
		if !done {
			return false, nil
		}
	}
	return true, nil
}

// describeFar gets what has to be known of a layer before it is read.
func (d *Data) describeFar(ctx context.Context, disk *stack.Disk, uid string, p remote.Place) error {
	ctx, cancel := context.WithTimeout(ctx, farTime)
	defer cancel()
	c := d.far.to(d.Peers.Identity, p)
	root, _, err := c.Digest(ctx, string(p.Disk), uid)
	if err != nil {
		return err
	}
	if want := d.digestOf(ctx, uid); want != "" && want != root {
		return api.Errorf(api.Corrupt, "the digest of layer %s there is %s, and should be %s", uid, root, want)
	}
	sums, err := c.Sums(ctx, string(p.Disk), uid)
	if err != nil {
		return err
	}
	src, err := c.Open(ctx, string(p.Disk), uid)
	if err != nil {
		return err
	}
	return errors.Join(disk.Hydrate(ctx, uid, root, src, sums), src.Close())
}

// digestOf is what the API says of the topmost layer of an image; empty: nothing.
func (d *Data) digestOf(ctx context.Context, uid string) string {
	var images api.BackingImageList
	if d.client.List(ctx, &images, client.UnsafeDisableDeepCopy) != nil {
		return ""
	}
	for i := range images.Items {
		if st := &images.Items[i].Status; watch.TopLayer(st.Layers) == uid {
			return st.Digest
		}
	}
	return ""
}

// describeFetch writes into the status which layers the disk of a replica lacks. The share is in steps, so that a copy
// of an image does not change the status of each volume on it all the time.
func (l *replicaLoop) describeFetch(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	lacks, err := disk.Lacking(string(r.Spec.UID))
	if err != nil {
		return err
	}
	if r.Status.Fetching = ""; len(lacks) == 0 {
		return nil
	}
	what, progress := "its layers", int32(0)
	if r.Status.Copy != nil {
		progress = r.Status.Copy.Progress
	} else if c, err := l.copyOn(ctx, r.Spec.Disk, r.Spec.Layers); err == nil && c != nil {
		what, progress = "image "+c.Spec.Image, c.Status.Progress
	}
	const step = 10
	r.Status.Fetching = fmt.Sprintf("about %d %% of %s", max(100-progress+step-1, step)/step*step, what)
	var nodes []string
	for _, uid := range lacks {
		for _, p := range l.farPlaces(ctx, uid) {
			if !slices.Contains(nodes, p.Node) {
				nodes = append(nodes, p.Node)
			}
		}
	}
	if slices.Sort(nodes); len(nodes) > 0 {
		r.Status.Fetching += " from node " + strings.Join(nodes, ", ")
	}
	return nil
}

// farText says where an open replica reads what is not here yet; empty: all is here.
func (d *Data) farText(ctx context.Context, r *stack.Replica) string {
	layers, why := r.Hydrates()
	if len(layers) == 0 {
		return ""
	}
	var nodes []string
	for _, uid := range layers {
		for _, p := range d.farPlaces(ctx, uid) {
			if !slices.Contains(nodes, p.Node) {
				nodes = append(nodes, p.Node)
			}
		}
	}
	text := "reads its image from node " + strings.Join(nodes, ", ") + " until the copy is here"
	if len(nodes) == 0 {
		text = "its image is on no node"
	}
	if why != nil {
		return fmt.Sprintf("%s; reads of what is not here wait: %v", text, why)
	}
	return text
}
