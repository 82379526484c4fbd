package targets

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
)

// Bounds of a verification.
const (
	verifyBurst = 256 << 20 // bytes: more than a pack
	namesLimit  = 16        // in a status
)

// verifyWish is the next step of a verification. A verification reads the packs in 30 parts of the range of names, and
// each part in steps of bounded size, so that a restart loses little.
type verifyWish struct {
	request *metav1.Time // VerifyRequestedAt of a verification that begins; nil: the one in progress continues
	after   blob.ID
	parts   int32  // complete ones
	check   bool   // the target is damaged: look whether it still is
	recheck bool   // nodes healed blobs: only look whether the target still is damaged
	healed  int64  // UncheckedBlobs when the step begins
	round   string // names the verification, also after a restart
}

// verifyResult is the outcome of a step.
type verifyResult struct {
	wish    verifyWish
	stats   repo.VerifyStats
	checked bool // damage and healed are known
	damage  repo.Damage
	healed  int64
	healErr error // of the heal: the damage is known
	// verdicts are those on the backups of a store of Longhorn that the step read; nil: the store has a repository.
	verdicts map[blob.ID]verdict
	err      error
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
	if t.Status.Format == api.FormatLonghorn {
		result.err = r.verifyLonghorn(ctx, t, &result, o)
		return result
	}
	result.err = r.withRepository(ctx, t, func(opened *repo.Repository) (err error) {
		if !wish.recheck {
			result.stats, err = opened.Verify(ctx, repo.VerifyOptions{After: wish.after, Until: partEnd(wish.parts),
				Rate: rate.NewLimiter(rate.Limit(o.VerifyRate), verifyBurst), Writer: o.Memory.maintenanceWriter()})
			if err != nil {
				return err
			}
			complete := result.stats.Done && wish.parts == api.VerificationParts-1
			// Another cluster may have found damage of backups of this one.
			check := wish.check || result.stats.Marked || result.stats.Repaired
			if !complete && len(result.stats.Damaged) == 0 && (!check || !result.stats.Done) {
				return nil
			}
		}
		return result.checkAndHeal(ctx, opened, o)
	})
	return result
}

// checkAndHeal looks for damage, and heals what this node's disks have.
func (s *verifyResult) checkAndHeal(ctx context.Context, r *repo.Repository, o Options) (err error) {
	s.checked = true
	writer := o.Memory.maintenanceWriter()
	if s.damage, err = r.Check(ctx, writer); err != nil || len(s.damage.Blobs) == 0 || o.Heal == nil {
		return err
	}
	s.healed, s.healErr = o.Heal(ctx, r, s.damage.Snapshots, o.Memory.healWriter())
	if s.healed > 0 {
		s.damage, err = r.Check(ctx, writer)
	}
	return err
}

// nextVerification is when the next step begins; zero: never.
func (rec *targetRecord) nextVerification(t *api.BackupTarget, delay time.Duration, now time.Time) time.Time {
	if t.Status.Format != api.FormatLonghorn && t.ExplainReadOnly() != "" || !t.Status.Available {
		return time.Time{} // a verification of a repository writes a lock
	}
	due := earlier(nextPart(t, now), rec.nextRecheck(t, delay, now))
	if !due.IsZero() && due.Before(rec.verifyAgain) && t.Spec.VerifyRequestedAt.Equal(rec.failedAsked) {
		return rec.verifyAgain
	}
	return due
}

// nextPart is when the next step of a verification begins; zero: never.
func nextPart(t *api.BackupTarget, now time.Time) time.Time {
	v := t.Status.Verification
	switch interval := t.Spec.VerifyEvery(); {
	case isVerifyAsked(t):
		return now
	case interval <= 0:
		return time.Time{}
	case v != nil && v.Position != "" && v.Position != partEnd(v.Parts-1).String(): // within a part
		return now
	case v != nil && v.PartEndedAt != nil:
		return v.PartEndedAt.Add(interval / api.VerificationParts)
	default:
		return t.CreationTimestamp.Add(interval / api.VerificationParts)
	}
}

// nextRecheck is when the owner looks whether other nodes healed all damage; zero: never. It waits for further nodes,
// because each look reads the lists of all backups.
func (rec *targetRecord) nextRecheck(t *api.BackupTarget, delay time.Duration, now time.Time) time.Time {
	if v := t.Status.Verification; v == nil || v.UncheckedBlobs == 0 {
		rec.healSeen = time.Time{}
		return time.Time{}
	}
	if rec.healSeen.IsZero() {
		rec.healSeen = now
	}
	return rec.healSeen.Add(delay)
}

