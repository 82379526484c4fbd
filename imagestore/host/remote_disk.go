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

// A copy can come from a disk of another node. The sending node bounds how many transfers each of its disks serves at
// once, including transfers to other disks of the same node. The receiver verifies the layers by their digests and
// continues after a cut at its last checkpoint.

// serveLayers lets other nodes read the layers on this node's disks.
func (n *copyReconciler) serveLayers(mgr ctrl.Manager, ln net.Listener, id *wire.Identity) error {
	// Started with the manager's other informers, so that the first request of a node does not wait for the informer.
	_, err := mgr.GetCache().GetInformer(context.Background(), &api.Replica{}, cache.BlockUntilSynced(false))
	if err != nil {
		return err
	}
	access := newLayerAccess(n.Client, n.live, n.log)
	s := wire.NewServer(wire.ServerOptions{Identity: id, Log: n.log, Allow: access.checkAccess,
		Disk: func(uid string) (block.Layers, error) {
			on, err := n.disks(api.UID(uid))
			if err != nil {
				return nil, err
			}
			return n.restoring.Disk(on), nil
		},
		Send: func(ctx context.Context, uid string) (func(), error) { return n.acquireSend(ctx, api.UID(uid)) },
		Kind: func(err error) string { return api.KindOf(err).String() },
	})
	return mgr.Add(everyNode{manager.RunnableFunc(func(ctx context.Context) error { return s.Serve(ctx, ln) })})
}

// everyNode is a Runnable of every node, with or without the lead.
type everyNode struct{ manager.Runnable }

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (everyNode) NeedLeaderElection() bool { return false }

// acquireSend waits for one of the transfers that a disk of this node serves at once.
func (n *copyReconciler) acquireSend(ctx context.Context, disk api.UID) (release func(), err error) {
	return n.transfers.limits.Acquire(ctx, "send "+string(disk), func() int {
		return max(int(watch.SettingNumber(ctx, n.Client, settingSends, n.log)), 1)
	})
}

// openCopySource opens a disk of this or another node as the source of a copy; done ends its use.
func (n *copyReconciler) openCopySource(ctx context.Context, uid api.UID) (from block.Layers, done func(), err error) {
	node, address, err := n.locateDisk(ctx, uid)
	if err != nil {
		return nil, nil, err
	}
	if node == n.node {
		if from, err = n.disks(uid); err == nil {
			done, err = n.acquireSend(ctx, uid)
		}
		return from, done, err
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

// locateDisk finds the node of a disk, and the address of the node's layers.
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
	return "", "", api.Errorf(api.Unavailable, "disk %s is on no node", uid)
}

// remoteDisk is a disk of another node as the source of copies.
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

// Image lets package importer read one record, without a list of all images.
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

// copyFromDisk copies or repairs an image from another disk.
func (n *copyReconciler) copyFromDisk(ctx context.Context, t *transfer, c *api.ImageCopy, on block.Layers,
	spec importer.Spec, repair bool) (importer.Result, error) {
	from, done, err := n.openCopySource(ctx, c.Spec.From)
	if err != nil {
		return importer.Result{}, err
	}
	defer done()
	t.setState(api.ImageInProgress, "")
	spec.CheckpointEvery = n.opts.CheckpointEvery
	first, remote := from.(*remoteDisk)
	if remote && !repair {
		return n.copyParallel(ctx, first, c, on, spec, &t.progress)
	}
	transferImage := importer.Copy
	if repair {
		transferImage = importer.Repair
	}
	got, err := transferImage(ctx, from, on, spec, &t.progress)
	if !remote && api.Is(err, api.Corrupt) {
		n.suspectCopy(ctx, c.Spec.UUID, c.Spec.From)
	}
	return got, err
}
