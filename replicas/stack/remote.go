package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// A replica may name layers that its disk does not have yet. Sources supply such a layer chunk by chunk (hydrate.go),
// until a copy is finished on the disk and Replica.Home changes to the copy. A source is another disk of the machine or
// another machine. A layer of another disk needs no preparation: whoever opens the layer first begins to hydrate it.

// SourceDisk is a disk of this machine that is a source of a layer.
type SourceDisk struct {
	UID  string `json:"uid"`
	Path string `json:"path"`
}

// RemoteLayer is a layer that a replica reads from sources until the replica's disk has a copy.
type RemoteLayer struct {
	UID string
	// From is the disk that had the layer when hydration began; empty: no disk of the machine had. hydrating.json keeps
	// it, because a replica must find its source without the API, also a replica that has no device on this node.
	From SourceDisk
	Why  error // no source gives a chunk that a read waits for; nil: no read waits
}

// hydratingRecord is hydrating.json.
type hydratingRecord struct {
	layerRecord             // an empty root: the source had frozen the layer
	From        *SourceDisk `json:"from,omitempty"`
}

func (rec hydratingRecord) remote() RemoteLayer {
	l := RemoteLayer{UID: rec.UID}
	if rec.From != nil {
		l.From = *rec.From
	}
	return l
}

// FetchFunc reads [off, off+len(buf)) of a layer from one of its sources; holes are zeros. It asks the next source if
// one fails, or if check refuses the bytes of one.
type FetchFunc func(ctx context.Context, l RemoteLayer, off int64, buf []byte, check func([]byte) error) error

// Sources lets layers be read that the disk lacks: fetch reads them, and others are the machine's other disks, from
// which a layer is hydrated without preparation; nil: there are none. Without fetch a layer of another disk is opened
// there, for a process that opens no replicas. Before anybody uses the disk.
func (d *Disk) Sources(others func() []*Disk, fetch FetchFunc) {
	if d.others, d.fetch = others, fetch; others == nil {
		d.others = noDisks
	}
}

func noDisks() []*Disk { return nil }

// Hydrating reports whether a layer can be read that a source has.
func (d *Disk) Hydrating(uid string) bool {
	_, err := d.hydratingRecord(uid)
	return err == nil
}

func (d *Disk) hydratingRecord(uid string) (hydratingRecord, error) {
	var rec hydratingRecord
	if d.fetch == nil {
		return rec, api.Errorf(api.NotFound, "no finished layer of that uid")
	}
	err := format.ReadMeta(d.fs, d.path(hydratingDir, uid, hydratingFile), formatHydrating, &rec)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return rec, api.Errorf(api.NotFound, "no finished layer of that uid")
	case err == nil && (rec.UID != uid || rec.Size <= 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize):
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", hydratingFile)
	}
	return rec, err
}

// Hydrate lets a finished layer of another machine be read here: src is it, root its digest, and sums what its file of
// digests holds. src is read for its map alone.
func (d *Disk) Hydrate(ctx context.Context, uid, root string, src block.Source, sums []byte) error {
	return d.hydrate(ctx, hydratingRecord{layerRecord: layerRecord{UID: uid, Root: root}}, src, sums)
}