func isVerifyRequested(t *api.BackupTarget) bool {
	asked, v := t.Spec.VerifyRequestedAt, t.Status.Verification
	return asked != nil && (v == nil || !asked.Equal(v.Request))
}

// isVerifyAsked reports whether a verification of the whole repository is requested or in progress.
func isVerifyAsked(t *api.BackupTarget) bool {
	v := t.Status.Verification
	return isVerifyRequested(t) || v != nil && v.Asked
}

// nextWish is the step that follows the status of a target. A step that a user waits for goes before a recheck, and the
// last one looks for damage, too.
func nextWish(t *api.BackupTarget) (wish verifyWish) {
	const last = api.VerificationParts - 1
	v := t.Status.Verification
	if v != nil {
		wish.healed = v.UncheckedBlobs
	}
	wish.round = roundOf(t)
	if isVerifyRequested(t) {
		wish.request, wish.parts = t.Spec.VerifyRequestedAt, last // without pauses between parts
		return wish
	}
	if v != nil {
		wish.recheck = v.UncheckedBlobs > 0 && !v.Asked
		if wish.parts = min(max(v.Parts, 0), last); v.Asked {
			wish.parts = last
		}
		wish.after, _ = blob.Parse(v.Position) // without a position, from the first pack on
	}
	wish.check = meta.IsStatusConditionTrue(t.Status.Conditions, api.ConditionDamaged)
	return wish
}

// applyVerification brings the result of a step into the status. A step that failed keeps the packs that it read: only
// the rest, and the look for damage, are repeated.
func (rec *targetRecord) applyVerification(t *api.BackupTarget, backups []api.StoredBackup, o *Options, now time.Time) {
	s := &rec.verification.result
	v := t.Status.Verification
	if v == nil {
		v = &api.VerificationFact{}
		t.Status.Verification = v
	}
	at := metav1.NewTime(now.Truncate(time.Second))
	if s.err != nil {
		v.Message, rec.verifyAgain = api.ClipMessage(s.err.Error()), now.Add(o.pauseAfter(rec.verifyFailed))
		rec.verifyFailed, rec.failedAsked = rec.verifyFailed+1, t.Spec.VerifyRequestedAt
		rec.owesCheck = rec.owesCheck || s.checked || s.stats.Repaired
		if s.verdicts == nil && !s.wish.recheck && s.stats.Last != s.wish.after {
			s.applyStep(v, at)
		}
		if repo.IsPartMissing(s.err) {
			api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionDamaged, true, api.ReasonPartMissing, v.Message)
		}
		return
	}
	v.Message, rec.verifyAgain, rec.verifyFailed = "", time.Time{}, 0
	if s.healErr != nil {
		v.Message = api.ClipMessage("the damage cannot be healed: " + s.healErr.Error())
	}
	begins := s.wish.request != nil || v.StartedAt == nil
	if !s.wish.recheck {
		s.applyStep(v, at)
	}
	v.HealedBlobs += s.healed
	if s.verdicts != nil {
		rec.applyVerdicts(t, backups, begins)
	} else if s.checked {
		rec.owesCheck = false
		v.UncheckedBlobs, rec.healSeen = max(0, v.UncheckedBlobs-s.wish.healed), time.Time{}
		rec.applyDamage(t, backups, now)
	}
	if s.stats.Copied > 0 || s.healed > 0 || s.checked && s.wish.healed > 0 { // a damaged pack may be garbage now
		t.Status.SweepRequested = &at
	}
}

// applyStep brings the packs that a step read into the status.
func (s *verifyResult) applyStep(v *api.VerificationFact, at metav1.Time) {
	if s.wish.request != nil {
		v.Request, v.Asked = s.wish.request, true
	}
	if s.wish.request != nil || v.StartedAt == nil {
		v.StartedAt, v.Packs, v.Bytes, v.HealedBlobs = &at, 0, 0, 0
	}
	v.Packs, v.Bytes = v.Packs+int64(s.stats.Packs), v.Bytes+s.stats.Bytes
	v.Position, v.Parts = s.stats.Last.String(), s.wish.parts
	if s.stats.Done && s.err == nil { // else the next step looks for damage
		v.Parts, v.PartEndedAt = s.wish.parts+1, &at
	}
	if v.Parts == api.VerificationParts {
		v.EndedAt, v.StartedAt, v.Asked, v.Parts, v.Position = &at, nil, false, 0, ""
	}
}

