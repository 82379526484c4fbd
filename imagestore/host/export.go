package host

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"io"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/imagestore/importer"
)

// holdLayers finds the layers of an export on its disk and keeps them there.
func (n *copyReconciler) holdLayers(ctx context.Context, c *api.ImageCopy, on block.Layers, st *api.ImageCopyStatus,
) time.Duration {
	if len(st.Layers) > 0 {
		return n.opts.RetryMin // the planner is about to pass them on
	}
	if st.State == api.ImageFailed && !mayRetry(c, st) {
		return untilRetry(st)
	}
	x, ok := on.(block.Exporter)
	err := api.Errorf(api.Unsupported, "disk %s has no snapshots", on.UID())
	if ok {
		var layers []string
		var size int64
		layers, size, err = x.Hold(ctx, string(c.Spec.UUID), c.Spec.Image, string(c.Spec.Export.Replica),
			string(c.Spec.Export.SnapshotUID))
		for _, l := range layers {
			st.Layers = append(st.Layers, api.UID(l))
		}
		st.VirtualSize = size
	}
	switch {
	case err == nil:
		st.State, st.Message, st.NextTry = api.ImageStarting, "", metav1.Time{}
	case api.Is(err, api.Busy):
		st.State, st.Message = api.ImageStarting, err.Error()
		return 200 * time.Millisecond
	default:
		return n.setFailed(c, st, err, !api.Is(err, api.NotFound))
	}
	return 0
}

// recordExport records the image over layers that the disk holds for the image.
func (n *copyReconciler) recordExport(ctx context.Context, t *transfer, slot slotFunc, on block.Layers,
	spec importer.Spec, size int64) (importer.Result, error) {
	if err := slot(ctx); err != nil {
		return importer.Result{}, err
	}
	t.setState(api.ImageInProgress, "")
	x, ok := on.(block.Exporter)
	if !ok {
		return importer.Result{}, api.Errorf(api.Unsupported, "disk %s has no snapshots", on.UID())
	}
	img := block.Image{UID: string(spec.UID), Name: spec.Name, Format: "raw", VirtualSize: size, Checksum: spec.Checksum,
		Object: spec.Object}
	for _, l := range spec.Layers {
		img.Layers = append(img.Layers, string(l))
	}
	if spec.Checksum != "" {
		if err := compareChecksum(ctx, x, img); err != nil {
			return importer.Result{}, err
		}
	}
	for {
		_, err := x.Name(ctx, img)
		if err == nil {
			return importer.Find(on, spec)
		}
		if err = waitIfBusy(ctx, err); err != nil {
			return importer.Result{}, err
		}
	}
}

// waitIfBusy waits a moment after an error of kind busy, and returns any other error.
func waitIfBusy(ctx context.Context, err error) error {
	if !api.Is(err, api.Busy) {
		return err
	}
	pause := time.NewTimer(200 * time.Millisecond)
	defer pause.Stop()
	select {
	case <-pause.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// digestKind is the kind of a transfer that makes the digests of a copy while volumes use the copy.
const digestKind = "digests"

// lacksDigest reports whether a copy on its disk names layers without digests.
func lacksDigest(c *api.ImageCopy, g importer.Result) bool {
	return c.Spec.Export != nil && g.Digest == ""
}

// makeDigests starts the digests of the layers of a snapshot that a copy names.
func (n *copyReconciler) makeDigests(ctx context.Context, c *api.ImageCopy, on block.Layers, spec importer.Spec,
	img block.Image,
) error {
	x, ok := on.(block.Exporter)
	if !ok {
		return api.Errorf(api.Unsupported, "disk %s has no snapshots", on.UID())
	}
	return n.transfers.startTransfer(ctx, c, digestKind,
		func(ctx context.Context, _ *transfer, slot slotFunc) (importer.Result, error) {
			if err := slot(ctx); err != nil {
				return importer.Result{}, err
			}
			for {
				_, err := x.Digests(ctx, img)
				if err == nil {
					return importer.Find(on, spec)
				}
				if err = waitIfBusy(ctx, err); err != nil {
					return importer.Result{}, err
				}
			}
		})
}

// compareChecksum compares the content with the SHA-512 from the image's spec.
func compareChecksum(ctx context.Context, x block.Exporter, img block.Image) (err error) {
	src, err := x.OpenStack(img.Layers, img.VirtualSize)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	h := sha512.New()
	r := io.NewSectionReader(src, 0, src.Size())
	for buf := make([]byte, block.ChunkSize); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		k, err := r.Read(buf)
		h.Write(buf[:k])
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if is := hex.EncodeToString(h.Sum(nil)); is != img.Checksum {
		return api.Errorf(api.Corrupt, "the SHA-512 of the content is %s, not %s", is, img.Checksum)
	}
	return nil
}
