package stack

import (
	"errors"
	"fmt"
	"io/fs"

	"drover.io/drover/api"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
)

// Stack returns the record of a replica, open or closed.
func (d *Disk) Stack(replica string) (Meta, error) {
	m, err := d.readStack(replica)
	if errors.Is(err, fs.ErrNotExist) {
		err = api.Errorf(api.NotFound, "the replica does not exist: %w", err)
	}
	if err != nil {
		return Meta{}, fmt.Errorf("replica %s on disk %s: %w", replica, d.Root, diskfs.Classify(err))
	}
	return m, nil
}

// Empty reports whether neither the head nor a layer holds data or zero records.
func (r *Replica) Empty() bool {
	r.metaMu.Lock()
	head, m := r.head, r.meta.clone()
	r.metaMu.Unlock()
	for _, uid := range m.Layers {
		if empty, err := r.disk.Empty(uid); err != nil || !empty {
			return false
		}
	}
	first, _, err := file.NextData(int(head.Fd()), 0, m.Size)
	return err == nil && first >= m.Size
}

// Mergeable returns the replicas, with their volumes, that have two mergeable layers as far as the references tell: no
// snapshot needs the lower layer alone, and no other record names one of the two. An unreadable record may name every
// layer: then no replica is mergeable.
func (d *Disk) Mergeable() (volumes map[string]string, err error) {
	unlock, err := d.Lock()
	if err != nil {
		return nil, fmt.Errorf("disk %s: %w", d.Root, diskfs.Classify(err))
	}
	all, ofReplicas, ofImages := d.readReferences()
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
			continue // without a read of the record, for disks with a thousand clones
		}
		m, err := d.readStack(n.replica)
		if err != nil {
			continue // removed meanwhile
		}
		needed := map[string]bool{}
		for _, s := range m.Snapshots {
			needed[s.Layer] = true
		}
		for _, two := range m.mergeablePairs(needed) {
			if names[two[0]] == 1 && names[two[1]] == 1 {
				volumes[n.replica] = n.volume
			}
		}
	}
	return volumes, nil
}
