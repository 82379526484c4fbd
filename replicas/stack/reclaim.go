package stack

import (
	"errors"
	"io/fs"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
)

// A discard over a layer only adds a zero record to the head, because a layer is never written again. When no snapshot
// needs the layer alone any more, a cut and a merge of the two layers free the space.

// Zeroed is how many bytes of the head are recorded as zeros.
func (r *Replica) Zeroed() (int64, error) {
	n := int64(0)
	return n, r.eachZero(func(_, length int64) { n += length })
}

func (r *Replica) eachZero(each func(off, n int64)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.isOpen(); err != nil {
		return err
	}
	r.work.do(func() { r.log.Ranges(each) })
	return nil
}

// Reclaimable returns how many bytes a cut and a merge of the head with the layers below would free through zero
// records, and as cost how many bytes the merge would copy at most.
func (r *Replica) Reclaimable() (gain, cost int64, err error) {
	defer func() { err = r.nameError(diskfs.Classify(err)) }()
	m := r.Meta()
	own, err := r.disk.reclaimableLayers(m)
	if err != nil || len(own) == 0 {
		return 0, 0, err
	}
	var zeros []block.Span
	err = r.eachZero(func(off, n int64) { zeros = append(zeros, block.Span{Off: off, Len: n}) })
	if err != nil || len(zeros) == 0 {
		return 0, 0, err
	}
	below := int64(0)
	for _, uid := range own {
		n, data, err := r.disk.DataIn(uid, zeros)
		switch {
		case api.Is(err, api.NotFound) || api.Is(err, api.Busy) || errors.Is(err, fs.ErrNotExist):
			return 0, 0, nil // being finished, merged, or on another disk
		case err != nil:
			return 0, 0, err
		}
		gain, below = gain+n, below+data
	}
	head, err := r.disk.SizeOnDisk(r.disk.Join(replicaDir, m.UID, m.Head+dataSuffix))
	return gain, min(head, below), err
}

// reclaimableLayers returns the layers right below a head that only the head needs, the newest first.
func (d *Disk) reclaimableLayers(m Meta) ([]string, error) {
	if m.Merge != nil {
		return nil, nil
	}
	unlock, err := d.Lock()
	if err != nil {
		return nil, err
	}
	all, ofReplicas, ofImages := d.readReferences()
	unlock()
	if err := errors.Join(ofReplicas, ofImages); err != nil {
		return nil, err
	}
	needed := map[string]bool{}
	for _, n := range all {
		for _, l := range n.layers {
			needed[l] = needed[l] || n.replica != m.UID
		}
	}
	for _, s := range m.Snapshots {
		needed[s.Layer] = true
	}
	for _, b := range m.Branches {
		needed[b.Below] = true
	}
	var own []string
	for i := len(m.Layers) - 1; i >= 0 && !needed[m.Layers[i]]; i-- {
		own = append(own, m.Layers[i])
	}
	return own, nil
}
