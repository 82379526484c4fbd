package repo

import (
	"context"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// packChange is the difference between two index files for a pack.
type packChange int

const (
	hidePack   packChange = iota + 1
	returnPack            // the hidden pack is needed
	dropPack              // the pack is deleted next
)

// A sweep merges index files of less than smallIndex bytes when there are more than manySmall.
const (
	smallIndex = 128 << 10
	manySmall  = 16
)

// plan decides about each pack in step 1, and copies the needed blobs of packs that are mostly garbage.
func (s *sweep) plan(ctx context.Context, v *view) (map[blob.ID]packChange, error) {
	changes := map[blob.ID]packChange{}
	var sparse []blob.ID
	for p := range v.packs.indexed() {
		id := p.id
		switch {
		case p.young && p.used == 0:
			s.stats.SessionPacks++
		case p.young:
		case p.hidden && p.used > 0:
			changes[id] = returnPack
			s.stats.ReturnedPacks++
		case p.hidden, p.used == 0: // a hidden pack stays hidden
			changes[id] = hidePack
		case p.marked: // verification has copied the blobs that can be read
		case p.used*100 < p.sealed*int64(s.o.Threshold):
			sparse = append(sparse, id)
		}
	}
	copied, err := s.copyBlobs(ctx, v, sparse)
	if err != nil {
		return nil, err
	}
	for _, id := range copied {
		p := v.packs.find(id)
		changes[id], p.planned = hidePack, p.used
	}
	for id, change := range changes {
		if change == hidePack && !v.packs.find(id).hidden {
			s.stats.HiddenPacks++
		}
	}
	return changes, nil
}

// rewriteIndex replaces index files. The new files are durable before the old ones are deleted.
func (s *sweep) rewriteIndex(ctx context.Context, v *view, changes map[blob.ID]packChange) error {
	_, old, err := s.writeIndex(ctx, v, changes)
	if err != nil {
		return err
	}
	return s.deleteObjects(ctx, old)
}

// writeIndex writes new index files in place of those that name a changed pack, and of many small ones. The caller
// deletes the old files: until then, every pack counts as before.
func (s *sweep) writeIndex(ctx context.Context, v *view, changes map[blob.ID]packChange) (
	added, old []string, err error) {
	files := v.replacedFiles(changes)
	var file index.FileBuilder
	save := func() error {
		if file.Packs() == 0 {
			return nil
		}
		id, err := s.r.saveFile(ctx, indexFolder, file.Bytes())
		file = index.FileBuilder{}
		if err != nil {
			return api.Errorf(api.KindOf(err), "an index file cannot be written: %w", err)
		}
		v.marker.files[id] = struct{}{}
		added = append(added, indexFolder+id.String())
		return nil
	}
	marked := map[blob.ID]bool{}
	written := map[blob.ID]blob.ID{} // the sum of the entries that were written first
	for _, f := range files {
		_, err := s.r.scanIndexFile(ctx, f, func(p index.Pack) error {
			if p.Damaged {
				if v.packs.findIndexed(p.ID) == nil || changes[p.ID] == dropPack || marked[p.ID] {
					return nil // the pack is deleted
				}
				marked[p.ID] = true
				file.Add(p)
				return nil
			}
			sum := p.Sum()
			first, twice := written[p.ID]
			if twice && sum == first || changes[p.ID] == dropPack { // two files may also name parts of a pack
				return nil
			}
			if !twice {
				written[p.ID] = sum
			}
			v.change(&p, changes[p.ID])
			if file.Full(len(p.Entries)) {
				if err := save(); err != nil {
					return err
				}
			}
			file.Add(p)
			return nil
		})
		if err != nil {
			return added, nil, err
		}
		old = append(old, f.Name)
	}
	err = save()
	return added, old, err
}

// change makes the entry of a new index file out of that of an old one.
func (v *view) change(p *index.Pack, change packChange) {
	hidden := v.packs.find(p.ID).hidden && change != returnPack || change == hidePack
	if hidden && !p.Hidden {
		p.Time = time.Now()
	}
	p.Hidden = hidden
}

// replacedFiles are the index files to replace. Those of sessions that run stay.
func (v *view) replacedFiles(changes map[blob.ID]packChange) (files []namedFile) {
	replaced := make([]bool, len(v.files))
	for id, change := range changes {
		p := v.packs.findIndexed(id)
		if p == nil || change == hidePack && p.hidden {
			continue // another program took the pack out of the index, or the pack is hidden already
		}
		for i := range v.packs.filesOf(p) {
			replaced[i] = true
		}
	}
	var small []int
	for i, f := range v.files {
		if _, young := v.young[f.id]; young {
			replaced[i] = false
		} else if f.Size < smallIndex {
			small = append(small, i)
		}
	}
	if len(small) > manySmall {
		for _, i := range small {
			replaced[i] = true
		}
	}
	for i, f := range v.files {
		if replaced[i] {
			files = append(files, f)
		}
	}
	return files
}

// dropLate takes deleted packs out of the index files that came after the index of v. A session that lost its lock may
// have written such a file, and looks for missing packs after the write: one of both sees the other. hidden has the
// deleted packs, and those that v returned or found in use.
func (s *sweep) dropLate(ctx context.Context, v *view, hidden map[blob.ID]struct{}) (err error) {
	files, err := listFolder(ctx, s.r.store, indexFolder)
	if err != nil {
		return err
	}
	late := false
	known := map[blob.ID]bool{}
	for _, f := range v.files {
		known[f.id] = true
	}
	for _, f := range files {
		if known[f.id] {
			continue
		}
		_, err := s.r.scanIndexFile(ctx, f, func(p index.Pack) error {
			_, is := hidden[p.ID]
			late = late || is
			return nil
		})
		if err != nil && !api.Is(err, api.NotFound) { // the session corrects the file
			return err
		}
	}
	if !late {
		return nil
	}
	now, err := s.view(ctx)
	if err != nil {
		return err
	}
	defer now.close(&err)
	changes := map[blob.ID]packChange{}
	for id := range hidden {
		if p := now.packs.findIndexed(id); p != nil && p.lost {
			changes[id] = dropPack
		}
	}
	return s.rewriteIndex(ctx, now, changes)
}
