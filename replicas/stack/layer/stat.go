package layer

import (
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Digest implements block.Layers.
func (d *Store) Digest(uid string) (root string, allocated int64, err error) {
	if err := api.UID(uid).Validate(); err != nil {
		return "", 0, fmt.Errorf("layer: %w", err)
	}
	rec, err := d.Record(uid)
	if err != nil {
		return "", 0, fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
	}
	return rec.Root, rec.Allocated, nil
}

// LayerSize is the size of a layer and the room that the layer takes on the disk. Root is the root digest; empty: the
// layer is not finished.
type LayerSize struct {
	Size int64  `json:"size"`
	Used int64  `json:"used"`
	Root string `json:"root,omitempty"`
}

// LayerSize returns the size of a layer of this disk and the room that the layer takes, in bytes.
func (d *Store) LayerSize(uid string) (size, used int64, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	rec, err := d.Record(uid)
	if api.Is(err, api.NotFound) {
		var frozen FrozenRecord
		if frozen, err = d.Frozen(uid); api.Is(err, api.NotFound) { // finished between the two reads
			rec, err = d.Record(uid)
		} else {
			rec.Size = frozen.Size
		}
	}
	if err != nil {
		return 0, 0, err
	}
	h, err := d.FS.Open(d.Join(Dir, uid, DataFile), os.O_RDONLY, 0)
	if err != nil {
		return 0, 0, err
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil {
		return 0, 0, err
	}
	return rec.Size, diskfs.Allocated(st), nil
}

// LayerRoot is the root digest of a layer of this disk; empty: the layer is not finished.
func (d *Store) LayerRoot(uid string) string {
	rec, err := d.Record(uid)
	if err != nil {
		return ""
	}
	return rec.Root
}

// Empty reports whether a layer holds neither data nor zeros.
func (d *Store) Empty(uid string) (bool, error) {
	rec, err := d.Record(uid)
	if !api.Is(err, api.NotFound) {
		return err == nil && rec.Data == 0 && rec.Zero == 0, err
	}
	if _, err := d.Frozen(uid); err != nil {
		return false, err
	}
	h, err := d.FS.Open(d.Join(Dir, uid, DataFile), os.O_RDONLY, 0)
	if err != nil {
		return false, err
	}
	defer h.Close()
	first, _, err := file.NextData(int(h.Fd()), 0, math.MaxInt64)
	return err == nil && first == math.MaxInt64, err
}

// SizeOnDisk is the room that a file takes, in bytes.
func (d *Store) SizeOnDisk(name string) (int64, error) {
	if d.FS == file.OS { // without an open file: callers ask for every layer
		var st unix.Stat_t
		err := diskfs.RetryEINTR(func() error { return unix.Stat(name, &st) })
		return st.Blocks * 512, err
	}
	h, err := d.FS.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil {
		return 0, err
	}
	return diskfs.Allocated(st), nil
}

// StackSize is the size of the largest of some layers.
func (d *Store) StackSize(layers []string) (size int64, err error) {
	for _, uid := range layers {
		n, _, err := d.LayerSize(uid)
		if err != nil {
			return 0, err
		}
		size = max(size, n)
	}
	return size, nil
}

// TopSize is the size of the topmost of some layers; 0: there are none.
func (d *Store) TopSize(layers []string) (size int64, err error) {
	if len(layers) > 0 {
		size, _, err = d.LayerSize(layers[len(layers)-1])
	}
	return size, err
}

// ExplainLack makes an error of kind NotFound one of kind Busy if the disk does not have all of some layers yet.
func (d *Store) ExplainLack(layers []string, err error) error {
	if !api.Is(err, api.NotFound) {
		return err
	}
	if lacks, e := d.LackingOf(layers); e != nil || len(lacks) == 0 {
		return err
	}
	return api.Errorf(api.Busy, "disk %s does not have all layers yet; try again: %w", d.Root, err)
}

// LackingOf returns the layers that are not on this disk.
func (d *Store) LackingOf(layers []string) (none []string, err error) {
	for _, uid := range layers {
		here := false
		for _, record := range []string{LayerFile, FrozenFile, LayerFile} { // again: finished between the two reads
			if here, err = d.Exists(d.Join(Dir, uid, record)); here || err != nil {
				break
			}
		}
		if here && err == nil {
			var away bool
			away, err = d.MergedAway(uid)
			here = !away
		}
		if err != nil {
			return nil, fmt.Errorf("layer %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
		if !here {
			none = append(none, uid)
		}
	}
	return none, nil
}

// DataIn counts the bytes of data that a finished layer holds in ranges, and in all.
func (d *Store) DataIn(uid string, ranges []block.Span) (n, all int64, err error) {
	l, err := d.OpenLayer(uid, 0)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	if _, frozen := l.Map.(*FrozenMap); frozen {
		return 0, 0, api.Errorf(api.Busy, "layer %s is being finished", uid)
	}
	kinds, err := format.IndexOf(l.Map)
	if err != nil {
		return 0, 0, fmt.Errorf("layer %s: %w", uid, err)
	}
	for _, s := range ranges {
		end := min((s.Off+s.Len)>>blockBits, kinds.Blocks)
		for b := s.Off >> blockBits; b < end; {
			v, k := kinds.Run(b, end)
			if block.Kind(v) == block.Data {
				n += k << blockBits
			}
			b += k
		}
	}
	return n, l.Rec.Data, nil
}

// SizeOf is the size of a layer that a record may name: finished, or frozen and named by another stack. A caller that
// is about to name the layer has the disk's lock.
func (d *Store) SizeOf(uid string) (int64, error) {
	if merging, err := d.BeingMerged(uid); err != nil {
		return 0, err
	} else if merging {
		return 0, api.Errorf(api.Busy, "a merge is in progress; try again")
	}
	rec, err := d.Record(uid)
	if !api.Is(err, api.NotFound) {
		return rec.Size, err
	}
	frozen, ferr := d.Frozen(uid)
	if ferr != nil {
		return 0, err
	}
	named, nerr := d.records.IsNamed(uid)
	if nerr != nil {
		return 0, nerr
	}
	if !named {
		return 0, err // the layer is still a head
	}
	return frozen.Size, nil
}

// RemoteSizes returns the sizes of the layers that only sources have.
func (d *Store) RemoteSizes(layers []string) (map[string]int64, error) {
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
			if n, err := o.SizeOf(uid); err == nil {
				sizes[uid] = n
				break
			}
		}
	}
	return sizes, nil
}
