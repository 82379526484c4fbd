package repo

import (
	"bytes"
	"context"
	"iter"
	"path/filepath"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
)

// packUse tells how much of a pack the snapshots need.
type packUse struct {
	id     blob.ID
	size   int64 // bytes in the store, by the list of packs
	sealed int64 // bytes of all blobs
	used   int64 // bytes of the needed blobs that the index finds in the pack

	planned int64 // used, when the sweep decided to hide the pack

	file    int32 // the first index file that names the pack, an index of view.files
	listed  bool  // the list of packs has the pack
	indexed bool  // an index file names the pack
	hidden  bool  // in every index file that names the pack
	young   bool  // a session that runs has written the pack
	lost    bool  // the store does not have the pack
	marked  bool  // a verification found the pack damaged
}

// packUses are the packs of the store and of the index. A repository of 10 TiB has 655,000 packs, so the packs of the
// store are in lists, of less than 100 bytes each.
type packUses struct {
	listed [256][]packUse       // packs in the store's list, by the first byte of the id, in the order of the ids
	others map[blob.ID]*packUse // packs that index files alone name: lost, or younger than the list
	more   map[blob.ID][]int32  // further index files that name a pack
}

// listPacks returns all packs in the store, with their sizes.
func (r *Repository) listPacks(ctx context.Context) (*packUses, error) {
	u := &packUses{others: map[blob.ID]*packUse{}, more: map[blob.ID][]int32{}}
	err := r.store.List(ctx, dataFolder, func(o target.Object) error {
		if id, err := blob.Parse(filepath.Base(o.Name)); err == nil && packName(id) == o.Name {
			u.listed[id[0]] = append(u.listed[id[0]], packUse{id: id, size: o.Size, listed: true})
		}
		return nil
	})
	if err != nil {
		return nil, api.Errorf(api.KindOf(err), "the packs cannot be listed: %w", err)
	}
	for i, list := range u.listed {
		slices.SortFunc(list, func(a, b packUse) int { return bytes.Compare(a.id[:], b.id[:]) })
		u.listed[i] = slices.CompactFunc(list, func(a, b packUse) bool { return a.id == b.id })
	}
	return u, nil
}

// countListed is the number of packs in the store.
func (u *packUses) countListed() (n int) {
	for _, list := range u.listed {
		n += len(list)
	}
	return n
}

// find finds a pack that the store's list or an index file has; nil: none.
func (u *packUses) find(id blob.ID) *packUse {
	list := u.listed[id[0]]
	i, ok := slices.BinarySearchFunc(list, id, func(p packUse, id blob.ID) int { return bytes.Compare(p.id[:], id[:]) })
	if ok {
		return &list[i]
	}
	return u.others[id]
}

// findIndexed finds a pack that an index file names; nil: none.
func (u *packUses) findIndexed(id blob.ID) *packUse {
	if p := u.find(id); p != nil && p.indexed {
		return p
	}
	return nil
}

// addFile notes that an index file names a pack, and returns the pack; first says that no earlier file names it.
func (u *packUses) addFile(id blob.ID, file int) (p *packUse, first bool) {
	if p = u.find(id); p == nil {
		p = &packUse{id: id}
		u.others[id] = p
	}
	if p.indexed {
		u.more[id] = append(u.more[id], int32(file)) //nolint:gosec // a repository has thousands
		return p, false
	}
	p.indexed, p.hidden, p.file = true, true, int32(file) //nolint:gosec // a repository has thousands
	return p, true
}

// filesOf are the index files that name a pack.
func (u *packUses) filesOf(p *packUse) iter.Seq[int] {
	return func(yield func(int) bool) {
		if !p.indexed || !yield(int(p.file)) {
			return
		}
		for _, i := range u.more[p.id] {
			if !yield(int(i)) {
				return
			}
		}
	}
}

// all are the packs of the list, and then the other ones.
func (u *packUses) all() iter.Seq[*packUse] {
	return func(yield func(*packUse) bool) {
		for _, list := range u.listed {
			for i := range list {
				if !yield(&list[i]) {
					return
				}
			}
		}
		for _, p := range u.others {
			if !yield(p) {
				return
			}
		}
	}
}

// indexed are the packs that an index file names.
func (u *packUses) indexed() iter.Seq[*packUse] {
	return func(yield func(*packUse) bool) {
		for p := range u.all() {
			if p.indexed && !yield(p) {
				return
			}
		}
	}
}
