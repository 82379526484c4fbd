package snapshot

import (
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// node is a snapshot in a stack, with its neighbours.
type node struct {
	stack.Snapshot
	parent   string
	children map[string]bool
}

// buildTree finds the neighbours of all snapshots of a stack in one pass over the layers.
func buildTree(m stack.Meta) *Tree {
	below := map[string]string{}
	for i, l := range m.Layers {
		if i > 0 {
			below[l] = m.Layers[i-1]
		}
	}
	for _, b := range m.Branches {
		below[b.Layer] = b.Below
	}
	all := map[string]*node{}
	names := map[string]*node{} // by layer; a layer with several snapshots has the last
	before := map[*node]*node{} // the snapshot of the same layer before
	for _, s := range slices.SortedStableFunc(slices.Values(m.Snapshots), func(a, b stack.Snapshot) int {
		return a.Created.Compare(b.Created)
	}) {
		k := &node{Snapshot: s}
		if was := names[s.Layer]; was != nil {
			before[k] = was
		}
		all[s.UID], names[s.Layer] = k, k
	}
	nearest := map[string]*node{} // the snapshot of a layer, or else of the nearest layer below
	find := func(layer string) *node {
		var path []string
		var found *node
		for at := layer; at != ""; at = below[at] {
			if k, known := nearest[at]; known {
				found = k
				break
			}
			path = append(path, at)
			if found = names[at]; found != nil {
				break
			}
		}
		for _, at := range path {
			nearest[at] = found
		}
		return found
	}
	child := func(of *node, name string) {
		if of.children == nil {
			of.children = map[string]bool{}
		}
		of.children[name] = true
	}
	for _, s := range m.Snapshots {
		p := before[all[s.UID]]
		if p == nil {
			p = find(below[s.Layer])
		}
		if p != nil {
			all[s.UID].parent = p.Name
			child(p, s.Name)
		}
	}
	if n := len(m.Layers); n > 0 {
		if p := find(m.Layers[n-1]); p != nil {
			child(p, api.VolumeHead)
		}
	}
	return &Tree{all}
}

// Tree has the snapshots of one replica's stack.
type Tree struct {
	all map[string]*node // by uid
}

// TreeOf reads the snapshots of a replica's stack, and keeps the result until a snapshot changes.
func (ss *Snapshots) TreeOf(r *api.Replica, disk *stack.Disk) (*Tree, error) {
	ss.mu.Lock()
	known := ss.trees[r.Spec.UID]
	ss.mu.Unlock()
	if known != nil {
		return known, nil
	}
	var m stack.Meta
	m, open := ss.attachments.OpenedMeta(r.Spec.Volume, r.Spec.UID)
	if !open {
		var err error
		if m, err = disk.Stack(string(r.Spec.UID)); err != nil {
			return nil, err
		}
	}
	t := buildTree(m)
	ss.KeepTree(r.Spec.UID, t)
	return t, nil
}

// KeepTree keeps the tree of a replica until a snapshot changes.
func (ss *Snapshots) KeepTree(replica api.UID, t *Tree) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.trees[replica] = t
}

// forgetTree has the next TreeOf read the stack again.
func (ss *Snapshots) forgetTree(replica api.UID) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	delete(ss.trees, replica)
}

// neighbours are the names of a snapshot's parent and children.
func (k *node) neighbours() []string {
	if k == nil {
		return nil
	}
	names := []string{k.parent}
	for name := range k.children {
		names = append(names, name)
	}
	return names
}

// formatInstant is the time of a cut, as in the status of an object.
func formatInstant(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }
