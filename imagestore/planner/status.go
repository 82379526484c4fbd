package planner

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// rank orders states by progress.
var rank = map[api.ImageState]int{api.ImageFailed: 1, api.ImageUnknown: 2, api.ImagePending: 3, api.ImageStarting: 4,
	api.ImageInProgress: 5, api.ImageTransfer: 6, api.ImageReady: 7}

// describeImage derives the status of an image from its copies: the state of the image is the state of its most
// advanced copy.
func describeImage(img *api.BackingImage, v *clusterView, p copyPlan) api.BackingImageStatus {
	s := *img.Status.DeepCopy()
	s.Copies, s.ReadyCopies, s.Progress, s.Message, s.State = nil, 0, 0, p.problem, ""
	s.Readable = false
	var worst, stalled string
	var bytes api.ByteProgress // of the most advanced copy
	for i := range v.copies {
		c := &v.copies[i]
		if c.Spec.UUID != s.UUID {
			continue
		}
		st := c.Status.State
		if st == "" {
			st = api.ImagePending
		}
		message := explainCopy(c)
		switch d := v.findDisk(c.Spec.Disk); {
		case !v.nodes[c.Spec.Node]:
			st, message = api.ImageUnknown, fmt.Sprintf("node %s does not answer", c.Spec.Node)
		case d != nil && !d.alive:
			st, message = api.ImageUnknown, strings.TrimSuffix(fmt.Sprintf("disk %s is not ready: %s", d.path, d.message), ": ")
		}
		sum := api.ImageCopySummary{Disk: c.Spec.Disk, Node: c.Spec.Node, State: st, Progress: c.Status.Progress,
			Message: message}
		for _, old := range img.Status.Copies {
			if old.Disk == sum.Disk {
				sum.LastUsed = old.LastUsed
			}
		}
		if v.isUsed(c.Spec.Disk) {
			sum.LastUsed = metav1.Time{} // in use
		} else if sum.LastUsed.IsZero() {
			sum.LastUsed = metav1.NewTime(time.Now().Truncate(time.Second))
		}
		s.Copies = append(s.Copies, sum)
		if rank[st] > rank[s.State] {
			s.State = st
		}
		if c.Status.Progress > s.Progress {
			s.Progress, bytes = c.Status.Progress, c.Status.ByteProgress
		}
		waits := c.Status.Readable || st == api.ImageInProgress
		if st == api.ImageFailed || st == api.ImageUnknown || waits && message != "" {
			worst = message // of a readable copy: why reads wait; of one in progress: why the copy cannot be read yet
		}
		if c.Status.Readable && st != api.ImageReady && st != api.ImageUnknown {
			stalled = message
		}
		if st == api.ImageReady {
			s.ReadyCopies++
			s.Format, s.Checksum, s.Digest = c.Status.Format, c.Status.Checksum, c.Status.Digest
			s.Size, s.VirtualSize = c.Status.Size, c.Status.VirtualSize
		} else if c.Status.Readable && c.Status.Digest != "" && s.ReadyCopies == 0 && rank[st] >= rank[api.ImagePending] {
			s.Readable, s.Digest, s.VirtualSize = true, c.Status.Digest, c.Status.VirtualSize
		}
	}
	s.Readable = s.Readable && s.ReadyCopies == 0
	if s.Progress != img.Status.Progress { // at most a hundred writes of the status for an image of any size
		s.ByteProgress = *bytes.DeepCopy()
	}
	switch {
	case s.State != "":
	case p.problem != "" && validateImage(img) != nil:
		s.State = api.ImageFailed
	default:
		s.State = api.ImagePending
	}
	if s.Message == "" {
		s.Message = worst
	}
	if s.Message == "" {
		s.Message = p.stays
	}
	if s.Size > 0 || s.Readable {
		s.SizeText, s.VirtualSizeText = api.SizeText(s.Size), api.SizeText(s.VirtualSize)
	}
	setConditions(img, v, p, &s)
	setStallCondition(&s, stalled, img.Generation)
	return s
}

// setStallCondition says why reads of a restored image wait; why is empty while none does.
func setStallCondition(s *api.BackingImageStatus, why string, generation int64) {
	switch {
	case !s.Readable:
		meta.RemoveStatusCondition(&s.Conditions, api.ConditionStalled)
	case why != "":
		api.SetCondition(&s.Conditions, generation, api.ConditionStalled, true, api.ReasonReadsWait, api.ClipMessage(why))
	case meta.FindStatusCondition(s.Conditions, api.ConditionStalled) != nil:
		api.SetCondition(&s.Conditions, generation, api.ConditionStalled, false, api.ReasonHydrating, "")
	}
}

// summarizeImage describes a ready image.
func summarizeImage(s *api.BackingImageStatus) string {
	text := fmt.Sprintf("%s image, %s", s.Format, s.VirtualSizeText)
	if s.Checksum != "" { // an export has no checksum
		text += fmt.Sprintf(", SHA-512 %.16s...", s.Checksum)
	}
	return text
}

