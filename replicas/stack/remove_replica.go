package stack

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
)

// RemoveReplica removes a replica and the layers without another reference. The disk frees the space in the background.
// No replica of that uid is no error; an open replica is an error of kind in use.
func (d *Disk) RemoveReplica(uid string) error {
	_, err := d.TakeReplica(uid)
	return err
}

// TakeReplica is RemoveReplica, and reports whether layers of other replicas may have become mergeable.
func (d *Disk) TakeReplica(uid string) (mergeable bool, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("remove replica %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if err := api.UID(uid).Validate(); err != nil {
		return true, err
	}
	d.syncReferencesEarly()
	unlock, err := d.Lock()
	if err != nil {
		return true, err
	}
	defer unlock()
	open, err := d.Locked(d.Join(replicaDir, uid, ownerFile))
	if err != nil {
		return true, err
	}
	if open {
		return true, api.Errorf(api.InUse, "the replica is open")
	}
	m, err := d.readStack(uid)
	if errors.Is(err, fs.ErrNotExist) {
		return true, d.removeHalfMade(replicaDir, uid)
	}
	if err != nil {
		return true, d.toTrash(replicaDir, orphanPrefix, uid)
	}
	if err := d.toTrash(replicaDir, gonePrefix, uid); err != nil {
		return true, err
	}
	layers := m.AllLayers()
	if m.Merge != nil { // its result may be half made
		layers = append(layers, m.Merge.Result)
	}
	seen := d.scanReferences()
	if seen.unreadableError() != nil {
		return true, nil // as in dropUnnamed
	}
	return freesFor(seen.all, uid, layers), d.dropLayers(layers, namedBy(seen.all), seen)
}

// freesFor reports whether, without the removed replica, one of the layers has a single reference, in a replica. If the
// removed replica has a pin, which is removed next, freesFor reports true.
func freesFor(all []*reference, gone string, layers []string) bool {
	by := map[string][]*reference{}
	for _, n := range all {
		if n.pin == gone {
			return true
		}
		for _, l := range n.layers {
			if of := by[l]; len(of) == 0 || of[len(of)-1] != n { // once, if it names it twice
				by[l] = append(of, n)
			}
		}
	}
	return slices.ContainsFunc(layers, func(l string) bool { return len(by[l]) == 1 && by[l][0].replica != "" })
}
