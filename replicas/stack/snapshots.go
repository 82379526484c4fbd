package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/diskfs"
	"drover.io/drover/replicas/stack/format"
)

// Same reports whether o is the same cut: a snapshot may have several tries, each with its own instant.
func (s Snapshot) Same(o Snapshot) bool { return s.UID == o.UID && s.Created.Equal(o.Created) }

// findCut returns the index of a snapshot, or -1. A zero instant stands for every instant.
func (m Meta) findCut(c block.SnapshotCut) int {
	is := func(s Snapshot) bool { return s.UID == c.UID && (c.Created.IsZero() || s.Created.Equal(c.Created)) }
	return slices.IndexFunc(m.Snapshots, is)
}

// Chain returns the layers of a snapshot of the given layer, bottom first.
func (m Meta) Chain(layer string) ([]string, error) {
	var above []string
	for at := layer; ; {
		if i := slices.Index(m.Layers, at); i >= 0 {
			slices.Reverse(above)
			return append(slices.Clone(m.Layers[:i+1]), above...), nil
		}
		i := slices.IndexFunc(m.Branches, func(b Branch) bool { return b.Layer == at })
		if i < 0 || len(above) > len(m.Branches) {
			return nil, api.Errorf(api.Corrupt, "layer %s is not in the stack", layer)
		}
		above = append(above, at)
		if at = m.Branches[i].Below; at == "" {
			slices.Reverse(above)
			return above, nil
		}
	}
}

// AllLayers returns the layers of the stack and of its branches.
func (m Meta) AllLayers() []string {
	list := slices.Clone(m.Layers)
	for _, b := range m.Branches {
		list = append(list, b.Layer)
	}
	return list
}

// pruneBranches removes branches that no snapshot and no merge in progress needs, and returns their layers.
func (m *Meta) pruneBranches() (gone []string) {
	need := map[string]bool{}
	var tops []string
	for _, s := range m.Snapshots {
		tops = append(tops, s.Layer)
	}
	if m.Merge != nil {
		tops = append(tops, m.Merge.Upper)
	}
	for _, at := range tops {
		for at != "" && !need[at] {
			need[at] = true
			i := slices.IndexFunc(m.Branches, func(b Branch) bool { return b.Layer == at })
			if i < 0 {
				break
			}
			at = m.Branches[i].Below
		}
	}
	m.Branches = slices.DeleteFunc(m.Branches, func(b Branch) bool {
		if !need[b.Layer] {
			gone = append(gone, b.Layer)
		}
		return !need[b.Layer]
	})
	return gone
}

// dropSnapshot removes a snapshot, and returns the layers that the stack does not need any more.
func (m *Meta) dropSnapshot(uid string) (gone []string) {
	m.Snapshots = slices.DeleteFunc(slices.Clone(m.Snapshots), func(s Snapshot) bool { return s.UID == uid })
	return m.pruneBranches()
}

// DropSnapshot removes a snapshot; a missing snapshot is no error. A layer below the head stays until a merge; unneeded
// layers beside the head are removed.
func (r *Replica) DropSnapshot(uid string) error {
	r.disk.syncReferencesEarly()
	r.mu.Lock()
	defer r.mu.Unlock()
	unlock, err := r.disk.Lock()
	if err != nil {
		return r.nameError(err)
	}
	defer unlock()
	var gone []string
	if err := r.commitChange(func(m *Meta) { gone = m.dropSnapshot(uid) }); err != nil {
		return r.nameError(err)
	}
	return r.nameError(r.disk.dropUnnamed(gone))
}

