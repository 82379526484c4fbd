package replica

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// create creates the stack of a new replica, once its base layers are on the disk.
func (rs *Replicas) create(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	r.Status.Mode = api.ReplicaCreating
	if r.Spec.From == nil && !rs.onDisk(r.Spec.UID) { // else the stack of the replica or of its source names the layers
		if err := rs.awaitImage(ctx, r); err != nil {
			return err
		}
	}
	object, err := rs.volumeRecord(ctx, r.Spec.Volume)
	if err != nil {
		return err
	}
	layers := make([]string, len(r.Spec.Layers))
	for i, uid := range r.Spec.Layers {
		layers[i] = string(uid)
	}
	s := stack.Spec{UID: string(r.Spec.UID), Volume: r.Spec.Volume, VolumeUID: string(r.Spec.VolumeUID),
		Size: r.Spec.Size, Layers: layers, Object: object}
	if r.Spec.From != nil {
		err = rs.createFromSource(ctx, r, disk, s)
	} else {
		err = disk.CreateReplica(ctx, s)
	}
	switch {
	case err == nil:
	case errors.Is(err, syscall.EFBIG):
		r.Status.Mode = api.ReplicaFailed
		return api.Errorf(api.OutOfRange, "the file system of disk %s cannot hold a file of %s: %w", disk.Path(),
			api.SizeText(r.Spec.Size), err)
	case api.Is(err, api.Exists) || api.Is(err, api.Invalid) || api.Is(err, api.NotFound) && r.Spec.From != nil:
		r.Status.Mode = api.ReplicaFailed
		rs.Events.Eventf(r, nil, "Warning", "ReplicaFailed", "Create", "%s", err)
		return err
	case api.Is(err, api.Full):
		if r.Status.Message != err.Error() {
			rs.Events.Eventf(r, nil, "Warning", "DiskFull", "Create", "%s", err)
		}
		return err
	default:
		return err
	}
	rs.setOnDisk(r.Spec.UID, true)
	r.Status.Mode, r.Status.Message = api.ReplicaCurrent, ""
	r.Status.Size, r.Status.Layers, r.Status.Copy = r.Spec.Size, r.Spec.Layers, nil
	if err := rs.reportFetch(ctx, r, disk); err != nil {
		return err
	}
	if r.Spec.From != nil {
		rs.wakeReplicasOf(ctx, r.Spec.From.Volume)
	}
	rs.Wake(r.Name) // the rest follows in the next step
	return nil
}

// createShared creates a replica over the layers of a snapshot on the same disk.
func (rs *Replicas) createShared(ctx context.Context, r *api.Replica, disk *stack.Disk, s stack.Spec) error {
	from := r.Spec.From
	for tries := 0; ; tries++ {
		m, err := disk.Stack(string(from.Replica))
		if err != nil {
			return err
		}
		i := slices.IndexFunc(m.Snapshots, func(s stack.Snapshot) bool { return s.UID == string(from.Snapshot) })
		if i < 0 {
			return api.Errorf(api.NotFound, "snapshot %s of volume %s does not exist any more", from.Name, from.Volume)
		}
		if s.Layers, err = m.Chain(m.Snapshots[i].Layer); err != nil {
			return err
		}
		if err = rs.pinElsewhere(ctx, r, disk, s.Layers); err != nil {
			return err
		}
		err = disk.CreateReplica(ctx, s)
		if !api.Is(err, api.NotFound) || tries == 3 { // else a merge was faster
			return err
		}
	}
}

// wakeReplicasOf wakes the replicas of a volume whose layers other replicas begin or cease to share.
func (rs *Replicas) wakeReplicasOf(ctx context.Context, volume string) {
	var list api.ReplicaList
	if err := rs.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: volume}); err != nil {
		rs.Log.Warn("replicas of a volume cannot be listed", "volume", volume, "err", err)
	}
	for i := range list.Items {
		if list.Items[i].Spec.Node == rs.Name {
			rs.Wake(list.Items[i].Name)
		}
	}
}

// awaitImage waits for the copy of the image that a replica starts from: on its disk, or on a source.
func (rs *Replicas) awaitImage(ctx context.Context, r *api.Replica) error {
	if len(r.Spec.Layers) == 0 {
		return nil
	}
	own, err := rs.copyOn(ctx, r.Spec.Disk, r.Spec.Layers)
	switch {
	case err != nil:
		return err
	case own != nil && own.DeletionTimestamp != nil:
		return api.Errorf(api.Unavailable, "the copy of image %s on this disk is being removed", own.Spec.Image)
	case own != nil && own.Status.State == api.ImageReady:
		return nil
	}
	disk, err := rs.Disks.Get(r.Spec.Disk)
	if err != nil {
		return err
	}
	for _, other := range rs.layers.Beside(disk) {
		c, err := rs.copyOn(ctx, api.UID(other.UID()), r.Spec.Layers)
		if err != nil {
			return err
		}
		if c != nil && c.DeletionTimestamp == nil && c.Status.State == api.ImageReady {
			return nil
		}
	}
	if readable, err := rs.layers.Describe(ctx, disk, r.Spec.Layers); err != nil || readable {
		return err
	}
	switch {
	case own == nil:
		return api.Errorf(api.Unavailable, "the replica waits for a copy of the backing image on its disk")
	case own.Status.Message != "":
		return api.Errorf(api.Unavailable, "the replica waits for image %s on its disk (%s): %s", own.Spec.Image,
			own.Status.State, own.Status.Message)
	}
	return api.Errorf(api.Unavailable, "the replica waits for image %s on its disk (%s)", own.Spec.Image, own.Status.State)
}

// copyOn is the copy on a disk of the image with the given layers; nil: the disk has no copy.
func (rs *Replicas) copyOn(ctx context.Context, disk api.UID, layers []api.UID) (*api.ImageCopy, error) {
	var copies api.ImageCopyList
	if err := rs.Client.List(ctx, &copies, client.MatchingFields{watch.ByLayer: watch.TopLayer(layers)}); err != nil {
		return nil, err
	}
	for i := range copies.Items {
		if copies.Items[i].Spec.Disk == disk && slices.Equal(copies.Items[i].Spec.Layers, layers) {
			return &copies.Items[i], nil
		}
	}
	return nil, nil
}

// expand expands the replica, with its engine if the volume is attached.
func (rs *Replicas) expand(ctx context.Context, r *api.Replica, disk *stack.Disk) error {
	size := r.Spec.Size
	if done, err := rs.attachments.Expand(ctx, r.Spec.Volume, r.Spec.UID, size); err != nil {
		return err
	} else if done {
		r.Status.Size = size
		return nil
	}
	if info, is := rs.remote.Info(string(r.Spec.UID)); is { // the engine, on another node, expands the replica
		if info.Size < size {
			return api.Errorf(api.Busy, "replica %s: the volume's engine on another node expands it", r.Name)
		}
		r.Status.Size = size
		return nil
	}
	loop, err := rs.Threads.Pick()
	if err != nil {
		return err
	}
	defer rs.Threads.PutBack(loop)
	open, err := disk.OpenReplica(ctx, string(r.Spec.UID), loop.Loop)
	if err != nil {
		return err
	}
	err = open.Expand(ctx, size)
	if cerr := open.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		r.Status.Size = size
	}
	return err
}
