// Package export writes the content of an image or a snapshot into a file, raw or as qcow2. The package opens the
// layers on the disks of this machine, beside the processes that use the layers; the locks of an open layer announce
// its readers. No goroutine outlives a call.
package export

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/driver/cli"
	"drover.io/drover/imagestore/format/qcow2"
	"drover.io/drover/replicas/stack"
)

// Run carries out `drover image export` and `drover snapshot export`; `drover volume export` exports a new snapshot.
// Run implements cli.Exporter.
func Run(ctx context.Context, c client.Client, o cli.ExportOptions) (err error) {
	src, err := openSource(ctx, c, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	return saveFile(ctx, src, o)
}

// saveFile writes the content of src into a temporary file and renames the file when complete.
func saveFile(ctx context.Context, src block.Source, o cli.ExportOptions) error {
	if _, err := os.Lstat(o.File); err == nil && !o.Force {
		return api.Errorf(api.Exists, "file %s exists already: choose another name, or --force", o.File)
	}
	part := o.File + ".part"
	if err := os.Remove(part); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := writeFile(ctx, part, src, o); err != nil {
		if rerr := os.Remove(part); !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		return fmt.Errorf("%s is not written: %w", o.File, err)
	}
	if err := os.Rename(part, o.File); err != nil {
		return err
	}
	if o.Progress != nil { // an empty source reports no progress
		o.Progress(src.Size(), src.Size())
	}
	return file.OS.SyncDir(filepath.Dir(o.File))
}

// writeFile writes the whole file and syncs the data.
func writeFile(ctx context.Context, name string, src block.Source, o cli.ExportOptions) (err error) {
	if o.Format == "qcow2" {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		err = qcow2.Write(ctx, f, src, qcow2.WriteOptions{Compress: o.Compress, Progress: o.Progress})
		return errors.Join(err, f.Sync(), f.Close())
	}
	sink, err := file.Create(name, src.Size(), 0o600)
	if err != nil {
		return err
	}
	err = block.Copy(ctx, sink, src, block.CopyOptions{Progress: o.Progress})
	if err == nil {
		err = sink.Sync(ctx)
	}
	return errors.Join(err, sink.Close())
}

// openSource opens the image or snapshot of the options on a disk of this machine.
func openSource(ctx context.Context, c client.Client, o cli.ExportOptions) (block.Source, error) {
	disks, err := localDisks(ctx, c)
	if err != nil {
		return nil, err
	}
	if o.Image != "" {
		return openImage(ctx, c, disks, o.Image)
	}
	var s api.Snapshot
	if err := c.Get(ctx, client.ObjectKey{Name: o.Snapshot}, &s); err != nil {
		return nil, api.Explain(err, "snapshot %s", o.Snapshot)
	}
	var v api.Volume
	if err := c.Get(ctx, client.ObjectKey{Name: s.Spec.Volume}, &v); err != nil {
		return nil, api.Explain(err, "volume %s of snapshot %s", s.Spec.Volume, s.Name)
	}
	var reps api.ReplicaList
	if err := c.List(ctx, &reps); err != nil {
		return nil, api.Explain(err, "list replicas")
	}
	members := reps.Holders(&v, &s)
	var why []error
	for i := range members {
		r := &members[i]
		on := disks[r.Spec.Disk]
		if on == nil || r.Status.Mode != api.ReplicaCurrent {
			continue
		}
		src, err := openSnapshot(ctx, disks, on, string(r.Spec.UID), &s)
		if err == nil || ctx.Err() != nil {
			return src, err
		}
		why = append(why, err)
	}
	if len(why) == 0 {
		return nil, errElsewhere("snapshot", s.Name)
	}
	return nil, errors.Join(why...)
}

func errElsewhere(what, name string) error {
	return api.Errorf(api.NotFound, "%s %s is on no disk of this machine: run this on a node that has it", what, name)
}

// localDisks returns the disks of all nodes that this machine can open.
func localDisks(ctx context.Context, c client.Client) (map[api.UID]*stack.Disk, error) {
	var nodes api.NodeList
	if err := c.List(ctx, &nodes); err != nil {
		return nil, api.Explain(err, "list nodes")
	}
	disks := map[api.UID]*stack.Disk{}
	for _, n := range nodes.Items {
		for _, st := range n.Status.Disks {
			if d, err := stack.Open(st.Path); err == nil && api.UID(d.UID()) == st.UID {
				disks[st.UID] = d
			}
		}
	}
	return disks, nil
}

func openImage(ctx context.Context, c client.Client, disks map[api.UID]*stack.Disk, name string) (block.Source, error) {
	var img api.BackingImage
	if err := c.Get(ctx, client.ObjectKey{Name: name}, &img); err != nil {
		return nil, api.Explain(err, "image %s", name)
	}
	if img.Status.ReadyCopies == 0 {
		return nil, api.Errorf(api.Unavailable, "image %s is not ready: it is %s", name, img.Status.State)
	}
	err := errElsewhere("image", name)
	for _, copied := range img.Status.Copies {
		on := disks[copied.Disk]
		if on == nil || copied.State != api.ImageReady {
			continue
		}
		var rec block.Image
		if rec, err = on.Image(string(img.Status.UUID)); err == nil {
			return on.OpenStack(rec.Layers, roundToBlocks(rec.VirtualSize))
		}
	}
	return nil, err
}

// roundToBlocks rounds a size up to whole blocks, because layers are padded.
func roundToBlocks(n int64) int64 { return (n + block.Size - 1) / block.Size * block.Size }

// openSnapshot opens the layers of a snapshot. Other disks of the machine supply the layers that the replica's disk
// lacks. A merge may replace layers meanwhile: then openSnapshot reads the stack again.
func openSnapshot(ctx context.Context, disks map[api.UID]*stack.Disk, on *stack.Disk, replica string,
	s *api.Snapshot) (block.Source, error) {
	places := []*stack.Disk{on}
	for _, d := range disks {
		if d != on {
			places = append(places, d)
		}
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		m, err := on.Stack(replica)
		if err != nil {
			return nil, err
		}
		i := slices.IndexFunc(m.Snapshots, func(x stack.Snapshot) bool { return x.UID == string(s.Status.UID) })
		if i < 0 {
			return nil, api.Errorf(api.NotFound, "snapshot %s is not on disk %s", s.Name, on.Path())
		}
		chain, err := m.Chain(m.Snapshots[i].Layer)
		if err != nil {
			return nil, err
		}
		src, err := stack.OpenLayers(places, chain, s.Status.RestoreSize)
		if err == nil || tries == 100 || !api.Is(err, api.Busy) && !api.Is(err, api.NotFound) {
			return src, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("snapshot %s: %w", s.Name, ctx.Err())
		}
	}
}