// changeClosed applies change to the record of a closed replica and commits the record, and then removes the layers
// that change returns and no other record names. After the commit, durable or not, errors are of kind busy: the change
// did not fail.
func (d *Disk) changeClosed(uid string, change func(m *Meta) (gone []string, err error)) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("replica %s on disk %s: %w", uid, d.Root, diskfs.Classify(err))
		}
	}()
	if _, err := d.readStack(uid); errors.Is(err, fs.ErrNotExist) {
		return api.Errorf(api.NotFound, "the replica does not exist: %w", err)
	} else if err != nil {
		return err
	}
	d.syncReferencesEarly()
	dir := d.Join(replicaDir, uid)
	owner, err := d.FS.Open(dir+"/"+ownerFile, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer owner.Close()
	if err := diskfs.TryLock(owner, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return api.Errorf(api.Busy, "another process or session has the replica open")
	} else if err != nil {
		return err
	}
	unlock, err := d.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	m, err := d.readStack(uid)
	if err != nil {
		return err
	}
	gone, err := change(&m)
	if err != nil {
		return err
	}
	err = d.writeStack(dir, m)
	if err != nil && !errors.Is(err, format.ErrUnsure) {
		return err
	}
	if err == nil {
		err = errors.Join(d.removeFormerHeads(dir, m.Head), d.dropUnnamed(gone))
	}
	if err != nil { // the next reader of the record finds the change
		return api.Errorf(api.Busy, "the change is committed, and its cleanup is not done yet; try again: %w", err)
	}
	return nil
}

// DropSnapshot removes a snapshot of a closed replica.
func (d *Disk) DropSnapshot(replica, uid string) error {
	return d.changeClosed(replica, func(m *Meta) ([]string, error) { return m.dropSnapshot(uid), nil })
}

// Revert gives a closed replica the content of a snapshot. Writes since the newest snapshot are lost; newer snapshots
// stay. The size stays, too, with zeros beyond the size of the snapshot. epoch is the epoch of the volume: the replica
// refuses sessions of earlier epochs from then on, and its intents do not cover replicas that were not reverted.
func (d *Disk) Revert(ctx context.Context, replica, snapshot string, epoch int64) error {
	return d.changeClosed(replica, func(m *Meta) ([]string, error) {
		i := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == snapshot })
		if i < 0 {
			return nil, api.Errorf(api.NotFound, "snapshot %s does not exist", snapshot)
		}
		if m.Merge != nil {
			return nil, api.Errorf(api.Busy, "two layers of the replica are being merged; try again after the merge")
		}
		chain, err := m.Chain(m.Snapshots[i].Layer)
		if err != nil {
			return nil, err
		}
		dir := d.Join(replicaDir, replica)
		if err := d.raiseIntents(dir, epoch); err != nil {
			return nil, err
		}
		m.Reverted = max(m.Reverted, epoch)
		if epoch > m.Epoch {
			m.Epoch, m.Incarnation, m.EngineNode = epoch, 0, "" // no engine has this epoch
		}
		m.Head = nextHead(m.Head)
		base := dir + "/" + m.Head
		for _, name := range []string{base + dataSuffix, base + zeroSuffix} {
			if err := file.RemoveAll(d.FS, name); err != nil {
				return nil, err
			}
		}
		head, err := d.FS.Open(base+dataSuffix, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(head.Truncate(m.Size), head.Datasync(), head.Close()); err != nil {
			return nil, err
		}
		if err := errors.Join(format.WriteFile(d.FS, base+zeroSuffix, format.ZeroHeader()), d.FS.SyncDir(dir)); err != nil {
			return nil, err
		}
		// Layers of the head that are not in the snapshot become a branch; the branch of the snapshot becomes the head's
		// stack.
		below := ""
		for k, layer := range m.Layers {
			if k >= len(chain) || chain[k] != layer {
				m.Branches = append(m.Branches, Branch{layer, below})
			}
			below = layer
		}
		m.Branches = slices.DeleteFunc(m.Branches, func(b Branch) bool { return slices.Contains(chain, b.Layer) })
		m.Layers = chain
		return m.pruneBranches(), ctx.Err()
	})
}

// raiseIntents makes the intents of a closed replica relative to epoch: they do not cover members of earlier epochs.
func (d *Disk) raiseIntents(dir string, epoch int64) error {
	name := dir + "/" + intentsFile
	h, err := d.FS.Open(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	data, err := io.ReadAll(io.NewSectionReader(h, 0, format.MaxIntentsSize))
	if err = errors.Join(err, h.Close()); err != nil {
		return err
	}
	t, err := format.DecodeIntents(data)
	if err != nil || t.Epoch >= epoch {
		return err
	}
	t.Epoch = epoch
	return format.ReplaceFile(d.FS, name, format.EncodeIntents(t))
}
