package imagestore

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// silence is how old a node's heartbeat may be; nodes renew it every 30 s.
const silence = 2 * time.Minute

// place is one disk of a node, as far as placement cares.
type place struct {
	uid                api.UID
	node               string
	nodeTags, diskTags []string
	alive              bool // node and disk answer
	open               bool // takes new copies
	leaving            bool // eviction is requested
	available          int64
}

// disksOf is every disk that the nodes tell of, and which nodes are alive.
func disksOf(nodes []api.Node, now time.Time) (disks []place, alive map[string]bool) {
	alive = map[string]bool{}
	for i := range nodes {
		n := &nodes[i]
		live := now.Sub(n.Status.Heartbeat.Time) < silence &&
			!meta.IsStatusConditionFalse(n.Status.Conditions, api.ConditionReady)
		alive[n.Name] = live
		for _, st := range n.Status.Disks {
			if st.UID == "" {
				continue
			}
			d := place{uid: st.UID, node: n.Name, nodeTags: n.Spec.Tags, alive: live && st.Ready, available: st.Available}
			j := slices.IndexFunc(n.Spec.Disks, func(s api.DiskSpec) bool { return s.Path == st.Path })
			if j >= 0 {
				s := n.Spec.Disks[j]
				d.diskTags, d.leaving = s.Tags, s.EvictionRequested
				d.open = !s.EvictionRequested && (s.Schedulable == nil || *s.Schedulable) &&
					(n.Spec.Schedulable == nil || *n.Spec.Schedulable)
			}
			disks = append(disks, d)
		}
	}
	return disks, alive
}

func (v *view) disk(uid api.UID) *place {
	i := slices.IndexFunc(v.disks, func(d place) bool { return d.uid == uid })
	if i < 0 {
		return nil
	}
	return &v.disks[i]
}

// gone reports that nobody will ever answer for the disk on that node: the node is no object any more, or the node is
// alive with all its disks and this one is not among them.
func (v *view) gone(node string, uid api.UID) bool {
	live, known := v.nodes[node]
	if !known {
		return true
	}
	mine := 0
	for _, d := range v.disks {
		if d.node != node {
			continue
		}
		if d.uid == uid || !d.alive {
			return false
		}
		mine++
	}
	return live && mine > 0
}

// used reports whether a replica on the disk has the image below it.
func (v *view) used(uid api.UID) bool {
	return slices.ContainsFunc(v.needed, func(n need) bool { return n.disk == uid })
}

type wanted struct {
	node       string
	disk, from api.UID
}

type repair struct {
	object *api.ImageCopy
	from   api.UID
}

type copyPlan struct {
	create  []wanted
	drop    []*api.ImageCopy
	repair  []repair
	problem string
}

