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

// A visit creates objects in the order of use: the newest backup of each volume and image first, then the second newest
// of each, and so on. Backups that unfinished restores seek come before all others.
//
// Everybody with the password can write snapshots, and objects fill the API server: the objects of found backups are
// bounded. By the order, a flood of backups of one volume hides no others, and old backups hide no new ones, which a
// standby volume waits for. Nor must a flood of volumes hide those with an object: the newest object of a volume stays
// until a newer backup of the volume has an object, for which the bound may be exceeded until the next visit.

// listing is a backup of the store in the choice of those with an object.
type listing struct {
	id      blob.ID
	name    string           // of the object, or of the backup in its tags
	subject string           // api.StoredBackup.Subject
	cutAt   time.Time        // of the content
	object  api.StoredBackup // nil: the backup has none
	stays   bool             // the object is in use, or a restore seeks the backup
}

// chooseUnlisted chooses which of the described backups get an object, in the order of their creation, and whose
// objects newer ones displace. listed are the objects of the backups in the store; coming is the number of further
// objects.
func (v *visit) chooseUnlisted(ctx context.Context, unknown []repo.SnapshotFile, listed map[blob.ID]api.StoredBackup,
	coming int, result *visitResult) (create []repo.SnapshotFile, displaced []listing, _ error) {
	all := slices.Collect(maps.Values(v.memory.unlisted))
	most := v.opts.MostBackups - coming
	found := 0
	for _, b := range listed {
		if b.FoundSnapshot() != "" {
			found++
		}
	}
	var used usedBackups
	if found+len(all) > most || len(all) > quietPull {
		var err error
		if used, err = v.findUsed(ctx); err != nil {
			return nil, nil, err
		}
		v.markSought(all, listed, used.restores)
	}
	for id, b := range listed {
		if b.FoundSnapshot() != "" {
			stays := b.Common().State != api.BackupCompleted || b.GetDeletionTimestamp() != nil || used.has(b)
			all = append(all, listing{id, b.GetName(), b.Subject(), b.CutAt(), b, stays})
		}
	}
	files := make(map[blob.ID]repo.SnapshotFile, len(unknown))
	for _, f := range unknown {
		files[f.ID] = f
	}
	chosen := chooseListed(all, most)
	for _, l := range all[:chosen] {
		if l.object == nil {
			create = append(create, files[l.id])
		}
	}
	for _, l := range all[chosen:] {
		if l.object != nil {
			displaced = append(displaced, l)
		}
	}
	result.tooMany = len(all) - chosen
	return create, displaced, nil
}

// deleteDisplaced deletes objects whose place newer backups need.
func (v *visit) deleteDisplaced(ctx context.Context, displaced []listing) error {
	for _, l := range displaced {
		if err := v.deleteObject(ctx, l.object, "newer backups need its place"); err != nil {
			return err
		}
		v.memory.unlisted[l.id] = listing{id: l.id, name: l.name, subject: l.subject, cutAt: l.cutAt}
	}
	return nil
}

// chooseListed sorts backups by the order of use, and returns how many of the first ones have an object, or are to get
// one: all that stay, of each subject with an object the newest backup and the newest that has an object, and others up
// to most in all.
func chooseListed(all []listing, most int) int {
	slices.SortFunc(all, func(a, b listing) int {
		if isNewer(a, b) {
			return -1
		}
		return 1
	})
	const always = 1 // turns up to it are chosen
	hasObject := map[string]bool{}
	for _, l := range all {
		if l.object != nil {
			hasObject[l.subject] = true
		}
	}
	turns := make(map[blob.ID]int, len(all))
	passed, passedObject := map[string]int{}, map[string]bool{} // by subject: newer backups, and whether one has an object
	for _, l := range all {
		newer, isNewestObject := passed[l.subject], l.object != nil && !passedObject[l.subject]
		passed[l.subject]++
		passedObject[l.subject] = passedObject[l.subject] || l.object != nil
		switch {
		case l.stays:
			turns[l.id] = 0
		case isNewestObject, newer == 0 && hasObject[l.subject]:
			turns[l.id] = always
		default:
			turns[l.id] = always + 1 + newer
		}
	}
	slices.SortStableFunc(all, func(a, b listing) int { return turns[a.id] - turns[b.id] })
	n := min(max(most, 0), len(all))
	for n < len(all) && turns[all[n].id] <= always {
		n++
	}
	return n
}

func isNewer(a, b listing) bool {
	if c := a.cutAt.Compare(b.cutAt); c != 0 {
		return c > 0
	}
	return bytes.Compare(a.id[:], b.id[:]) > 0
}

// describeUnlisted describes the backups without an object that can get one, and remembers them for the next visit: a
// visit that is cut reads nothing twice. facts describe some of the backups.
func (v *visit) describeUnlisted(ctx context.Context, r snapshotLister, unknown []repo.SnapshotFile) (
	facts map[blob.ID]foundBackup, _ error) {
	memory := map[blob.ID]listing{} // without those that the store deleted
	var unread []repo.SnapshotFile
	for _, f := range unknown {
		if l, is := v.memory.unlisted[f.ID]; is {
			memory[f.ID] = l
		} else {
			unread = append(unread, f)
		}
	}
	v.memory.unlisted, facts = memory, map[blob.ID]foundBackup{}
	var objects map[api.UID]bool // nil: not read yet, because a visit without news lists the Backups no second time
	for files := range slices.Chunk(unread, pullBatch) {
		found, err := v.loadFacts(ctx, r, files)
		if err != nil {
			return nil, err
		}
		if objects == nil && len(found) > 0 {
			if objects, err = v.objects(ctx); err != nil {
				return nil, err
			}
		}
		for _, f := range found {
			if objects[f.facts.Object] {
				continue
			}
			b := v.newBackup(f.facts.Backup, f)
			v.setStatus(b, f)
			id := f.snapshot.ID
			memory[id] = listing{id: id, name: b.GetName(), subject: b.Subject(), cutAt: b.CutAt()}
			if len(facts) < pullBatch {
				facts[id] = f
			}
		}
	}
	return facts, nil
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
