package host

import (
	"context"
	"errors"
	"net"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/block/wire"
	"drover.io/drover/imagestore/importer"
)

// A copy may come from a disk of another node. That node bounds how many transfers each of its disks serves at once,
// those to its own other disks among them; the receiver verifies what it got by its digests, and goes on after a cut
// where it was.

// serveLayers lets other nodes read the layers on this node's disks.
func (n *copyReconciler) serveLayers(mgr ctrl.Manager, ln net.Listener, id *wire.Identity) error {
	// Begun with the manager's other informers: the first node that asks does not wait for it.
	_, err := mgr.GetCache().GetInformer(context.Background(), &api.Replica{}, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	access := newLayerAccess(n.Client, n.live, n.log)
	s := wire.NewServer(wire.ServerOptions{Identity: id, Log: n.log, Allow: access.allow,
		Disk: func(uid string) (block.Layers, error) { return n.disks(api.UID(uid)) },
		Send: func(ctx context.Context, uid string) (func(), error) {
			lane := "send " + uid
			if err := n.transfers.limits.acquire(ctx, lane, n.sendLimit(ctx)); err != nil {
				return nil, err
			}
			return func() { n.transfers.limits.release(lane) }, nil
		},
		Kind: func(err error) string { return api.KindOf(err).String() },
	})
	return mgr.Add(everyNode{manager.RunnableFunc(func(ctx context.Context) error { return s.Serve(ctx, ln) })})
}

// everyNode runs on every node.
type everyNode struct{ manager.Runnable }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (everyNode) NeedLeaderElection() bool { return false }

// sendLimit is how many transfers one disk serves at once.
func (n *copyReconciler) sendLimit(ctx context.Context) int {
	return max(int(watch.SettingNumber(ctx, n.Client, settingSends, n.log)), 1)
}

// openCopySource is a disk that a copy is taken from: one of this node, or one of another. done ends the taking.
func (n *copyReconciler) openCopySource(ctx context.Context, uid api.UID) (from block.Layers, done func(), err error) {
	node, address, err := n.locateDisk(ctx, uid)
	if err != nil {
		return nil, nil, err
	}
	if node == n.node {
		if from, err = n.disks(uid); err != nil {
			return nil, nil, err
		}
		lane := "send " + string(uid)
		if err := n.transfers.limits.acquire(ctx, lane, n.sendLimit(ctx)); err != nil {
			return nil, nil, err
		}
		return from, func() { n.transfers.limits.release(lane) }, nil
	}
	if n.opts.Identity == nil || address == "" {
		return nil, nil, api.Errorf(api.Unavailable, "node %s does not serve its images to other nodes yet", node)
	}
	c := wire.NewClient(n.opts.Identity, node, address)
	end, err := c.Send(ctx, string(uid))
	if err != nil {
		c.Close()
		return nil, nil, remoteError(err)
	}
	return &remoteDisk{ctx, c, string(uid)}, func() { end(); c.Close() }, nil
}

// locateDisk finds the node of a disk, and where that node's layers are served.
func (n *copyReconciler) locateDisk(ctx context.Context, uid api.UID) (node, address string, err error) {
	var nodes api.NodeList
	if err := n.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return "", "", err
	}
	for i := range nodes.Items {
		st := &nodes.Items[i].Status
		if slices.ContainsFunc(st.Disks, func(d api.DiskStatus) bool { return d.UID == uid }) {
			return nodes.Items[i].Name, st.LayerAddress, nil
		}
	}
	return "", "", api.Errorf(api.Unavailable, "disk %s is not there on any node", uid)
}

// remoteDisk is a disk of another node, as far as copies are made from it.
type remoteDisk struct {
	ctx    context.Context
	client *wire.Client
	uid    string
}

var _ block.Layers = (*remoteDisk)(nil)

var errRemoteReadOnly = api.Errorf(api.Unsupported, "a disk of another node can only be read")

func (f *remoteDisk) UID() string { return f.uid }

func (f *remoteDisk) Open(uid string) (block.Source, error) {
	s, err := f.client.Open(f.ctx, f.uid, uid)
	return s, remoteError(err)
}

func (f *remoteDisk) Digest(uid string) (root string, allocated int64, err error) {
	root, allocated, err = f.client.Digest(f.ctx, f.uid, uid)
	return root, allocated, remoteError(err)
}

// Image is what package disk asks a disk that knows its images one by one.
func (f *remoteDisk) Image(uid string) (block.Image, error) {
	img, err := f.client.Image(f.ctx, f.uid, uid)
	return img, remoteError(err)
}

func (f *remoteDisk) Create(context.Context, string, int64) (block.LayerWriter, error) {
	return nil, errRemoteReadOnly
}
func (f *remoteDisk) Verify(context.Context, string) error { return errRemoteReadOnly }
func (f *remoteDisk) PutImage(block.Image) error           { return errRemoteReadOnly }
func (f *remoteDisk) Images() ([]block.Image, error)       { return nil, errRemoteReadOnly }
func (f *remoteDisk) RemoveImage(string) error             { return errRemoteReadOnly }

// remoteError gives an error the kind that it had on its node; a node that cannot be reached is not available.
func remoteError(err error) error {
	var said *wire.Error
	switch {
	case err == nil || errors.Is(err, context.Canceled) || apierrors.IsNotFound(err):
		return err
	case errors.As(err, &said):
		return api.Errorf(api.KindNamed(said.Kind), "%w", err)
	}
	return api.Errorf(api.Unavailable, "%w", err)
}

// copyFromDisk is a transfer from another disk.
func (n *copyReconciler) copyFromDisk(ctx context.Context, j *transfer, c *api.ImageCopy, on block.Layers,
	want importer.Spec, mend bool) (importer.Result, error) {
	from, done, err := n.openCopySource(ctx, c.Spec.From)
	if err != nil {
		return importer.Result{}, err
	}
	defer done()
	j.setState(api.ImageInProgress, "")
	want.CheckpointEvery = n.opts.CheckpointEvery
	first, far := from.(*remoteDisk)
	if far && !mend {
		return n.copyParallel(ctx, first, c, on, want, &j.progress)
	}
	carry := importer.Copy
	if mend {
		carry = importer.Repair
	}
	got, err := carry(ctx, from, on, want, &j.progress)
	if !far && api.Is(err, api.Corrupt) {
		n.suspectCopy(ctx, c.Spec.UUID, c.Spec.From)
	}
	return got, err
}
