package stack

import (
	"slices"

	"drover.io/drover/replicas/stack/layer"
)

// Another member of the volume repairs a damaged chunk of a layer: the member has other layers, but shows the layer's
// blocks in a snapshot. The chunk's digest decides whether the content is right; otherwise nothing is written.

// Broken is a damaged chunk of a layer.
type Broken struct {
	Layer string `json:"layer"`
	Off   int64  `json:"off"`
	Len   int64  `json:"len"`
	// Snap is the snapshot that shows most of the layer's blocks; empty: the present content of the replica.
	Snap string `json:"snap,omitempty"`
}

// mostBroken bounds an answer.
const mostBroken = 256

// Broken returns damaged chunks of the replica's layers, without the chunks that no member can repair.
func (r *Replica) Broken() []Broken {
	m, d := r.Meta(), r.disk
	var all []Broken
	for _, uid := range m.AllLayers() {
		rec, err := d.Record(uid)
		if err != nil {
			continue // it is not finished, or on another disk
		}
		list := d.KnownDamage(uid, rec.Size)
		if len(list) == 0 {
			continue
		}
		snap := m.nearestSnapshot(uid)
		for _, g := range list {
			for off := g.Off &^ (chunkSize - 1); off < g.Off+g.Len && len(all) < mostBroken; off += chunkSize {
				if !d.IsHopeless(m.UID, uid, off) {
					all = append(all, Broken{uid, off, min(chunkSize, rec.Size-off), snap})
				}
			}
		}
	}
	return all
}

// nearestSnapshot returns the snapshot with a layer and the fewest layers above; empty: no snapshot has the layer.
func (m Meta) nearestSnapshot(layer string) string {
	best, snap := len(m.Layers)+len(m.Branches)+1, ""
	for _, s := range m.Snapshots {
		chain, err := m.Chain(s.Layer)
		if at := slices.Index(chain, layer); err == nil && at >= 0 && len(chain)-at < best {
			best, snap = len(chain)-at, s.UID
		}
	}
	return snap
}

// Hopeless records, in memory, that no member of the volume has the content of a damaged chunk. The next process asks
// the members again.
func (r *Replica) Hopeless(uid string, off int64) {
	r.disk.MarkHopeless(layer.ChunkOf{Replica: r.Meta().UID, Layer: uid, Off: off})
}
