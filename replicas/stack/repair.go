package stack

import (
	"slices"

	"drover.io/drover/replicas/stack/layer"
)

// A chunk of a layer that is damaged is put right with what another replica of the volume holds there: not the same
// layer, which that one does not have, but a snapshot in which the layer's blocks are to be seen. The chunk's digest
// says whether what comes of it is what the layer has held from the beginning; else nothing is written.

// Broken is a damaged chunk of a layer.
type Broken struct {
	Layer string `json:"layer"`
	Off   int64  `json:"off"`
	Len   int64  `json:"len"`
	// Snap is the snapshot in which most of the layer's blocks are to be seen; empty: it is what the replica holds now.
	Snap string `json:"snap,omitempty"`
}

// mostBroken bounds an answer.
const mostBroken = 256

// Broken are damaged chunks of the replica's layers, but those of which is known that nobody has what they held.
func (r *Replica) Broken() []Broken {
	m, d := r.Meta(), r.disk
	var all []Broken
	for _, uid := range m.all() {
		rec, err := d.Record(uid)
		if err != nil {
			continue // it is not finished, or on another disk
		}
		list := d.KnownDamage(uid, rec.Size)
		if len(list) == 0 {
			continue
		}
		snap := m.shows(uid)
		for _, g := range list {
			for off := g.Off &^ (ChunkSize - 1); off < g.Off+g.Len && len(all) < mostBroken; off += ChunkSize {
				if !d.IsHopeless(m.UID, uid, off) {
					all = append(all, Broken{uid, off, min(ChunkSize, rec.Size-off), snap})
				}
			}
		}
	}
	return all
}

// shows is the snapshot that has a layer, and the fewest others above it; empty: none has.
func (m Meta) shows(layer string) string {
	best, snap := len(m.Layers)+len(m.Branches)+1, ""
	for _, s := range m.Snapshots {
		chain, err := m.Chain(s.Layer)
		if at := slices.Index(chain, layer); err == nil && at >= 0 && len(chain)-at < best {
			best, snap = len(chain)-at, s.UID
		}
	}
	return snap
}

// Hopeless takes note that no other replica of the volume has what a damaged chunk held. It is forgotten with the
// process: then the others are asked again.
func (r *Replica) Hopeless(uid string, off int64) {
	r.disk.MarkHopeless(layer.ChunkOf{Replica: r.Meta().UID, Layer: uid, Off: off})
}