// applyDamage brings the damage of a check into the status.
func (rec *targetRecord) applyDamage(t *api.BackupTarget, backups []api.StoredBackup, now time.Time) {
	d, v := &rec.verification.result.damage, t.Status.Verification
	if v.DamageFoundAt = nil; len(d.Blobs) > 0 {
		at := metav1.NewMicroTime(now)
		v.DamageFoundAt = &at
	}
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
		message = describeDamage(d)
	}
	api.SetCondition(&t.Status.Conditions, t.Generation, api.ConditionDamaged, !d.IsZero(), reason, message)
}

func describeDamage(d *repo.Damage) string {
	text := fmt.Sprintf("the store lost or changed %s that %s need, and %s", api.CountText(len(d.Blobs), "blob"),
		api.CountText(len(d.Snapshots)-d.Lost, "backup"), api.CountText(len(d.Objects), "object"))
	if len(d.Blobs) > 0 {
		text += "; each node writes again what its disks have; for the rest, make full backups of the volumes while they " +
			"exist, or delete the damaged backups"
	}
	if d.Lost > 0 {
		text += fmt.Sprintf("; %s lost the snapshot object, and nothing repairs that: delete them, and make new ones",
			api.CountText(d.Lost, "backup"))
	}
	return text
}

func firstNames(names []string) []string {
	slices.Sort(names)
	return slices.Clone(names[:min(len(names), namesLimit)])
}

// reportVerification reports a step whose result is in the status.
func (r *targetReconciler) reportVerification(t *api.BackupTarget, before *api.BackupTargetStatus, s *verifyResult) {
	verifiedBytes.WithLabelValues(t.Name).Add(float64(s.stats.Bytes))
	for _, p := range s.stats.Damaged {
		r.log.Error("a pack of a backup target is damaged", "target", t.Name, "pack", p.ID, "err", p.Err)
	}
	if s.stats.Repaired || s.damage.Repaired {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "IndexRepaired", "Verify",
			"index files of the repository were damaged or lost; new ones have what the headers of the packs say")
	}
	if s.err != nil {
		r.log.Warn("the verification of a backup target failed", "target", t.Name, "err", s.err)
	}
	if s.err == nil && s.checked || repo.IsPartMissing(s.err) {
		setDamage(t)
		r.reportDamage(t, before)
	}
	if s.healed > 0 {
		reportHeal(r.events, t, s.healed, r.node)
	}
}

// reportDamage emits an event for damage that the status did not have before.
func (r *targetReconciler) reportDamage(t *api.BackupTarget, before *api.BackupTargetStatus) {
	was, is := before.Verification, t.Status.Verification
	former := meta.FindStatusCondition(before.Conditions, api.ConditionDamaged)
	if c := meta.FindStatusCondition(t.Status.Conditions, api.ConditionDamaged); c.Status == metav1.ConditionTrue &&
		(was == nil || former == nil || former.Reason != c.Reason || !slices.Equal(was.BackupNames, is.BackupNames) ||
			is.DamagedBlobs > was.DamagedBlobs || !slices.Equal(was.ObjectNames, is.ObjectNames)) {
		r.events.Eventf(t, nil, corev1.EventTypeWarning, "BackupsDamaged", "Verify", "%s", c.Message)
	}
}

// reportHeal reports blobs that a node wrote again.
func reportHeal(events recorder.EventRecorder, t *api.BackupTarget, blobs int64, node string) {
	events.Eventf(t, nil, corev1.EventTypeNormal, "BackupsHealed", "Verify", "%s written again, from disks of node %s",
		api.CountText(int(blobs), "blob"), node)
}

// markDamaged writes into the backups whether the last check found them damaged, and how much of them restores can read
// on demand; again says that a backup changed meanwhile.
func (r *targetReconciler) markDamaged(ctx context.Context, rec *targetRecord, backups []api.StoredBackup) (
	again bool, err error) {
	if rec.damaged == nil {
		return false, nil
	}
	for _, cached := range backups {
		id, ok := snapshotOf(cached)
		known := rec.digests[id]
		if !ok || cached.GetDeletionTimestamp() != nil || cached.Common().Damaged == rec.damaged[id] &&
			(known == nil || equality.Semantic.DeepEqual(cached.Common().Digests, known)) {
			continue
		}
		b := cached.DeepCopyObject().(api.StoredBackup)
		b.Common().Damaged = rec.damaged[id]
		if known != nil {
			b.Common().Digests = known
		}
		err := r.Status().Update(ctx, b)
		switch {
		case apierrors.IsConflict(err):
			again = true
		case client.IgnoreNotFound(err) != nil:
			return again, api.Explain(err, "backup %s: write the status", b.GetName())
		case err == nil && b.Common().Damaged:
			rec.marked = true
		}
	}
	return again, nil
}
