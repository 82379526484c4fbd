package host

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"

	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/host/restoring"
	"drover.io/drover/imagestore/importer"
	"drover.io/drover/imagestore/origin"
)

// restoreBackup makes a copy from a backup, or with repair repairs the copy below replicas. Volumes read the layer
// meanwhile, unless a checksum has to be compared first, or damaged chunks become zeros.
func (n *copyReconciler) restoreBackup(ctx context.Context, t *transfer, slot slotFunc, image *api.BackingImage,
	on block.Layers, spec importer.Spec, repair bool,
) (got importer.Result, err error) {
	if n.opts.OpenBackup == nil {
		return got, api.Errorf(api.Unsupported, "this node restores no backups")
	}
	spare := importer.RepairSpec(spec)
	into := spec
	if repair {
		into = spare
	}
	allow := image.Spec.SourceParameters[api.RestoreAllowDamaged] == "true"
	serve := !repair && !allow && spec.Checksum == ""
	if !serve {
		defer n.restoring.Remove(on.UID(), string(into.Layers[0]))
	}
	t.setState(api.ImageStarting, "")
	l := n.restoringLayer(image, on, into.Layers[0])
	t.setRestoring(readableLayer{}, l.Problem)
	root, size, readable, err := l.Open(ctx) // which needs no slot
	if err != nil {
		return got, err
	}
	if checksum, file, err := l.File(ctx); err != nil || file {
		n.restoring.Remove(on.UID(), string(into.Layers[0])) // volumes read no file
		if err == nil {
			err = slot(ctx)
		}
		if err != nil {
			return got, err
		}
		spec.Checksum = cmp.Or(spec.Checksum, checksum)
		return n.importFile(ctx, t, image, on, spec, repair)
	}
	if readable && !allow {
		if spec.Digest != "" && spec.Digest != root {
			return got, api.Errorf(api.Corrupt, "image %s: the backup has other content than the image had", spec.Name)
		}
		into.Digest = root
	}
	if serve {
		if readable {
			t.setRestoring(readableLayer{digest: root, size: size}, l.Problem)
		} else {
			t.setRestoring(readableLayer{why: l.Unreadable()}, l.Problem)
		}
		if readable && image.Spec.SourceParameters[api.RestoreOnDemand] == "true" {
			t.setState(api.ImagePending, "")
			<-ctx.Done() // readers alone decide which chunks are fetched
			return got, context.Cause(ctx)
		}
	}
	if err := slot(ctx); err != nil { // readers need no slot
		return got, err
	}
	t.setState(api.ImageInProgress, "")
	fill := l.Fill(allow)
	fill.Pause = t.pause
	defer func() {
		if err == nil && len(fill.Damaged) > 0 {
			t.progress.SetNotice("zeros take the place of " + api.CountText(len(fill.Damaged), "damaged chunk") +
				" of the backup: " + fill.DamagedText())
		}
	}()
	if repair {
		return importer.RepairFromOrigin(ctx, on, spec, spare, &t.progress,
			func(ctx context.Context) (importer.Result, error) {
				return importer.Restore(ctx, on, into, fill, nil, &t.progress)
			})
	}
	return importer.Restore(ctx, on, into, fill, func(ctx context.Context, img block.Image) error {
		if spec.Checksum == "" || spec.Checksum == fill.Checksum() { // each chunk was compared with its digest
			return nil
		}
		x, ok := on.(block.Exporter)
		if !ok {
			return api.Errorf(api.Unsupported, "disk %s cannot compare the checksum", on.UID())
		}
		return compareChecksum(ctx, x, img)
	}, &t.progress)
}

// importFile makes a copy from the backup of the file that the image was made of, as an import of the file does.
func (n *copyReconciler) importFile(ctx context.Context, t *transfer, image *api.BackingImage, on block.Layers,
	spec importer.Spec, repair bool) (importer.Result, error) {
	t.setState(api.ImageInProgress, "")
	open := func(ctx context.Context) (*origin.Stream, error) {
		b, err := n.opts.OpenBackup(ctx, image.RestoredURL())
		if err != nil {
			return nil, err
		}
		f, is := b.(block.FileBackup)
		if !is {
			return nil, errors.Join(api.Errorf(api.Corrupt, "image %s: the backup is no file any more", spec.Name), b.Close())
		}
		return fileStream(f), nil
	}
	if !repair {
		return importer.Import(ctx, on, spec, &t.progress, open)
	}
	spare := importer.RepairSpec(spec)
	return importer.RepairFromOrigin(ctx, on, spec, spare, &t.progress,
		func(ctx context.Context) (importer.Result, error) {
			return importer.Import(ctx, on, spare, &t.progress, open)
		})
}