// plan decides which copies are wanted. It looks at nothing but its arguments.
//
// First one copy is made from the source; when that is ready, the others: one on every disk where a replica needs it,
// and as many more as the minimum asks for. A copy goes when its disk is to be cleaned or left, no replica there needs
// it, and enough others are ready; the last ready one never goes.
func plan(img *api.BackingImage, v *view) copyPlan {
	var p copyPlan
	deleting := !img.DeletionTimestamp.IsZero()
	var have, ready []*api.ImageCopy
	staying := 0 // ready, on disks that are not to be left
	for i := range v.copies {
		c := &v.copies[i]
		if c.Spec.UUID != img.Status.UUID || v.gone(c.Spec.Node, c.Spec.Disk) || !c.DeletionTimestamp.IsZero() {
			p.drop = append(p.drop, c)
			continue
		}
		have = append(have, c)
		if c.Status.State == api.ImageReady && v.nodes[c.Spec.Node] {
			ready = append(ready, c)
			if d := v.disk(c.Spec.Disk); d == nil || !d.leaving {
				staying++
			}
		}
	}
	holds := func(uid api.UID) bool {
		return slices.ContainsFunc(v.copies, func(c api.ImageCopy) bool { return c.Spec.Disk == uid })
	}
	least := int(max(img.Spec.MinNumberOfCopies, 1))

	// from finds where a copy for a disk comes from; ok is false if there is no way today.
	from := func(node string) (uid api.UID, ok bool) {
		for _, c := range ready {
			if c.Spec.Node == node {
				return c.Spec.Disk, true
			}
		}
		return "", len(have) == 0 || img.Spec.SourceType == api.SourceDownload
	}
	add := func(node string, uid api.UID) {
		f, ok := from(node)
		if !ok {
			p.problem = fmt.Sprintf("a copy is needed on node %s: copying between nodes is not supported yet", node)
			return
		}
		p.create = append(p.create, wanted{node, uid, f})
	}

	if len(have) == 0 {
		for _, n := range v.needed {
			if d := v.disk(n.disk); d != nil && d.alive && !holds(n.disk) {
				add(n.node, n.disk)
				return p
			}
		}
		if deleting {
			return p
		}
		if d := choose(img, v, holds, nil); d != nil {
			add(d.node, d.uid)
		} else {
			p.problem = noDisk(img, v)
		}
		return p
	}
	if len(ready) == 0 {
		return p
	}
	for _, n := range v.needed {
		if d := v.disk(n.disk); d != nil && d.alive && !holds(n.disk) {
			add(n.node, n.disk)
		}
	}
	if !deleting {
		onNode := map[string]int{}
		coming := len(p.create)
		for _, c := range have {
			onNode[c.Spec.Node]++
			if d := v.disk(c.Spec.Disk); (d == nil || !d.leaving) && c.Status.State != api.ImageFailed {
				coming++
			}
		}
		taken := func(uid api.UID) bool {
			return holds(uid) || slices.ContainsFunc(p.create, func(w wanted) bool { return w.disk == uid })
		}
		for ; coming < least; coming++ {
			d := choose(img, v, taken, onNode)
			if d == nil {
				p.problem = fmt.Sprintf("%d of %d copies: %s", coming, least, noDisk(img, v))
				break
			}
			onNode[d.node]++
			add(d.node, d.uid)
		}
	}
	for _, c := range have {
		d := v.disk(c.Spec.Disk)
		leaving := d != nil && d.leaving
		if !leaving && !slices.Contains(img.Spec.CleanupDisks, c.Spec.Disk) || v.used(c.Spec.Disk) {
			continue
		}
		left := staying
		if c.Status.State == api.ImageReady && v.nodes[c.Spec.Node] && !leaving {
			left--
		}
		if left >= least {
			p.drop = append(p.drop, c)
			staying = left
		}
	}
	for _, c := range have {
		if c.Status.State != api.ImageFailed {
			continue
		}
		if f, ok := from(c.Spec.Node); ok && f != "" && f != c.Spec.From && f != c.Spec.Disk {
			p.repair = append(p.repair, repair{c, f})
		}
	}
	return p
}

// choose picks the disk for one more copy: on the node with the fewest copies, there with the most room.
func choose(img *api.BackingImage, v *view, taken func(api.UID) bool, onNode map[string]int) *place {
	var best *place
	for i := range v.disks {
		d := &v.disks[i]
		if !d.alive || !d.open || taken(d.uid) || d.available <= roomFor(img) ||
			slices.Contains(img.Spec.CleanupDisks, d.uid) ||
			!hasAll(d.nodeTags, img.Spec.NodeSelector) || !hasAll(d.diskTags, img.Spec.DiskSelector) {
			continue
		}
		if best == nil || onNode[d.node] < onNode[best.node] ||
			onNode[d.node] == onNode[best.node] && d.available > best.available {
			best = d
		}
	}
	return best
}

func hasAll(tags, want []string) bool {
	for _, w := range want {
		if !slices.Contains(tags, w) {
			return false
		}
	}
	return true
}

// roomFor is what a copy takes at least, as far as it is known.
func roomFor(img *api.BackingImage) int64 { return img.Status.Size }

