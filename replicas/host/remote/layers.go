package remote

import (
	"context"
	"errors"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block/wire"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/sources"
	"drover.io/drover/replicas/stack"
)

// describeTime bounds the request for the map and the digests of another node's layer.
const describeTime = 10 * time.Second

// Layers reads layers that a disk lacks from other disks of the node, else from nodes with the layer's image; the disk
// keeps the chunks. Copy jobs copy such layers meanwhile, from a source of their own. No volume waits for the copy.
type Layers struct {
	node     *localnode.Node
	host     Node
	places   *Places
	identity *wire.Identity // nil: no other node is asked
	sources  sources.Sources
}

// NewLayers has no connection yet.
func NewLayers(node *localnode.Node, host Node, places *Places, identity *wire.Identity) *Layers {
	l := &Layers{node: node, host: host, places: places, identity: identity}
	l.sources.Identity, l.sources.Disk = identity, l.sourceDisk
	return l
}

// Close ends the connections to other nodes, and waits a bounded time for reads.
func (l *Layers) Close() error { return l.sources.Close() }

// Beside lists the disks of the node without own. Once the API answers Beside opens all ready disks first.
func (l *Layers) Beside(own *stack.Disk) []*stack.Disk {
	ctx := context.Background()
	var n api.Node
	if l.node.APIReached() {
		if err := l.node.Client.Get(ctx, client.ObjectKey{Name: l.node.Name}, &n); err != nil {
			l.node.Log.Warn("the node's other disks are not known", "err", err)
		}
	}
	for _, st := range n.Status.Disks {
		if !st.Ready || string(st.UID) == own.UID() {
			continue
		}
		if _, err := l.node.Disks.Get(st.UID); err == nil {
			continue
		}
		if _, err := l.node.Disks.Open(ctx, st.Path, st.UID, false); err != nil {
			l.node.Log.Warn("a disk of the node cannot be opened as a source of layers", "disk", st.Path, "err", err)
		}
	}
	return l.node.Disks.Except(own)
}

// sourceDisk finds the disk of a source on this node, also after a change of the mount point.
func (l *Layers) sourceDisk(ctx context.Context, s sources.Source) (*stack.Disk, error) {
	disk, err := l.node.Disks.Get(s.Disk)
	if err != nil && l.node.APIReached() {
		disk, err = l.host.Disk(ctx, s.Disk)
	}
	if err != nil {
		disk, err = l.node.Disks.Open(ctx, s.Path, s.Disk, false)
	}
	return disk, err
}

// Fetch reads a part of a layer for a disk: from the disk in the layer's record, other disks of the node, other
// nodes.
func (l *Layers) Fetch(ctx context.Context, on *stack.Disk, layer stack.RemoteLayer, off int64, buf []byte,
	check func([]byte) error) error {
	var list []sources.Source
	if layer.From.UID != "" {
		list = append(list, sources.Source{Disk: api.UID(layer.From.UID), Path: layer.From.Path})
	}
	for _, other := range l.node.Disks.Except(on) {
		if other.UID() != layer.From.UID {
			list = append(list, sources.Source{Disk: api.UID(other.UID()), Path: other.Path()})
		}
	}
	return l.sources.Fetch(ctx, append(list, l.Nodes(ctx, layer.UID)...), layer.UID, off, buf, check)
}

// Nodes are the disks of other nodes that have an image with a layer, and the disks of all nodes, also of this node,
// for which a node reads the layer in a backup. Before the API answers, Nodes has the disks of the places file.
func (l *Layers) Nodes(ctx context.Context, uid string) []sources.Source {
	if l.identity == nil {
		return nil
	}
	known := l.places.Get().Far[uid]
	if !l.node.APIReached() {
		return known
	}
	var copies api.ImageCopyList
	var nodes api.NodeList
	if l.node.Client.List(ctx, &copies, client.UnsafeDisableDeepCopy) != nil ||
		l.node.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy) != nil {
		return known
	}
	var list []sources.Source
	for i := range copies.Items {
		c := &copies.Items[i]
		ready := c.Status.State == api.ImageReady && c.Spec.Node != l.node.Name
		if !ready && !c.Status.Readable || !slices.Contains(c.Spec.Layers, api.UID(uid)) ||
			c.Spec.Export != nil && c.Status.Digest == "" { // nodes may lack the digests of an export
			continue
		}
		n := slices.IndexFunc(nodes.Items, func(n api.Node) bool { return n.Name == c.Spec.Node })
		if n >= 0 && nodes.Items[n].Status.LayerAddress != "" {
			list = append(list, sources.Source{Node: c.Spec.Node, Address: nodes.Items[n].Status.LayerAddress,
				Disk: c.Spec.Disk})
		}
	}
	if len(list) > 0 && !slices.Equal(list, known) {
		l.places.Change(func(st *Known) { st.Far[uid] = slices.Clone(list) })
	}
	return list
}

// Describe makes the layers of an image readable that only other nodes have, and reports whether all are readable then.
func (l *Layers) Describe(ctx context.Context, disk *stack.Disk, layers []api.UID) (bool, error) {
	for _, uid := range layers {
		if lacks, err := disk.LackingOf([]string{string(uid)}); err != nil {
			return false, err
		} else if len(lacks) == 0 || disk.Hydrating(string(uid)) {
			continue
		}
		list := l.Nodes(ctx, string(uid))
		l.sources.Order(list)
		done := false
		for _, p := range list {
			err := l.fetchDigests(ctx, disk, string(uid), p)
			if err == nil {
				done = true
				break
			}
			l.sources.Failed(p)
			l.node.Log.Warn("a layer of another node cannot be read yet", "layer", uid, "node", p.Node, "err", err)
		}
		if !done {
			return false, nil
		}
	}
	return true, nil
}

// fetchDigests fetches the digests and the map of a layer, which a read needs.
func (l *Layers) fetchDigests(ctx context.Context, disk *stack.Disk, uid string, p sources.Source) error {
	ctx, cancel := context.WithTimeout(ctx, describeTime)
	defer cancel()
	c := l.sources.Client(p)
	root, _, err := c.Digest(ctx, string(p.Disk), uid)
	if err != nil {
		return err
	}
	want, most := l.factsOf(ctx, uid)
	if want != "" && want != root {
		return api.Errorf(api.Corrupt, "the root digest of layer %s is %s on the node, and should be %s", uid, root, want)
	}
	sums, err := c.Sums(ctx, string(p.Disk), uid, most)
	if err != nil {
		return err
	}
	src, err := c.Open(ctx, string(p.Disk), uid)
	if err != nil {
		return err
	}
	if n := src.Size(); n > most { // the node may answer differently now
		return errors.Join(api.Errorf(api.Corrupt, "layer %s has %d bytes on the node, and its image %d", uid, n, most),
			src.Close())
	}
	return errors.Join(disk.Hydrate(ctx, uid, root, src, sums), src.Close())
}

// factsOf is what the API knows of a layer: the root digest, if the layer is the topmost one of an image, else empty;
// and the size of the largest image with the layer. A layer of no image may be as large as a volume.
func (l *Layers) factsOf(ctx context.Context, uid string) (root string, most int64) {
	var images api.BackingImageList
	if l.node.Client.List(ctx, &images, client.UnsafeDisableDeepCopy) != nil {
		return "", api.MaxVolumeSize
	}
	for i := range images.Items {
		st := &images.Items[i].Status
		if !slices.Contains(st.Layers, api.UID(uid)) {
			continue
		}
		if most = max(most, api.RoundSize(st.VirtualSize)); watch.TopLayer(st.Layers) == uid {
			root = st.Digest
		}
	}
	if most == 0 {
		most = api.MaxVolumeSize
	}
	return root, most
}
