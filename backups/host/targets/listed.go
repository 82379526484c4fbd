package targets

import (
	"bytes"
	"context"
	"maps"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// Everybody with the password can write snapshots, and objects fill the API server: the objects of found backups are
// bounded. A flood of backups of one volume must not hide those of others, and old backups must not hide new ones,
// which a standby volume waits for: the newest backup of each volume and image has an object first. Nor must a flood of
// volumes hide those with an object: the newest object of a volume stays until a newer backup of the volume has an
// object, for which the bound may be exceeded until the next visit.

// listing is a backup of the store in the choice of those with an object.
type listing struct {
	id      blob.ID
	name    string           // of the object, or of the backup in its tags
	subject string           // api.StoredBackup.Subject
	cutAt   time.Time        // of the content
	object  api.StoredBackup // nil: the backup has none
	stays   bool             // the object is in use, or a restore seeks the backup
}

// boundListed chooses which of the backups get an object. listed are the objects of the backups in the store; coming is
// the number of further objects. boundListed deletes the objects of older backups whose place newer ones need.
func (v *visit) boundListed(ctx context.Context, r snapshotLister, unknown []repo.SnapshotFile,
	listed map[blob.ID]api.StoredBackup, coming int, result *visitResult) (create []repo.SnapshotFile, _ error) {
	found := coming
	for _, b := range listed {
		if b.FoundSnapshot() != "" {
			found++
		}
	}
	if found+len(unknown) <= v.opts.MostBackups {
		clear(v.memory.unlisted)
		return unknown, nil
	}
	all, err := v.describeUnlisted(ctx, r, unknown)
	if err != nil {
		return nil, err
	}
	unlisted := len(all)
	used, err := v.findUsed(ctx)
	if err != nil {
		return nil, err
	}
	v.markSought(all, listed, used.restores)
	for id, b := range listed {
		if b.FoundSnapshot() != "" {
			stays := b.Common().State != api.BackupCompleted || b.GetDeletionTimestamp() != nil || used.has(b)
			all = append(all, listing{id, b.GetName(), b.Subject(), b.CutAt(), b, stays})
		}
	}
	chosen := map[blob.ID]bool{}
	for _, l := range chooseListed(all, v.opts.MostBackups-coming) {
		chosen[l.id] = true
	}
	for _, f := range unknown {
		if chosen[f.ID] {
			create = append(create, f)
			delete(v.memory.unlisted, f.ID)
		}
	}
	result.tooMany = unlisted - len(create)
	result.backups += result.tooMany
	for _, l := range all {
		if l.object == nil || chosen[l.id] {
			continue
		}
		if err := v.deleteObject(ctx, l.object, "newer backups need its place"); err != nil {
			return nil, err
		}
		result.tooMany++
		v.memory.unlisted[l.id] = listing{id: l.id, name: l.name, subject: l.subject, cutAt: l.cutAt}
	}
	return create, nil
}

// chooseListed returns the backups that have an object, or are to get one: all that stay, of each subject with an
// object the newest backup and the newest that has an object, and others up to most in all.
func chooseListed(all []listing, most int) []listing {
	newest, newestListed := map[string]listing{}, map[string]listing{} // by subject
	note := func(newest map[string]listing, l listing) {
		if n, is := newest[l.subject]; !is || isNewer(l, n) {
			newest[l.subject] = l
		}
	}
	for _, l := range all {
		note(newest, l)
		if l.object != nil {
			note(newestListed, l)
		}
	}
	const always = 1 // first up to it
	first := func(l listing) int {
		kept, isListed := newestListed[l.subject]
		switch {
		case l.stays:
			return 0
		case isListed && kept.id == l.id:
			return always
		case newest[l.subject].id == l.id:
			if isListed {
				return always
			}
			return 2
		}
		return 3
	}
	slices.SortFunc(all, func(a, b listing) int {
		if d := first(a) - first(b); d != 0 {
			return d
		}
		if isNewer(a, b) {
			return -1
		}
		return 1
	})
	n := min(max(most, 0), len(all))
	for n < len(all) && first(all[n]) <= always {
		n++
	}
	return all[:n]
}

func isNewer(a, b listing) bool {
	if c := a.cutAt.Compare(b.cutAt); c != 0 {
		return c > 0
	}
	return bytes.Compare(a.id[:], b.id[:]) > 0
}

// describedAtOnce bounds the backups whose facts are in memory together.
const describedAtOnce = 1000

// describeUnlisted describes the backups without an object that can get one, and remembers them for the next visit.
func (v *visit) describeUnlisted(ctx context.Context, r snapshotLister, unknown []repo.SnapshotFile) (
	[]listing, error) {
	memory := map[blob.ID]listing{} // without those that the store deleted
	var unread []repo.SnapshotFile
	for _, f := range unknown {
		if l, is := v.memory.unlisted[f.ID]; is {
			memory[f.ID] = l
		} else {
			unread = append(unread, f)
		}
	}
	if v.memory.unlisted = memory; len(unread) == 0 {
		return slices.Collect(maps.Values(memory)), nil
	}
	objects, err := v.objects(ctx)
	if err != nil {
		return nil, err
	}
	for files := range slices.Chunk(unread, describedAtOnce) {
		found, err := v.loadFacts(ctx, r, files)
		if err != nil {
			return nil, err
		}
		for _, f := range found {
			if objects[f.facts.Object] {
				continue
			}
			b := v.newBackup(f.facts.Backup, f)
			v.setStatus(b, f)
			memory[f.snapshot.ID] = listing{id: f.snapshot.ID, name: b.GetName(), subject: b.Subject(), cutAt: b.CutAt()}
		}
	}
	return slices.Collect(maps.Values(memory)), nil
}

// usedBackups are the backups that restores and copies read, and would not find again.
type usedBackups struct {
	restores
	originals map[original]bool // of copies
}

// original is a backup that is copied: a copy has the original's subject.
type original struct{ subject, name string }

func (u usedBackups) has(b api.StoredBackup) bool {
	return u.of(b) != "" || u.originals[original{b.Subject(), b.GetName()}]
}

// findUsed finds the backups in use.
func (v *visit) findUsed(ctx context.Context) (usedBackups, error) {
	unfinished, err := unfinishedRestores(ctx, v.repositories.live)
	used := usedBackups{unfinished, map[original]bool{}}
	if err != nil {
		return used, err
	}
	backups, err := ListBackups(ctx, v.Client, client.UnsafeDisableDeepCopy)
	if err != nil {
		return used, err
	}
	for _, b := range backups {
		if api.IsCopy(b) && !b.Ended() {
			used.originals[original{b.Subject(), b.Origin()}] = true
		}
	}
	return used, nil
}

// markSought marks the backups without an object that restores seek by URL: for each URL without an object the newest
// backup alone, since a flood may have many backups of one name.
func (v *visit) markSought(unlisted []listing, listed map[blob.ID]api.StoredBackup, sought restores) {
	has := map[api.BackupRef]bool{}
	for _, b := range listed {
		if ref, err := api.ParseBackupURL(b.Common().URL); err == nil {
			has[ref] = true
		}
	}
	type key struct{ name, subject string }
	newest := map[key]int{} // the place in unlisted; -1: none
	for ref := range sought {
		if name, subject := ref.NameIn(v.target.Spec.BackupTargetURL); name != "" && !has[ref] {
			newest[key{name, subject}] = -1
		}
	}
	if len(newest) == 0 {
		return
	}
	for i, l := range unlisted {
		for _, name := range pulledNames(l.name, l.id) {
			k := key{name, l.subject}
			if at, is := newest[k]; is && (at < 0 || isNewer(l, unlisted[at])) {
				newest[k] = i
			}
		}
	}
	for _, i := range newest {
		if i >= 0 {
			unlisted[i].stays = true
		}
	}
}
