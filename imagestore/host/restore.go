package host

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/host/restoring"
	"drover.io/drover/imagestore/importer"
)

// restoreBackup makes a copy from a backup, or with repair repairs the copy below replicas. Volumes read the layer
// meanwhile, unless a checksum has to be compared first, or damaged chunks become zeros.
func (n *copyReconciler) restoreBackup(ctx context.Context, t *transfer, slot slotFunc, image *api.BackingImageSpec,
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
	allow := image.SourceParameters[api.RestoreAllowDamaged] == "true"
	serve := !repair && !allow && spec.Checksum == ""
	if !serve {
		defer n.restoring.Remove(on.UID(), string(into.Layers[0]))
		if err := slot(ctx); err != nil {
			return got, err
		}
	}
	t.setState(api.ImageStarting, "")
	l := n.restoringLayer(image, on, into.Layers[0])
	root, size, readable, err := l.Open(ctx)
	if err != nil {
		return got, err
	}
	if readable && !allow {
		if spec.Digest != "" && spec.Digest != root {
			return got, api.Errorf(api.Corrupt, "image %s: the backup has other content than the image had", spec.Name)
		}
		into.Digest = root
	}
	if serve {
		if readable {
			t.setRestoring(readableLayer{root, size}, l.Problem)
		}
		if err := slot(ctx); err != nil { // readers need no slot
			return got, err
		}
	}
	t.setState(api.ImageInProgress, "")
	fill := l.Fill(allow)
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

// restoringLayer is the layer that a restore makes, or will make.
func (n *copyReconciler) restoringLayer(image *api.BackingImageSpec, on block.Layers, uid api.UID) *restoring.Layer {
	url := image.SourceParameters[api.RestoreBackupURL]
	return n.restoring.Add(on, string(uid), func(ctx context.Context) (block.Backup, error) {
		return n.opts.OpenBackup(ctx, url)
	})
}

// serveFailed lets volumes read the layer of a restore that failed, and that no transfer tries again now.
func (s *copyStep) serveFailed() {
	if s.st.Readable && s.c.Spec.From == "" && s.img.Spec.SourceType == api.SourceRestore && s.opts.OpenBackup != nil {
		s.restoringLayer(&s.img.Spec, s.on, s.c.Spec.Layers[0]).Prepare()
	}
}

// endRestoring ends the service of a copy's layers from a backup.
func (n *copyReconciler) endRestoring(c *api.ImageCopy) {
	for _, uid := range c.Spec.Layers {
		n.restoring.Remove(string(c.Spec.Disk), string(uid))
	}
}
