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

// holdLayers finds the layers of an export on its disk.
func (n *copyReconciler) holdLayers(ctx context.Context, c *api.ImageCopy, on block.Layers, st *api.ImageCopyStatus) time.Duration {
	if len(st.Layers) > 0 {
		return n.opts.RetryMin // the controller is about to take them over
	}
	if st.State == api.ImageFailed && !mayRetry(c, st) {
		return max(time.Until(st.NextTry.Time), 0)
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

// recordExport makes the image of layers that are held.
func (n *copyReconciler) recordExport(ctx context.Context, j *transfer, slot func(context.Context) error, on block.Layers,
	want importer.Spec, size int64) (importer.Result, error) {
	if err := slot(ctx); err != nil {
		return importer.Result{}, err
	}
	j.setState(api.ImageInProgress, "")
	x, ok := on.(block.Exporter)
	if !ok {
		return importer.Result{}, api.Errorf(api.Unsupported, "disk %s has no snapshots", on.UID())
	}
	img := block.Image{UID: string(want.UID), Name: want.Name, Format: "raw", VirtualSize: size, Checksum: want.Checksum,
		Object: want.Object}
	for _, l := range want.Layers {
		img.Layers = append(img.Layers, string(l))
	}
	if want.Checksum != "" {
		if err := compareChecksum(ctx, x, img); err != nil {
			return importer.Result{}, err
		}
	}
	for {
		_, err := x.Name(ctx, img)
		if err == nil {
			return importer.Find(on, want)
		}
		if err = waitIfBusy(ctx, err); err != nil {
			return importer.Result{}, err
		}
	}
}

// waitIfBusy waits a moment where something was busy, and returns any other error.
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

// digestKind is the kind of a job that makes the digests of a copy that is used meanwhile.
const digestKind = "digests"

// lacksDigest reports whether a copy that is there names layers without digests.
func lacksDigest(c *api.ImageCopy, g importer.Result) bool {
	return c.Spec.Export != nil && g.Digest == ""
}

// makeDigests gives a copy that names a snapshot's layers the digests that they lack.
func (n *copyReconciler) makeDigests(ctx context.Context, c *api.ImageCopy, on block.Layers, want importer.Spec, img block.Image) error {
	x, ok := on.(block.Exporter)
	if !ok {
		return api.Errorf(api.Unsupported, "disk %s has no snapshots", on.UID())
	}
	_, err := n.transfers.start(ctx, c, digestKind,
		func(ctx context.Context, _ *transfer, slot func(context.Context) error) (importer.Result, error) {
			if err := slot(ctx); err != nil {
				return importer.Result{}, err
			}
			for {
				_, err := x.Digests(ctx, img)
				if err == nil {
					return importer.Find(on, want)
				}
				if err = waitIfBusy(ctx, err); err != nil {
					return importer.Result{}, err
				}
			}
		})
	return err
}

// compareChecksum compares the content with a SHA-512 that the user gave.
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