func (d *Disk) hydrate(ctx context.Context, rec hydratingRecord, src block.Source, sums []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("hydrate layer %s on disk %s: %w", rec.UID, d.root, classify(err))
		}
	}()
	if err := api.UID(rec.UID).Validate(); err != nil {
		return err
	}
	kinds, err := describe(ctx, rec.Root, src, sums)
	if err != nil {
		return err
	}
	rec.Size, rec.Created = src.Size(), time.Now().UTC().Truncate(time.Second)
	d.thirst.mu.Lock() // after all that waits for the source
	defer d.thirst.mu.Unlock()
	if _, err := d.hydratingRecord(rec.UID); !api.Is(err, api.NotFound) && !api.Is(err, api.Corrupt) {
		return err
	}
	dir := d.path(hydratingDir, rec.UID)
	if err := d.fs.Mkdir(d.path(hydratingDir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := file.RemoveAll(d.fs, dir); err != nil {
		return err
	}
	if err := d.fs.Mkdir(dir, 0o700); err != nil {
		return err
	}
	data, err := d.fs.Open(dir+"/"+dataFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = atOnce(func() error { return errors.Join(data.Truncate(rec.Size), data.Datasync(), data.Close()) },
		func() error { return format.WriteMap(d.fs, dir+"/"+mapFile, kinds) },
		func() error {
			if rec.Root == "" {
				return nil
			}
			return format.WriteFile(d.fs, dir+"/"+sumsFile, sums)
		})
	err = errors.Join(err, d.syncDirs(dir, d.path(hydratingDir), d.root))
	if err != nil {
		return errors.Join(err, file.RemoveAll(d.fs, dir))
	}
	return format.WriteMeta(d.fs, dir+"/"+hydratingFile, formatHydrating, rec)
}

// describe is the map of a layer, which must match its digests where the layer has some.
func describe(ctx context.Context, root string, src block.Source, sums []byte) (*format.Index, error) {
	size := src.Size()
	if size <= 0 || size%blockSize != 0 || size > api.MaxVolumeSize {
		return nil, api.Errorf(api.Corrupt, "%d is not a size that a layer can have", size)
	}
	kinds := format.NewIndex(size>>blockBits, uint16(block.Hole))
	for off := int64(0); off < size; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		e, err := src.Next(off)
		if err != nil {
			return nil, err
		}
		if e.Len <= 0 || e.Len%blockSize != 0 && e.End() != size {
			return nil, api.Errorf(api.Corrupt, "its map makes no sense at %d", off)
		}
		kinds.Set(off>>blockBits, e.End()>>blockBits, uint16(e.Kind))
		off = e.End()
	}
	if root == "" {
		return &kinds, nil
	}
	want := sumsHeader + (size+chunkSize-1)/chunkSize*sumSize
	if int64(len(sums)) != want || !bytes.Equal(sums[:sumsHeader], format.SumsHeaderOf(size)) {
		return nil, api.Errorf(api.Corrupt, "its digests make no sense")
	}
	if have, err := format.RootDigest(bytes.NewReader(sums), size, &kinds); err != nil {
		return nil, err
	} else if have != root {
		return nil, api.Errorf(api.Corrupt, "its digest is %s, and should be %s", have, root)
	}
	return &kinds, nil
}

// findLayer opens a layer of the disk, or else one that sources supply.
func (d *Disk) findLayer(uid string, flag int, owner bool) (*layer, error) {
	l, err := d.openLayerAs(uid, flag, owner)
	if !api.Is(err, api.NotFound) {
		return l, err
	}
	l, herr := d.openHydrating(uid, flag)
	if herr == nil || !api.Is(herr, api.NotFound) && !api.Is(herr, api.Corrupt) {
		return l, herr
	}
	if api.Is(herr, api.Corrupt) {
		err = herr
	}
	for _, o := range d.others() {
		if d.fetch == nil { // this process writes nothing for the layer
			if l, oerr := o.openLayer(uid, flag&o.direct); !api.Is(oerr, api.NotFound) {
				return l, oerr
			}
			continue
		}
		herr := hydrateFrom(o, d, uid)
		if herr == nil {
			return d.openHydrating(uid, flag)
		}
		if !api.Is(herr, api.NotFound) {
			err = herr
		}
	}
	return nil, err
}

// hydrateFrom begins to hydrate a layer of another disk of the machine.
func hydrateFrom(o, d *Disk, uid string) error {
	l, err := o.openLayer(uid, 0)
	if err != nil {
		return err
	}
	src := &source{l: l, page: -1}
	var sums []byte
	if l.rec.Root != "" { // else the layer is frozen: nobody has made its digests yet
		sums, err = o.Sums(uid)
	}
	if err == nil {
		rec := hydratingRecord{layerRecord: layerRecord{UID: uid, Root: l.rec.Root}, From: &SourceDisk{o.uid, o.root}}
		err = d.hydrate(context.Background(), rec, src, sums)
	}
	return errors.Join(err, src.Close())
}

// ReadLayer reads n bytes of a layer of the disk, finished or frozen. So many reads are under way at most that a disk
// which hangs keeps few callers; the others wait until ctx ends.
func (d *Disk) ReadLayer(ctx context.Context, uid string, off int64, n int) ([]byte, error) {
	select {
	case d.reading <- struct{}{}:
		defer func() { <-d.reading }()
	case <-ctx.Done():
		return nil, api.Errorf(api.Unavailable, "disk %s does not answer: %w", d.root, ctx.Err())
	}
	l, err := d.openLayer(uid, d.direct)
	if err != nil {
		return nil, err
	}
	buf := alignedBuffer(n)
	have, err := l.readAt(buf, off)
	if have == n {
		err = nil
	} else if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err = errors.Join(err, l.close()); err != nil {
		return nil, fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
	}
	return buf, nil
}

// remoteSizes are the sizes of those of some layers that the disk does not have and sources do.
func (d *Disk) remoteSizes(layers []string) (map[string]int64, error) {
	lacks, err := d.LackingOf(layers)
	if err != nil {
		return nil, err
	}
	sizes := map[string]int64{}
	for _, uid := range lacks {
		if rec, err := d.hydratingRecord(uid); err == nil {
			sizes[uid] = rec.Size
			continue
		}
		for _, o := range d.others() {
			if n, err := o.sizeOf(uid); err == nil {
				sizes[uid] = n
				break
			}
		}
	}
	return sizes, nil
}

// Remote are the layers that the replica reads from sources.
func (r *Replica) Remote() (layers []RemoteLayer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.layers {
		if l.hy == nil || slices.ContainsFunc(layers, func(o RemoteLayer) bool { return o.UID == l.rec.UID }) {
			continue
		}
		one := l.hy.rec.remote()
		if p := l.hy.failed.Load(); p != nil {
			one.Why = *p
		}
		layers = append(layers, one)
	}
	return layers
}

// Hydrates reports whether the replica reads layers from sources, or has one open that a copy has replaced.
func (r *Replica) Hydrates() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.replaced) > 0 || slices.ContainsFunc(r.layers, func(l *layer) bool { return l.hy != nil })
}

