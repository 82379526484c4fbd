package targets

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/repo/blob"
)

// A verification of a store of Longhorn reads the blocks of all backups and compares them with their checksums. The
// digests of the chunks stay in the node's table, so the node can read such a backup on demand. The table also has a
// mark of the verification at each block: blocks that several backups share are read once, and a restart continues with
// the next block.

// Bounds of one step of a verification.
const (
	verifyStep    = 16 << 30 // bytes
	verifyBackups = 512
)

// verdict is what a verification found out about a backup of Longhorn.
type verdict struct {
	damaged []string // blocks, or the cfg of the backup
	percent int32    // of the chunks with a known digest; -1: the backup has no chunks
}

// storedItem is a backup of a volume, or a backing image.
type storedItem struct {
	position blob.ID // in the order of a verification
	id       blob.ID
	name     longhorn.Name
	image    string // empty: a backup
}

// listItems lists what a part of a verification reads. Backups of a volume follow each other, because they share
// blocks.
func listItems(ctx context.Context, store *longhorn.Store, after, until blob.ID) (items []storedItem, err error) {
	names, err := store.ListBackups(ctx)
	if err != nil {
		return nil, err
	}
	images, err := store.ListImages(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range names {
		i := storedItem{id: n.ID(), name: n, position: blob.Sum([]byte(n.Volume))}
		copy(i.position[len(i.position)/2:], i.id[:])
		items = append(items, i)
	}
	for _, name := range images {
		id := blob.ID(longhorn.ImageID(name))
		items = append(items, storedItem{position: id, id: id, image: name})
	}
	items = slices.DeleteFunc(items, func(i storedItem) bool {
		return bytes.Compare(i.position[:], after[:]) <= 0 || bytes.Compare(i.position[:], until[:]) > 0
	})
	slices.SortFunc(items, func(a, b storedItem) int { return bytes.Compare(a.position[:], b.position[:]) })
	return items, nil
}

// verifyLonghorn runs one step in a store of Longhorn.
func (r *Repositories) verifyLonghorn(ctx context.Context, t *api.BackupTarget, result *verifyResult, o Options) error {
	result.verdicts, result.checked = map[blob.ID]verdict{}, true
	release, err := r.withLonghornOf(ctx, t, func(store *longhorn.Store) error {
		until := partEnd(result.wish.parts)
		items, err := listItems(ctx, store, result.wish.after, until)
		if err != nil {
			return err
		}
		limit := rate.NewLimiter(rate.Limit(o.VerifyRate), verifyBurst)
		result.stats.Last = result.wish.after
		for n, i := range items {
			if n == verifyBackups || result.stats.Bytes >= verifyStep {
				return nil
			}
			v := longhorn.VerifyOptions{Rate: limit, Most: verifyStep - result.stats.Bytes,
				Mark: markOf(t, result.wish.round, i.name.Volume)}
			if whole, err := r.verifyItem(ctx, store, i, v, result); err != nil || !whole {
				return err
			}
			result.stats.Last = i.position
		}
		result.stats.Last, result.stats.Done = until, true
		return nil
	})
	if err == nil {
		release()
	}
	return err
}

// verifyItem verifies a backup or image; whole says that the bound of the step left nothing out.
func (r *Repositories) verifyItem(ctx context.Context, store *longhorn.Store, i storedItem, o longhorn.VerifyOptions,
	result *verifyResult) (whole bool, err error) {
	var opened *longhorn.Opened
	if i.image != "" {
		opened, err = store.OpenImage(ctx, i.image)
	} else {
		opened, err = store.OpenBackup(ctx, i.name, r.images)
	}
	switch api.KindOf(err) {
	case api.Corrupt:
		result.verdicts[i.id] = verdict{[]string{"the list of blocks"}, -1}
		r.log.Error("a backup of Longhorn is damaged", "id", i.id, "err", err)
		return true, nil
	case api.NotFound, api.Busy, api.Unsupported, api.Invalid: // deleted, in progress, without its image, or not shown
		r.log.Warn("a backup of Longhorn cannot be verified", "id", i.id, "err", err)
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { _ = opened.Close() }() // a file that was only read
	if i.image != "" {
		o.Most = 0 // an image has no marks that a later step could continue with
	}
	stats, err := opened.Verify(ctx, o)
	result.stats.Packs, result.stats.Bytes = result.stats.Packs+int(stats.Blocks), result.stats.Bytes+stats.Bytes
	if err != nil || !stats.Done {
		return false, err
	}
	v := verdict{stats.Damaged, -1}
	if i.image == "" {
		known, total, err := opened.Known()
		if err != nil {
			return false, err
		}
		v.percent = int32(known * 100 / max(total, 1)) //nolint:gosec // at most 100
		if total == 0 {
			v.percent = 100
		}
	}
	if len(v.damaged) > 0 {
		r.log.Error("blocks of a backup of Longhorn are damaged", "id", i.id, "blocks", firstNames(v.damaged),
			"count", len(v.damaged))
	}
	result.verdicts[i.id] = v
	return true, nil
}

// roundOf names the verification that a step belongs to.
func roundOf(t *api.BackupTarget) string {
	v := t.Status.Verification
	switch {
	case isVerifyRequested(t):
		return t.Spec.VerifyRequestedAt.UTC().Format(time.RFC3339)
	case v == nil:
		return ""
	case v.Asked:
		return v.Request.UTC().Format(time.RFC3339)
	case v.EndedAt == nil:
		return ""
	}
	return "after " + v.EndedAt.UTC().Format(time.RFC3339)
}

// markOf is the mark of a verification at the blocks of a volume; not 0.
func markOf(t *api.BackupTarget, round, volume string) uint64 {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%s", t.UID, round, volume))
	return binary.LittleEndian.Uint64(sum[:]) | 1
}

// applyVerdicts brings the verdicts of a step into the status; begins says that the step is the first one.
func (rec *targetRecord) applyVerdicts(t *api.BackupTarget, backups []api.StoredBackup, begins bool) {
	s, v := &rec.verification.result, t.Status.Verification
	if begins {
		v.DamagedBlobs, v.BlobNames = 0, nil
	}
	var blocks []string
	for _, verdict := range s.verdicts {
		blocks = append(blocks, verdict.damaged...)
	}
	slices.Sort(blocks)
	blocks = slices.Compact(blocks)
	v.DamagedBlobs += int64(len(blocks))
	v.BlobNames = slices.Compact(firstNames(append(slices.Clone(v.BlobNames), blocks...)))
	rec.damaged = map[blob.ID]bool{}
	var names []string
	for _, b := range backups {
		id, ok := snapshotOf(b)
		if !ok {
			continue
		}
		rec.damaged[id] = b.Common().Damaged
		if verdict, read := s.verdicts[id]; read {
			rec.damaged[id] = len(verdict.damaged) > 0
		}
		if rec.damaged[id] {
			names = append(names, b.GetName())
		}
	}
	v.DamagedBackups, v.BackupNames = int32(len(names)), firstNames(names) //nolint:gosec // at most 2^18
	reason, message := api.ReasonNoDamage, ""
	if len(names) > 0 {
		reason = api.ReasonBackupsDamaged
		message = fmt.Sprintf("Longhorn's store lost or changed blocks of %s; back the volumes up again with Longhorn while "+
			"they exist, or restore these backups with --allow-damaged", api.CountText(len(names), "backup"))
	}
	api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionDamaged, len(names) > 0, reason, message)
}

// noteDigests notes which backups of Longhorn this node can read on demand, as the last step found out.
func (rec *targetRecord) noteDigests(node string) {
	for id, v := range rec.verification.result.verdicts {
		if rec.digests == nil {
			rec.digests = map[blob.ID]*api.DigestsFact{}
		}
		if v.percent >= 0 {
			rec.digests[id] = &api.DigestsFact{Node: node, Percent: v.percent}
		}
	}
}