// explainCopy returns the message of a copy with the time of its next try. A restore that waits for its store counts no
// tries.
func explainCopy(c *api.ImageCopy) string {
	if c.Status.NextTry.IsZero() || c.Status.State != api.ImageFailed || c.Status.Attempts == 0 {
		return c.Status.Message
	}
	return fmt.Sprintf("%s (try %d failed, next try at %s)", c.Status.Message, c.Status.Attempts,
		c.Status.NextTry.UTC().Format(time.RFC3339))
}

func setConditions(img *api.BackingImage, v *clusterView, p copyPlan, s *api.BackingImageStatus) {
	ready := metav1.Condition{Type: api.ConditionReady, Status: metav1.ConditionFalse, Reason: "InProgress",
		Message: s.Message, ObservedGeneration: img.Generation}
	least := max(img.Spec.MinNumberOfCopies, 1)
	switch {
	case s.State == api.ImageReady && s.ReadyCopies >= least:
		ready.Status, ready.Reason = metav1.ConditionTrue, "Ready"
	case s.State == api.ImageReady:
		ready.Status, ready.Reason = metav1.ConditionTrue, "TooFewCopies"
		if ready.Message == "" {
			ready.Message = fmt.Sprintf("%d of %d copies are ready: the others are being made", s.ReadyCopies, least)
		}
	case s.State == api.ImageFailed:
		ready.Reason = "Failed"
	case s.State == api.ImageUnknown:
		ready.Reason = "Unknown"
	case len(s.Copies) == 0 && s.Message != "":
		ready.Reason = "NoDisk"
	}
	ready.Message = api.ClipMessage(ready.Message)
	meta.SetStatusCondition(&s.Conditions, ready)
	setEvictionCondition(v, p, s, img.Generation)
	if img.DeletionTimestamp.IsZero() {
		meta.RemoveStatusCondition(&s.Conditions, ConditionInUse)
		return
	}
	use := metav1.Condition{Type: ConditionInUse, Status: metav1.ConditionFalse, Reason: "NoVolume",
		Message: "copies are being removed", ObservedGeneration: img.Generation}
	if len(v.users) > 0 {
		use.Status, use.Reason = metav1.ConditionTrue, "UsedByVolumes"
		use.Message = fmt.Sprintf("the deletion waits: %s it: %s", usersText(v.users), listSome(v.users))
	} else if why := explainStuckCopy(v); why != "" {
		use.Reason, use.Message = "CopyStays", "the deletion waits: "+why
	}
	if s.Message == "" || len(v.users) == 0 {
		s.Message = use.Message
	}
	use.Message = api.ClipMessage(use.Message)
	meta.SetStatusCondition(&s.Conditions, use)
}

// explainStuckCopy explains which copy of a deleted image cannot be removed, and why.
func explainStuckCopy(v *clusterView) string {
	for i := range v.copies {
		c := &v.copies[i]
		d := v.findDisk(c.Spec.Disk)
		switch {
		case c.DeletionTimestamp.IsZero():
		case !v.nodes[c.Spec.Node]:
			return fmt.Sprintf("a copy is on node %s, which does not answer: it is deleted when the node is back, or "+
				"was deleted",
				c.Spec.Node)
		case d == nil:
			return fmt.Sprintf("a copy is on disk %s, which is missing: it is deleted when the disk is back, or was "+
				"removed with `drover disk remove`", c.Spec.Disk)
		case !d.alive:
			return fmt.Sprintf("a copy is on disk %s of node %s, which is not ready: it is deleted when the disk is "+
				"back, or was removed with `drover disk remove`", d.path, d.node)
		case strings.HasPrefix(c.Status.Message, api.CopyNotRemoved): // other messages concern the use of the copy
			return fmt.Sprintf("a copy is on disk %s of node %s: %s", d.path, d.node, c.Status.Message)
		}
	}
	return ""
}

// setEvictionCondition reports copies on disks under eviction.
func setEvictionCondition(v *clusterView, p copyPlan, s *api.BackingImageStatus, generation int64) {
	on := 0
	for i := range v.copies {
		if d := v.findDisk(v.copies[i].Spec.Disk); d != nil && d.leaving {
			on++
		}
	}
	if on == 0 {
		meta.RemoveStatusCondition(&s.Conditions, ConditionEviction)
		return
	}
	c := metav1.Condition{Type: ConditionEviction, Status: metav1.ConditionFalse, Reason: "Moving",
		Message: "the image moves to other disks", ObservedGeneration: generation}
	if p.stays != "" {
		c.Reason, c.Message = "Stays", api.ClipMessage(p.stays)
	}
	meta.SetStatusCondition(&s.Conditions, c)
}

func usersText(users []string) string {
	if len(users) == 1 {
		return "a volume uses"
	}
	return api.CountText(len(users), "volume") + " use"
}

// listSome lists a few names, so that a message stays short.
func listSome(names []string) string {
	if len(names) > 10 {
		return strings.Join(names[:10], ", ") + fmt.Sprintf(" and %d more", len(names)-10)
	}
	return strings.Join(names, ", ")
}