// OnLost has fn called, from the loop's thread, when reads begin or cease to wait for a source. Before any I/O.
func (r *Replica) OnLost(fn func(lost bool)) { r.onLost = fn }

// hydrating are the layers that the replica reads from sources. The disk may have a copy by now.
func (r *Replica) hydrating() (map[string]bool, error) {
	layers := map[string]bool{}
	err := r.onLoop(func() {
		for _, l := range r.layers {
			if l.hy != nil {
				layers[l.rec.UID] = true
			}
		}
	})
	return layers, err
}

// Home makes the replica read the copies that its disk has by now. I/O goes on; I/O on what they replace is waited for
// in the end.
func (r *Replica) Home(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metaMu.Lock()
	closed := r.closed
	r.metaMu.Unlock()
	if closed {
		return r.name(errClosed)
	}
	old := r.replaced // that could not be closed before
	r.replaced = nil
	for i, l := range r.layers {
		if l.hy == nil {
			continue
		}
		own, err := r.disk.openLayerAs(l.rec.UID, r.disk.direct, true)
		if api.Is(err, api.NotFound) {
			continue
		}
		// A layer that was frozen when hydration began has no digest; the copier has compared the digest of later.
		if err == nil && (l.rec.Root != "" && own.rec.Root != l.rec.Root || own.rec.Size != l.rec.Size) {
			err = errors.Join(api.Errorf(api.Corrupt, "layer %s differs from the one of its source", l.rec.UID), own.close())
		}
		if err != nil {
			return r.name(errors.Join(err, r.closeReplaced(ctx, old)))
		}
		// Neither the worker nor the loop uses the list meanwhile.
		r.work.do(func() {
			err = r.onLoop(func() {
				r.layers[i], r.fds[i+1] = own, int(own.data.Fd())
				r.hydrates = slices.ContainsFunc(r.layers, func(l *layer) bool { return l.hy != nil })
				r.tellSource()
				r.tellFetched() // reads that were set aside need no fetch any more
			})
		})
		if err != nil {
			return r.name(errors.Join(err, own.close(), r.closeReplaced(ctx, old)))
		}
		old = append(old, l)
		slog.Info("layer is on the replica's own disk now", "replica", r.meta.UID, "volume", r.meta.Volume, "layer",
			l.rec.UID)
	}
	return r.name(r.closeReplaced(ctx, old))
}

// closeReplaced closes layers that copies have replaced, once no I/O on them is under way.
func (r *Replica) closeReplaced(ctx context.Context, old []*layer) error {
	if len(old) == 0 {
		return nil
	}
	release, err := r.holdSoon(ctx)
	if err != nil {
		r.replaced = append(r.replaced, old...)
		return fmt.Errorf("layers that copies have replaced stay open for now: %w", err)
	}
	defer release()
	var errs []error
	for _, l := range old {
		errs = append(errs, l.close())
	}
	return errors.Join(errs...)
}