// noDisk says why no disk takes a copy.
func noDisk(img *api.BackingImage, v *view) string {
	if len(v.disks) == 0 {
		return "no node has a disk: add one with `drover disk add`"
	}
	var why []string
	if s := append(slices.Clone(img.Spec.NodeSelector), img.Spec.DiskSelector...); len(s) > 0 {
		why = append(why, "tags "+strings.Join(s, ", "))
	}
	if n := roomFor(img); n > 0 {
		why = append(why, "room for "+api.SizeText(n))
	}
	why = append(why, "ready and schedulable")
	return fmt.Sprintf("none of the %s left suits: it must have: %s", plural(len(v.disks), "disk"), strings.Join(why, "; "))
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

// rank orders states by how far they are.
var rank = map[api.ImageState]int{api.ImageFailed: 1, api.ImageUnknown: 2, api.ImagePending: 3, api.ImageStarting: 4,
	api.ImageInProgress: 5, api.ImageTransfer: 6, api.ImageReady: 7}

// statusOf mirrors the copies into the image: its state is that of the most advanced one.
func statusOf(img *api.BackingImage, v *view, problem string) api.BackingImageStatus {
	s := *img.Status.DeepCopy()
	s.Copies, s.ReadyCopies, s.Progress, s.Message, s.State = nil, 0, 0, problem, ""
	var worst string
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
		if !v.nodes[c.Spec.Node] {
			st, message = api.ImageUnknown, fmt.Sprintf("node %s does not answer", c.Spec.Node)
		}
		sum := api.ImageCopySummary{Disk: c.Spec.Disk, Node: c.Spec.Node, State: st, Progress: c.Status.Progress, Message: message}
		for _, old := range img.Status.Copies {
			if old.Disk == sum.Disk {
				sum.LastUsed = old.LastUsed
			}
		}
		if v.used(c.Spec.Disk) {
			sum.LastUsed = metav1.Time{} // in use: no time since when it is not
		} else if sum.LastUsed.IsZero() && st == api.ImageReady {
			sum.LastUsed = metav1.NewTime(time.Now().Truncate(time.Second))
		}
		s.Copies = append(s.Copies, sum)
		if rank[st] > rank[s.State] {
			s.State = st
		}
		s.Progress = max(s.Progress, c.Status.Progress)
		if st == api.ImageFailed || st == api.ImageUnknown {
			worst = message
		}
		if st == api.ImageReady {
			s.ReadyCopies++
			s.Format, s.Checksum, s.Digest = c.Status.Format, c.Status.Checksum, c.Status.Digest
			s.Size, s.VirtualSize = c.Status.Size, c.Status.VirtualSize
		}
	}
	switch {
	case s.State != "":
	case problem != "" && validate(img) != nil:
		s.State = api.ImageFailed
	default:
		s.State = api.ImagePending
	}
	if s.Message == "" {
		s.Message = worst
	}
	if s.Size > 0 {
		s.SizeText, s.VirtualSizeText = api.SizeText(s.Size), api.SizeText(s.VirtualSize)
	}
	conditions(img, v, &s)
	return s
}

// explainCopy is a copy's message, and when it is tried again.
func explainCopy(c *api.ImageCopy) string {
	if c.Status.NextTry.IsZero() || c.Status.State != api.ImageFailed {
		return c.Status.Message
	}
	return fmt.Sprintf("%s (try %d failed, next try at %s)", c.Status.Message, c.Status.Attempts,
		c.Status.NextTry.UTC().Format(time.RFC3339))
}

func conditions(img *api.BackingImage, v *view, s *api.BackingImageStatus) {
	ready := metav1.Condition{Type: api.ConditionReady, Status: metav1.ConditionFalse, Reason: "InProgress",
		Message: s.Message, ObservedGeneration: img.Generation}
	least := max(img.Spec.MinNumberOfCopies, 1)
	switch {
	case s.State == api.ImageReady && s.ReadyCopies >= least:
		ready.Status, ready.Reason = metav1.ConditionTrue, "Ready"
	case s.State == api.ImageReady:
		ready.Status, ready.Reason = metav1.ConditionTrue, "TooFewCopies"
	case s.State == api.ImageFailed:
		ready.Reason = "Failed"
	case s.State == api.ImageUnknown:
		ready.Reason = "Unknown"
	case len(s.Copies) == 0 && s.Message != "":
		ready.Reason = "NoDisk"
	}
	ready.Message = clip(ready.Message)
	meta.SetStatusCondition(&s.Conditions, ready)
	if img.DeletionTimestamp.IsZero() {
		meta.RemoveStatusCondition(&s.Conditions, ConditionInUse)
		return
	}
	use := metav1.Condition{Type: ConditionInUse, Status: metav1.ConditionFalse, Reason: "NoVolume",
		Message: "copies are being removed", ObservedGeneration: img.Generation}
	if len(v.users) > 0 {
		use.Status, use.Reason = metav1.ConditionTrue, "UsedByVolumes"
		use.Message = fmt.Sprintf("the deletion waits: %s it: %s", usedBy(v.users), some(v.users))
		if s.Message == "" {
			s.Message = use.Message
		}
	}
	meta.SetStatusCondition(&s.Conditions, use)
}

func usedBy(users []string) string {
	if len(users) == 1 {
		return "a volume uses"
	}
	return plural(len(users), "volume") + " use"
}

// some names a few, so that a thousand do not fill the message.
func some(names []string) string {
	if len(names) > 10 {
		return strings.Join(names[:10], ", ") + fmt.Sprintf(" and %d more", len(names)-10)
	}
	return strings.Join(names, ", ")
}