// fileStream is the file of a backup as the origin of an import, which closes the backup.
func fileStream(b block.FileBackup) *origin.Stream {
	file := b.File()
	return &origin.Stream{
		ReadCloser: struct {
			io.Reader
			io.Closer
		}{io.NewSectionReader(file, 0, b.Size()), b},
		Size: b.Size(), Name: "the file in the backup",
		Ahead: func(p []byte, off int64) error {
			_, err := io.ReadFull(io.NewSectionReader(file, off, int64(len(p))), p)
			return err
		},
	}
}

// restoringLayer is the layer that a restore makes, or will make.
func (n *copyReconciler) restoringLayer(image *api.BackingImage, on block.Layers, uid api.UID) *restoring.Layer {
	url := image.RestoredURL()
	return n.restoring.Add(on, string(uid), func(ctx context.Context) (block.Backup, error) {
		return n.opts.OpenBackup(ctx, url)
	})
}

// serveFailed lets volumes read the layer of a restore that failed, and that no transfer tries again now.
func (s *copyStep) serveFailed() {
	if s.st.Readable && s.c.Spec.From == "" && s.img.Spec.SourceType == api.SourceRestore && s.opts.OpenBackup != nil {
		s.restoringLayer(s.img, s.on, s.c.Spec.Layers[0]).Prepare()
	}
}

// endRestoring ends the service of a copy's layers from a backup.
func (n *copyReconciler) endRestoring(c *api.ImageCopy) {
	for _, uid := range c.Spec.Layers {
		n.restoring.Remove(string(c.Spec.Disk), string(uid))
	}
}

// askHealed makes restores ask for damaged chunks again when a node has healed backups. It wakes no reconciler.
func (n *copyReconciler) askHealed(_ context.Context, e event.UpdateEvent,
	_ workqueue.TypedRateLimitingInterface[ctrl.Request]) {
	was, is := e.ObjectOld.(*api.BackupTarget), e.ObjectNew.(*api.BackupTarget)
	if isHealed(was.Status.Verification, is.Status.Verification) {
		n.restoring.Healed()
	}
}

// isHealed reports whether nodes stored blobs of a repository again, or blobs are not damaged any more. HealedBlobs
// counts from 0 in each verification: when one begins or ends, all of its heals may be new.
func isHealed(was, is *api.VerificationFact) bool {
	if is == nil {
		return false
	}
	if was == nil {
		was = &api.VerificationFact{}
	}
	seen := was.HealedBlobs
	if !was.StartedAt.Equal(is.StartedAt) || !was.EndedAt.Equal(is.EndedAt) {
		seen = 0
	}
	return is.HealedBlobs > seen || is.DamagedBlobs < was.DamagedBlobs
}

// attachedLayers lists the layers below attached volumes that this node reads in backups.
func (n *copyReconciler) attachedLayers(ctx context.Context) (layers []restoring.AttachedLayer) {
	var copies api.ImageCopyList
	if err := n.List(ctx, &copies, client.UnsafeDisableDeepCopy); err != nil {
		n.log.Warn("image copies cannot be listed; no restore has precedence", "err", err)
		return nil
	}
	for i := range copies.Items {
		c := &copies.Items[i]
		if c.Spec.Node != n.node || !c.Status.Readable || len(c.Spec.Layers) == 0 || c.DeletionTimestamp != nil {
			continue
		}
		var volumes api.VolumeList
		if err := n.List(ctx, &volumes, client.MatchingFields{watch.ByImage: c.Spec.Image},
			client.UnsafeDisableDeepCopy); err != nil {
			n.log.Warn("the volumes of an image cannot be listed; its restore has no precedence", "image", c.Spec.Image,
				"err", err)
			continue
		}
		if slices.ContainsFunc(volumes.Items, func(v api.Volume) bool { return v.Status.AttachedNode != "" }) {
			layers = append(layers, restoring.AttachedLayer{Disk: string(c.Spec.Disk), UID: string(c.Spec.Layers[0]),
				Size: c.Status.VirtualSize})
		}
	}
	return layers
}

// localDisks lists the open disks of the node.
func (n *copyReconciler) localDisks(ctx context.Context) (disks []block.Layers) {
	var node api.Node
	if err := n.Get(ctx, client.ObjectKey{Name: n.node}, &node); err != nil {
		n.log.Info("a restore does not see all disks of the node", "err", err)
	}
	for i := range node.Status.Disks {
		if on, err := n.disks(node.Status.Disks[i].UID); err == nil { // the disk's own condition says why not
			disks = append(disks, on)
		}
	}
	return disks
}
