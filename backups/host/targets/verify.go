package targets

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// Bounds of a verification.
const (
	verifyBurst  = 256 << 20 // bytes: more than a pack
	verifyPacks  = 8 << 20   // bytes of a pack with copies
	verifyMemory = 32 << 20
	namesLimit   = 16 // in a status
)

// verifyWish is the next step of a verification. A verification reads the packs in 30 parts of the range of names, and
// each part in steps of bounded size, so that a restart loses little.
type verifyWish struct {
	request *metav1.Time // VerifyRequestedAt of a verification that begins; nil: the one in progress continues
	after   blob.ID
	parts   int32 // complete ones
	check   bool  // the target is damaged: look whether it still is
}

// verifyResult is the outcome of a step.
type verifyResult struct {
	wish    verifyWish
	stats   repo.VerifyStats
	checked bool // damage and healed are known
	damage  repo.Damage
	healed  int64
	err     error
}

// partEnd is the last name of a part.
func partEnd(part int32) (id blob.ID) {
	for i := range id {
		id[i] = 0xff
	}
	if part < api.VerificationParts-1 {
		const step = 1 << 63 / api.VerificationParts * 2
		binary.BigEndian.PutUint64(id[:], step*uint64(part+1)) //nolint:gosec // part is not negative
	}
	return id
}

// verify runs one step.
func (r *Repositories) verify(ctx context.Context, t *api.BackupTarget, wish verifyWish, o Options) verifyResult {
	result := verifyResult{wish: wish}
	result.err = r.withRepository(ctx, t, func(opened *repo.Repository) (err error) {
		writer := repo.WriterOptions{PackSize: verifyPacks, Memory: verifyMemory}
		result.stats, err = opened.Verify(ctx, repo.VerifyOptions{After: wish.after, Until: partEnd(wish.parts),
			Rate: rate.NewLimiter(rate.Limit(o.VerifyRate), verifyBurst), Writer: writer})
		if err != nil {
			return err
		}
		complete := result.stats.Done && wish.parts == api.VerificationParts-1
		if !complete && len(result.stats.Damaged) == 0 && (!wish.check || !result.stats.Done) {
			return nil
		}
		result.checked = true
		if result.damage, err = opened.Check(ctx, writer); err != nil || len(result.damage.Blobs) == 0 || o.Heal == nil {
			return err
		}
		result.healed, err = o.Heal(ctx, opened, result.damage.Snapshots, writer)
		if err == nil && result.healed > 0 {
			result.damage, err = opened.Check(ctx, writer)
		}
		return err
	})
	return result
}

// nextVerification is when the next step begins; zero: never.
func (rec *targetRecord) nextVerification(t *api.BackupTarget, now time.Time) time.Time {
	if t.ExplainReadOnly() != "" || !t.Status.Available {
		return time.Time{}
	}
	due := now
	v := t.Status.Verification
	switch interval := t.Spec.VerifyEvery(); {
	case isVerifyRequested(t), v != nil && v.Asked:
	case interval <= 0:
		return time.Time{}
	case v != nil && v.Position != "" && v.Position != partEnd(v.Parts-1).String(): // within a part
	default:
		due = t.CreationTimestamp.Add(interval / api.VerificationParts)
		if v != nil && v.PartEndedAt != nil {
			due = v.PartEndedAt.Add(interval / api.VerificationParts)
		}
	}
	if due.Before(rec.verifyAgain) {
		return rec.verifyAgain
	}
	return due
}

func isVerifyRequested(t *api.BackupTarget) bool {
	asked, v := t.Spec.VerifyRequestedAt, t.Status.Verification
	return asked != nil && (v == nil || !asked.Equal(v.Request))
}

// nextWish is the step that follows the status of a target.
func nextWish(t *api.BackupTarget) (wish verifyWish) {
	const last = api.VerificationParts - 1
	if isVerifyRequested(t) {
		return verifyWish{request: t.Spec.VerifyRequestedAt, parts: last} // without pauses between parts
	}
	if v := t.Status.Verification; v != nil {
		if wish.parts = min(max(v.Parts, 0), last); v.Asked {
			wish.parts = last
		}
		wish.after, _ = blob.Parse(v.Position) // without a position, from the first pack on
	}
	wish.check = meta.IsStatusConditionTrue(t.Status.Conditions, api.ConditionDamaged)
	return wish
}

// applyVerification brings the result of a step into the status.
func (rec *targetRecord) applyVerification(t *api.BackupTarget, backups []api.StoredBackup, retry time.Duration,
	now time.Time) {
	s := &rec.verification.result
	v := t.Status.Verification
	if v == nil {
		v = &api.VerificationFact{}
		t.Status.Verification = v
	}
	at := metav1.NewTime(now.Truncate(time.Second))
	if s.err != nil {
		v.Message, rec.verifyAgain = api.ClipMessage(s.err.Error()), now.Add(retry)
		return
	}
	v.Message, rec.verifyAgain = "", time.Time{}
	if s.wish.request != nil {
		v.Request, v.Asked = s.wish.request, true
	}
	if s.wish.request != nil || v.StartedAt == nil {
		v.StartedAt, v.Packs, v.Bytes, v.HealedBlobs = &at, 0, 0, 0
	}
	v.Packs, v.Bytes, v.HealedBlobs = v.Packs+int64(s.stats.Packs), v.Bytes+s.stats.Bytes, v.HealedBlobs+s.healed
	v.Position, v.Parts = s.stats.Last.String(), s.wish.parts
	if s.stats.Done {
		v.Parts, v.PartEndedAt = s.wish.parts+1, &at
	}
	if v.Parts == api.VerificationParts {
		v.EndedAt, v.StartedAt, v.Asked, v.Parts, v.Position = &at, nil, false, 0, ""
	}
	if s.checked {
		rec.applyDamage(t, backups)
	}
	if s.stats.Copied > 0 || s.healed > 0 { // a damaged pack may be garbage now
		t.Status.SweepRequested = &at
	}
}

// applyDamage brings the damage of a check into the status.
func (rec *targetRecord) applyDamage(t *api.BackupTarget, backups []api.StoredBackup) {
	d, v := &rec.verification.result.damage, t.Status.Verification
	damaged := map[blob.ID]bool{}
	for _, id := range d.Snapshots {
		damaged[id] = true
	}
	rec.damaged = damaged
	var blobNames, backupNames []string
	for id := range d.Blobs {
		blobNames = append(blobNames, id.String())
	}
	for _, b := range backups {
		if id, ok := snapshotOf(b); ok && damaged[id] {
			backupNames = append(backupNames, b.GetName())
		}
	}
	v.DamagedBlobs, v.DamagedBackups = int64(len(d.Blobs)), int32(len(d.Snapshots)) //nolint:gosec // at most 2^18
	v.BlobNames, v.ObjectNames, v.BackupNames = firstNames(blobNames), firstNames(d.Objects), firstNames(backupNames)
	reason, message := api.ReasonNoDamage, ""
	if !d.IsZero() {
		reason = api.ReasonBackupsDamaged
		message = fmt.Sprintf("the store lost or changed %s that %s need, and %s; make full backups of their volumes while "+
			"the volumes exist, or delete the damaged backups", api.CountText(len(d.Blobs), "blob"),
			api.CountText(len(d.Snapshots), "backup"), api.CountText(len(d.Objects), "object"))
	}
	api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionDamaged, !d.IsZero(), reason, message)
}

func firstNames(names []string) []string {
	slices.Sort(names)
	return slices.Clone(names[:min(len(names), namesLimit)])
}

// reportVerification reports a step whose result is in the status.
func (r *targetReconciler) reportVerification(t *api.BackupTarget, before *api.BackupTargetStatus, s *verifyResult) {
	verifiedBytes.WithLabelValues(t.Name).Add(float64(s.stats.Bytes))
	if s.err != nil {
		r.log.Warn("the verification of a backup target failed", "target", t.Name, "err", s.err)
		return
	}
	for _, p := range s.stats.Damaged {
		r.log.Error("a pack of a backup target is damaged", "target", t.Name, "pack", p.ID, "err", p.Err)
	}
	if !s.checked {
		return
	}
	damagedBlobs.WithLabelValues(t.Name).Set(float64(len(s.damage.Blobs)))
	was := before.Verification
	if c := meta.FindStatusCondition(t.Status.Conditions, api.ConditionDamaged); c.Status == metav1.ConditionTrue &&
		(was == nil || was.DamagedBlobs != t.Status.Verification.DamagedBlobs ||
			!slices.Equal(was.ObjectNames, t.Status.Verification.ObjectNames)) {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "BackupsDamaged", "Verify", "%s", c.Message)
	}
	if s.healed > 0 {
		r.events.Eventf(t, nil, corev1.EventTypeNormal, "BackupsHealed", "Verify", "%s written again, from disks of node %s",
			api.CountText(int(s.healed), "blob"), r.node)
	}
}

// markDamaged writes into the backups whether the last check found them damaged.
func (r *targetReconciler) markDamaged(ctx context.Context, rec *targetRecord, backups []api.StoredBackup) error {
	if rec.damaged == nil {
		return nil
	}
	for _, cached := range backups {
		id, ok := snapshotOf(cached)
		if !ok || cached.Common().Damaged == rec.damaged[id] || cached.GetDeletionTimestamp() != nil {
			continue
		}
		b := cached.DeepCopyObject().(api.StoredBackup)
		b.Common().Damaged = rec.damaged[id]
		if err := r.Status().Update(ctx, b); err != nil {
			if err := ignoreRace(api.Explain(err, "backup %s: write the status", b.GetName()), err); err != nil {
				return err
			}
		}
	}
	return nil
}
