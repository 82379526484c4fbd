package replicas

import (
	"slices"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// snapshotNode is a snapshot in a stack, with its neighbours.
type snapshotNode struct {
	stack.Snapshot
	parent   string
	children map[string]bool
}

// buildSnapshotTree finds the neighbours of all snapshots of a stack, by uid, in one pass over the layers.
func buildSnapshotTree(m stack.Meta) map[string]*snapshotNode {
	below := map[string]string{}
	for i, l := range m.Layers {
		if i > 0 {
			below[l] = m.Layers[i-1]
		}
	}
	for _, b := range m.Branches {
		below[b.Layer] = b.Below
	}
	all := map[string]*snapshotNode{}
	names := map[string]*snapshotNode{}         // by layer; of several snapshots of a layer the last
	before := map[*snapshotNode]*snapshotNode{} // the snapshot of the same layer before
	for _, s := range slices.SortedStableFunc(slices.Values(m.Snapshots), func(a, b stack.Snapshot) int {
		return a.Created.Compare(b.Created)
	}) {
		k := &snapshotNode{Snapshot: s}
		if was := names[s.Layer]; was != nil {
			before[k] = was
		}
		all[s.UID], names[s.Layer] = k, k
	}
	nearest := map[string]*snapshotNode{} // the snapshot of a layer, or of the first below that has one
	find := func(layer string) *snapshotNode {
		var path []string
		var found *snapshotNode
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
	child := func(of *snapshotNode, name string) {
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
	return all
}

// snapshotTree has the snapshots of one replica's stack, as of the last read.
type snapshotTree struct {
	head string // a revert changes the head
	all  map[string]*snapshotNode
}

// treeOf reads the snapshots of a replica's stack, and keeps the result until a snapshot changes.
func (d *Data) treeOf(r *api.Replica, disk *stack.Disk) (*snapshotTree, error) {
	d.mu.Lock()
	known := d.trees[r.Spec.UID]
	d.mu.Unlock()
	if known != nil {
		return known, nil
	}
	var m stack.Meta
	if s := d.session(r.Spec.Volume); s != nil && s.Replica == r.Spec.UID {
		m = s.member().Meta()
	} else {
		var err error
		if m, err = disk.Stack(string(r.Spec.UID)); err != nil {
			return nil, err
		}
	}
	l := &snapshotTree{m.Head, buildSnapshotTree(m)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trees[r.Spec.UID] = l
	return l, nil
}

func (d *Data) forgetTree(replica api.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.trees, replica)
}

// changed forgets the tree of a replica, and wakes the named snapshots.
func (d *Data) changed(replica api.UID, names ...string) {
	d.forgetTree(replica)
	q := d.snapshots.Load()
	if q == nil {
		return
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if name != "" && name != api.VolumeHead {
			(*q).Add(watch.Request(name))
		}
	}
}

// neighbours are the names of a snapshot's parent and children.
func (k *snapshotNode) neighbours() []string {
	if k == nil {
		return nil
	}
	names := []string{k.parent}
	for name := range k.children {
		names = append(names, name)
	}
	return names
}

// instant is the time of a cut as an object has it.
func instant(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }
