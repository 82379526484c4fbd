package replicas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/sources"
	"drover.io/drover/replicas/stack"
)

// A replica whose disk lacks a layer reads the layer on other disks of the node, else on nodes with the layer's image,
// and keeps the chunks. Copy jobs make the copy meanwhile, from a source of their own. No volume waits for the copy.

// farTime bounds the request for the map and the digests of another node's layer.
const farTime = 10 * time.Second

// otherDisks lists the disks of the node without own. Once the API answers otherDisks opens all ready disks first.
func (d *Data) otherDisks(own *stack.Disk) []*stack.Disk {
	ctx := context.Background()
	var n api.Node
	if d.api.Load() {
		if err := d.client.Get(ctx, client.ObjectKey{Name: d.Node}, &n); err != nil {
			d.Log.Warn("the node's other disks are not known", "err", err)
		}
	}
	for _, st := range n.Status.Disks {
		if !st.Ready || string(st.UID) == own.UID() {
			continue
		}
		if _, err := d.disks.Get(st.UID); err == nil {
			continue
		}
		if _, err := d.disks.Open(ctx, st.Path, st.UID, false); err != nil {
			d.Log.Warn("a disk of the node cannot be opened as a source of layers", "disk", st.Path, "err", err)
		}
	}
	return d.disks.Except(own)
}

// sourceDisk finds the disk of a source on this node, also after a change of the mount point.
func (d *Data) sourceDisk(ctx context.Context, s sources.Source) (*stack.Disk, error) {
	disk, err := d.disks.Get(s.Disk)
	if err != nil && d.api.Load() {
		disk, err = d.disk(ctx, s.Disk)
	}
	if err != nil {
		disk, err = d.disks.Open(ctx, s.Path, s.Disk, false)
	}
	return disk, err
}

// fetchLayer reads a part of a layer for a disk: from the disk in the layer's record, other disks of the node, other
// nodes.
func (d *Data) fetchLayer(ctx context.Context, on *stack.Disk, l stack.RemoteLayer, off int64, buf []byte,
	check func([]byte) error) error {
	var list []sources.Source
	if l.From.UID != "" {
		list = append(list, sources.Source{Disk: api.UID(l.From.UID), Path: l.From.Path})
	}
	for _, other := range d.disks.Except(on) {
		if other.UID() != l.From.UID {
			list = append(list, sources.Source{Disk: api.UID(other.UID()), Path: other.Path()})
		}
	}
	return d.sources.Fetch(ctx, append(list, d.farSources(ctx, l.UID)...), l.UID, off, buf, check)
}

// farSources are the disks of other nodes that have an image with a layer. While the API cannot be asked they are where
// they were.
func (d *Data) farSources(ctx context.Context, uid string) []sources.Source {
	if d.Peers.Identity == nil {
		return nil
	}
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
	var list []sources.Source
	for i := range copies.Items {
		c := &copies.Items[i]
		if c.Spec.Node == d.Node || c.Status.State != api.ImageReady || !slices.Contains(c.Spec.Layers, api.UID(uid)) ||
			c.Spec.Export != nil && c.Status.Digest == "" { // not everywhere digests yet
			continue
		}
		n := slices.IndexFunc(nodes.Items, func(n api.Node) bool { return n.Name == c.Spec.Node })
		if n >= 0 && nodes.Items[n].Status.LayerAddress != "" {
			list = append(list, sources.Source{Node: c.Spec.Node, Address: nodes.Items[n].Status.LayerAddress,
				Disk: c.Spec.Disk})
		}
	}
	if len(list) > 0 && !slices.Equal(list, known) {
		d.places.Change(func(st *remote.Known) { st.Far[uid] = slices.Clone(list) })
	}
	return list
}

// readFar lets the layers of an image be read that are on other nodes only, and reports whether all can be read then.
func (l *replicaLoop) readFar(ctx context.Context, disk *stack.Disk, layers []api.UID) (bool, error) {
	for _, uid := range layers {
		if lacks, err := disk.LackingOf([]string{string(uid)}); err != nil {
			return false, err
		} else if len(lacks) == 0 || disk.Hydrating(string(uid)) {
			continue
		}
		list := l.farSources(ctx, string(uid))
		l.sources.Order(list)
		done := false
		for _, p := range list {
			err := l.describeFar(ctx, disk, string(uid), p)
			if err == nil {
				done = true
				break
			}
			l.sources.Failed(p)
			l.Log.Warn("a layer of another node cannot be read yet", "layer", uid, "node", p.Node, "err", err)
		}
		if !done {
			return false, nil
		}
	}
	return true, nil
}

// describeFar gets what has to be known of a layer before it is read.
func (l *replicaLoop) describeFar(ctx context.Context, disk *stack.Disk, uid string, p sources.Source) error {
	ctx, cancel := context.WithTimeout(ctx, farTime)
	defer cancel()
	c := l.sources.Client(p)
	root, _, err := c.Digest(ctx, string(p.Disk), uid)
	if err != nil {
		return err
	}
	if want := l.digestOf(ctx, uid); want != "" && want != root {
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
func (l *replicaLoop) digestOf(ctx context.Context, uid string) string {
	var images api.BackingImageList
	if l.client.List(ctx, &images, client.UnsafeDisableDeepCopy) != nil {
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
		for _, p := range l.farSources(ctx, uid) {
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

// remoteText says where an open replica reads layers without a copy on its disk; empty: no layer lacks a copy.
func (l *replicaLoop) remoteText(ctx context.Context, layers []stack.RemoteLayer) string {
	if len(layers) == 0 {
		return ""
	}
	var nodes []string
	var why error
	for _, layer := range layers {
		if layer.From.Path != "" {
			return fmt.Sprintf("reads layers from disk %s until they are copied here", layer.From.Path)
		}
		for _, p := range l.farSources(ctx, layer.UID) {
			if !slices.Contains(nodes, p.Node) {
				nodes = append(nodes, p.Node)
			}
		}
		why = cmp.Or(why, layer.Why)
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
