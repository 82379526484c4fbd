package layer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// ErrNotFetched answers a read of blocks that the disk begins to fetch from a source. The read ends at once, so that a
// drain of I/O never waits for a source.
var ErrNotFetched = api.Errorf(api.Busy, "a block of the layer has to be fetched first")

// OpenFirst opens a layer on the first disk that has the layer.
func OpenFirst(disks []*Store, uid string, flag int) (*Layer, error) {
	coming := false
	for _, d := range disks {
		l, err := d.OpenLayer(uid, flag&d.Direct)
		if !api.Is(err, api.NotFound) {
			return l, err
		}
		coming = coming || d.Hydrating(uid)
	}
	if coming {
		return nil, api.Errorf(api.Unavailable, "layer %s is not copied to this machine yet", uid)
	}
	return nil, api.Errorf(api.NotFound, "no disk has layer %s", uid)
}

// SourceDisk is a disk of this machine that is a source of a layer.
type SourceDisk struct {
	UID  string `json:"uid"`
	Path string `json:"path"`
}

// RemoteLayer is a layer that a replica reads from sources until the replica's disk has a copy.
type RemoteLayer struct {
	UID string
	// From is the disk that had the layer when hydration began; empty: no disk of the machine. hydrating.json holds From,
	// because a replica must find its source without the API, also a replica that has no device on this node.
	From SourceDisk
	Why  error // no source supplies a chunk that a read waits for; nil: no read waits
}

// hydratingRecord is hydrating.json.
type hydratingRecord struct {
	Record             // an empty root: the source had frozen the layer
	From   *SourceDisk `json:"from,omitempty"`
}

func (rec hydratingRecord) Remote() RemoteLayer {
	l := RemoteLayer{UID: rec.UID}
	if rec.From != nil {
		l.From = *rec.From
	}
	return l
}

// FetchFunc reads [off, off+len(buf)) of a layer from one of its sources; holes are zeros. After an error, or if check
// refuses the bytes, FetchFunc asks the next source.
type FetchFunc func(ctx context.Context, l RemoteLayer, off int64, buf []byte, check func([]byte) error) error

// SetSources names the sources of layers that the disk lacks: fetch reads from sources, and others are the stores of
// the machine's other disks, which need no Hydrate; nil: no other disks. Without fetch, Find opens a layer on the other
// disk, for a process that opens no replicas. SetSources comes before any other use of the store.
func (d *Store) SetSources(others func() []*Store, fetch FetchFunc) {
	if d.others, d.fetch = others, fetch; others == nil {
		d.others = noDisks
	}
}

func noDisks() []*Store { return nil }

// Hydrating reports whether the disk hydrates a layer.
func (d *Store) Hydrating(uid string) bool {
	_, err := d.hydratingRecord(uid)
	return err == nil
}

func (d *Store) hydratingRecord(uid string) (hydratingRecord, error) {
	var rec hydratingRecord
	if d.fetch == nil {
		return rec, api.Errorf(api.NotFound, "the finished layer does not exist")
	}
	err := format.ReadMeta(d.FS, d.Join(HydratingDir, uid, hydratingFile), formatHydrating, &rec)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return rec, api.Errorf(api.NotFound, "the finished layer does not exist")
	case err == nil && (rec.UID != uid || rec.Size <= 0 || rec.Size%blockSize != 0 || rec.Size > api.MaxVolumeSize):
		return rec, api.Errorf(api.Corrupt, "%s does not describe this layer", hydratingFile)
	}
	return rec, err
}

// Hydrate prepares a finished layer of another machine: afterwards Find opens the layer, and fetch reads the content.
// src supplies the map, root is the root digest, and sums the file of digests.
func (d *Store) Hydrate(ctx context.Context, uid, root string, src block.Source, sums []byte) error {
	return d.prepareHydration(ctx, hydratingRecord{Record: Record{UID: uid, Root: root}}, src, sums)
}

