package stack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// Stack is what the record of a replica says, whether it is open or not.
func (d *Disk) Stack(replica string) (Meta, error) {
	m, err := d.readStack(replica)
	if errors.Is(err, fs.ErrNotExist) {
		err = api.Errorf(api.NotFound, "there is none: %w", err)
	}
	if err != nil {
		return Meta{}, fmt.Errorf("replica %s on disk %s: %w", replica, d.root, classify(err))
	}
	return m, nil
}

// LayerSize is how long a layer is, and what it takes on its disk; Root is the digest of what it holds, once it has
// one.
type LayerSize struct {
	Size int64  `json:"size"`
	Used int64  `json:"used"`
	Root string `json:"root,omitempty"`
}

// LayerSize is how long a layer of this disk is, and what it takes on it, in bytes.
func (d *Disk) LayerSize(uid string) (size, used int64, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("layer %s on disk %s: %w", uid, d.root, classify(err))
		}
	}()
	rec, err := d.layerRecord(uid)
	if api.Is(err, api.NotFound) {
		var frozen frozenRecord
		if frozen, err = d.frozenRecord(uid); api.Is(err, api.NotFound) { // finished between the two looks
			rec, err = d.layerRecord(uid)
		} else {
			rec.Size = frozen.Size
		}
	}
	if err != nil {
		return 0, 0, err
	}
	h, err := d.fs.Open(d.path(layersDir, uid, dataFile), os.O_RDONLY, 0)
	if err != nil {
		return 0, 0, err
	}
	defer h.Close()
	st, err := h.Stat()
	if err != nil {
		return 0, 0, err
	}
	return rec.Size, allocated(st), nil
}

// LayerRoot is the digest of what a layer of this disk holds; empty while it has none.
func (d *Disk) LayerRoot(uid string) string {
	rec, err := d.layerRecord(uid)
	if err != nil {
		return ""
	}
	return rec.Root
}

// hurryFile, in the folder of a frozen layer, says that somebody waits for its digests, in whichever process.
const hurryFile = "hurry"

// gently is eachChunk on the caller's thread alone, at rest for most of the time unless somebody waits.
func (d *Disk) gently(uid string) eachBy {
	return func(ctx context.Context, kinds *format.Index, fn func(c int64, buf []byte) error) error {
		return eachChunkGently(ctx, kinds, func() bool {
			there, err := d.exists(d.path(layersDir, uid, hurryFile))
			return there && err == nil
		}, fn)
	}
}

// hurry has the rest of the digests of a frozen layer made without a rest.
func (d *Disk) hurry(uid string) {
	if h, err := d.fs.Open(d.path(layersDir, uid, hurryFile), os.O_RDWR|os.O_CREATE, 0o600); err == nil {
		_ = h.Close() // it is a wish
	}
}

func eachChunkGently(ctx context.Context, kinds *format.Index, hurry func() bool,
	fn func(c int64, buf []byte) error) error {
	const rest = 2 // times what the work took
	buf := alignedBuffer(int(chunkSize))
	for c := range kinds.Chunks() {
		began := time.Now()
		if err := fn(c, buf); err != nil {
			return err
		}
		if hurry() {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			continue
		}
		pause := time.NewTimer(rest * time.Since(began))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return context.Cause(ctx)
		}
	}
	return nil
}

// Empty is Blank of the whole stack: neither the head nor a layer holds anything but zeros that were never written.
func (r *Replica) Empty() bool {
	r.metaMu.Lock()
	head, m := r.head, r.meta.clone()
	r.metaMu.Unlock()
	for _, uid := range m.Layers {
		if empty, err := r.disk.emptyLayer(uid); err != nil || !empty {
			return false
		}
	}
	first, _, err := file.NextData(int(head.Fd()), 0, m.Size)
	return err == nil && first >= m.Size
}

func (d *Disk) emptyLayer(uid string) (bool, error) {
	rec, err := d.layerRecord(uid)
	if !api.Is(err, api.NotFound) {
		return err == nil && rec.Data == 0 && rec.Zero == 0, err
	}
	if _, err := d.frozenRecord(uid); err != nil {
		return false, err
	}
	h, err := d.fs.Open(d.path(layersDir, uid, dataFile), os.O_RDONLY, 0)
	if err != nil {
		return false, err
	}
	defer h.Close()
	first, _, err := file.NextData(int(h.Fd()), 0, math.MaxInt64)
	return err == nil && first == math.MaxInt64, err
}

// Mergeable are the replicas, with their volumes, in which two layers can be merged as far as the names of layers tell:
// nothing needs the lower one by itself, and nothing else on the disk names the two. A record that cannot be read may
// name any: then there are none.
func (d *Disk) Mergeable() (volumes map[string]string, err error) {
	unlock, err := d.lock()
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.root, classify(err))
	}
	all, ofReplicas, ofImages := d.namings()
	unlock()
	if err := errors.Join(ofReplicas, ofImages); err != nil {
		return nil, err
	}
	names := map[string]int{}
	for _, n := range all {
		for _, l := range n.layers {
			names[l]++
		}
	}
	volumes = map[string]string{}
	for _, n := range all {
		own := 0
		for _, l := range n.layers {
			if names[l] == 1 {
				own++
			}
		}
		if n.replica == "" || own < 2 {
			continue // of a thousand clones, none is looked at
		}
		m, err := d.readStack(n.replica)
		if err != nil {
			continue // it went
		}
		needed := map[string]bool{}
		for _, s := range m.Snapshots {
			needed[s.Layer] = true
		}
		for _, two := range m.neighbours(needed) {
			if names[two[0]] == 1 && names[two[1]] == 1 {
				volumes[n.replica] = n.volume
			}
		}
	}
	return volumes, nil
}