func (d *Store) prepareHydration(ctx context.Context, rec hydratingRecord, src block.Source, sums []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("hydrate layer %s on disk %s: %w", rec.UID, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(rec.UID).Validate(); err != nil {
		return err
	}
	kinds, err := readVerifiedMap(ctx, rec.Root, src, sums)
	if err != nil {
		return err
	}
	rec.Size, rec.Created = src.Size(), time.Now().UTC().Truncate(time.Second)
	d.hydrations.mu.Lock() // after all reads of the source
	defer d.hydrations.mu.Unlock()
	if _, err := d.hydratingRecord(rec.UID); !api.Is(err, api.NotFound) && !api.Is(err, api.Corrupt) {
		return err
	}
	dir := d.Join(HydratingDir, rec.UID)
	if err := d.FS.Mkdir(d.Join(HydratingDir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := file.RemoveAll(d.FS, dir); err != nil {
		return err
	}
	if err := d.FS.Mkdir(dir, 0o700); err != nil {
		return err
	}
	data, err := d.FS.Open(dir+"/"+DataFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = diskfs.AtOnce(func() error { return errors.Join(data.Truncate(rec.Size), data.Datasync(), data.Close()) },
		func() error { return format.WriteMap(d.FS, dir+"/"+MapFile, kinds) },
		func() error {
			if rec.Root == "" {
				return nil
			}
			return format.WriteFile(d.FS, dir+"/"+SumsFile, sums)
		})
	err = errors.Join(err, d.SyncDirs(dir, d.Join(HydratingDir), d.Root))
	if err != nil {
		return errors.Join(err, file.RemoveAll(d.FS, dir))
	}
	return format.WriteMeta(d.FS, dir+"/"+hydratingFile, formatHydrating, rec)
}

// readVerifiedMap reads the map of a layer and compares map and digests with the root digest, if the layer has one.
func readVerifiedMap(ctx context.Context, root string, src block.Source, sums []byte) (*format.Index, error) {
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
			return nil, api.Errorf(api.Corrupt, "the map of the source is damaged at %d", off)
		}
		kinds.Set(off>>blockBits, e.End()>>blockBits, uint16(e.Kind))
		off = e.End()
	}
	if root == "" {
		return &kinds, nil
	}
	want := sumsHeader + (size+chunkSize-1)/chunkSize*sumSize
	if int64(len(sums)) != want || !bytes.Equal(sums[:sumsHeader], format.SumsHeaderOf(size)) {
		return nil, api.Errorf(api.Corrupt, "the digests of the source are damaged")
	}
	if have, err := format.RootDigest(bytes.NewReader(sums), size, &kinds); err != nil {
		return nil, err
	} else if have != root {
		return nil, api.Errorf(api.Corrupt, "the root digest of the source is %s, not %s", have, root)
	}
	return &kinds, nil
}

// Find opens a layer of the disk, or a layer that sources supply.
func (d *Store) Find(uid string, flag int, owner bool) (*Layer, error) {
	l, err := d.OpenLayerAs(uid, flag, owner)
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
		if d.fetch == nil { // this process hydrates no layers
			if l, oerr := o.OpenLayer(uid, flag&o.Direct); !api.Is(oerr, api.NotFound) {
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
func hydrateFrom(o, d *Store, uid string) error {
	l, err := o.OpenLayer(uid, 0)
	if err != nil {
		return err
	}
	src := &Source{l: l, page: -1}
	var sums []byte
	if l.Rec.Root != "" { // otherwise frozen, without digests
		sums, err = o.Sums(uid)
	}
	if err == nil {
		rec := hydratingRecord{Record: Record{UID: uid, Root: l.Rec.Root}, From: &SourceDisk{o.uid, o.Root}}
		err = d.prepareHydration(context.Background(), rec, src, sums)
	}
	return errors.Join(err, src.Close())
}

// ReadLayer reads n bytes of a finished or frozen layer. The number of reads in progress is bounded, so that a hanging
// disk blocks few callers; other callers wait until ctx ends.
func (d *Store) ReadLayer(ctx context.Context, uid string, off int64, n int) ([]byte, error) {
	select {
	case d.reading <- struct{}{}:
		defer func() { <-d.reading }()
	case <-ctx.Done():
		return nil, api.Errorf(api.Unavailable, "disk %s does not answer: %w", d.Root, ctx.Err())
	}
	l, err := d.OpenLayer(uid, d.Direct)
	if err != nil {
		return nil, err
	}
	buf := block.AlignedBuffer(n)
	have, err := l.ReadAt(buf, off)
	if have == n {
		err = nil
	} else if err == nil || errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err = errors.Join(err, l.Close()); err != nil {
		return nil, fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
	}
	return buf, nil
}
