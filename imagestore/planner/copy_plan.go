package planner

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"drover.io/drover/api"
)

// planRules are the settings of a plan.
type planRules struct {
	now    time.Time
	unused time.Duration // a copy without a use is removed after this time; 0: never
}

type placement struct {
	node       string
	disk, from api.UID
}

type redirect struct {
	object *api.ImageCopy
	from   api.UID
}

// copyPlan is the result of planning: changes of ImageCopies, and facts for the status.
type copyPlan struct {
	create   []placement
	remove   []*api.ImageCopy
	redirect []redirect
	cleaned  []api.UID     // disks with a finished cleanup: the copy is removed, or has to stay
	problem  string        // the reason for a missing copy
	stays    string        // the reason for a copy on a disk under eviction
	wait     time.Duration // until time alone changes the plan; 0: never
}

// copyPlanner makes one plan.
type copyPlanner struct {
	copyPlan
	img   *api.BackingImage
	v     *clusterView
	rules planRules
	have  []*api.ImageCopy // copies that count
	ready []*api.ImageCopy // copies that other copies can be made from
	least int
}

// planCopies decides which copies an image needs, from its arguments alone.
//
// The first copy comes from the origin. Once the first copy is ready, planCopies adds a copy on every disk with a
// replica above the image, and further copies up to the minimum. planCopies removes a copy from a disk under eviction
// or cleanup, or after a long time without a use; but not below a replica, not while another copy reads the copy, and
// not below the minimum. A disk under eviction may fall below the minimum if no other disk takes a copy; the last ready
// copy always stays.
func planCopies(img *api.BackingImage, v *clusterView, r planRules) copyPlan {
	p := &copyPlanner{img: img, v: v, rules: r, least: int(max(img.Spec.MinNumberOfCopies, 1))}
	p.classifyCopies()
	if len(p.ready) == 0 {
		p.planFirst()
	} else {
		p.planNeeded()
		if img.DeletionTimestamp.IsZero() {
			p.planMinimum()
		}
		p.planRemovals()
		p.planSources()
	}
	for _, d := range img.Spec.CleanupDisks {
		if !p.hasCopy(d) {
			p.cleaned = append(p.cleaned, d)
		}
	}
	return p.copyPlan
}

// classifyCopies separates copies that count from copies to remove.
func (p *copyPlanner) classifyCopies() {
	for i := range p.v.copies {
		c := &p.v.copies[i]
		if c.Spec.UUID != p.img.Status.UUID || p.v.isGone(c.Spec.Node, c.Spec.Disk) || !c.DeletionTimestamp.IsZero() {
			p.remove = append(p.remove, c)
			continue
		}
		p.have = append(p.have, c)
		// Volumes use the copy of an export before its digests exist; other copies wait for the digests.
		if c.Status.State == api.ImageReady && p.v.isAlive(c.Spec.Disk) && (c.Spec.Export == nil || c.Status.Digest != "") {
			p.ready = append(p.ready, c)
		}
	}
}

// planFirst adds the copy from the origin, unless such a copy exists.
func (p *copyPlanner) planFirst() {
	for _, c := range p.have {
		if !p.isLost(c) && (c.Status.State != api.ImageFailed || !p.mustLeave(c)) {
			return // the copy is in progress, or is tried again
		}
	}
	if len(p.have) > 0 && !canImport(p.img, p.have, "") {
		return
	}
	if x := p.img.Status.Export; x != nil { // the snapshot is on this disk alone
		if p.img.DeletionTimestamp.IsZero() {
			p.addCopy(x.Node, x.Disk)
		}
		return
	}
	for _, n := range p.v.needed {
		if p.v.isAlive(n.disk) && !p.hasCopy(n.disk) {
			p.addCopy(n.node, n.disk)
			return
		}
	}
	if !p.img.DeletionTimestamp.IsZero() {
		return
	}
	if d := p.placeImport(); d != nil {
		p.addCopy(d.node, d.uid)
	} else if len(p.have) == 0 {
		p.problem = explainNoDisk(p.img, p.v)
	}
}

// placeImport places the first copy: of a clone on a disk with its layers, or else on a node with its layers; of a
// restored volume's image on the node for the volume's first replica; of another backup on the node that can read it on
// demand.
func (p *copyPlanner) placeImport() *diskState {
	without := func(same func(location, *diskState) bool) func(api.UID) bool {
		return func(u api.UID) bool {
			d := p.v.findDisk(u)
			return p.hasCopy(u) || !slices.ContainsFunc(p.v.sources, func(o location) bool { return same(o, d) })
		}
	}
	sameDisk := func(o location, d *diskState) bool { return o.disk == d.uid }
	sameNode := func(o location, d *diskState) bool { return o.node == d.node }
	if len(p.v.sources) > 0 {
		if d := choosePlacement(p.img, p.v, without(sameDisk), nil); d != nil {
			return d
		}
		if d := choosePlacement(p.img, p.v, without(sameNode), nil); d != nil {
			return d
		}
	}
	if node := cmp.Or(p.img.Annotations[api.AnnotationPrefer], p.v.readableOn); node != "" {
		elsewhere := func(u api.UID) bool { return p.hasCopy(u) || p.v.findDisk(u).node != node }
		if d := choosePlacement(p.img, p.v, elsewhere, nil); d != nil {
			return d
		}
	}
	return choosePlacement(p.img, p.v, p.hasCopy, nil)
}

// planNeeded adds copies on disks with replicas.
func (p *copyPlanner) planNeeded() {
	for _, n := range p.v.needed {
		if p.v.isAlive(n.disk) && !p.hasCopy(n.disk) {
			p.addCopy(n.node, n.disk)
		}
	}
}

// planMinimum adds copies up to the minimum of the image, on disks that stay.
func (p *copyPlanner) planMinimum() {
	onNode := map[string]int{}
	coming := 0
	for _, w := range p.create {
		onNode[w.node]++
		if d := p.v.findDisk(w.disk); d == nil || !d.leaving {
			coming++
		}
	}
	for _, c := range p.have {
		onNode[c.Spec.Node]++
		if !p.mustLeave(c) && c.Status.State != api.ImageFailed && !p.isLost(c) {
			coming++
		}
	}
	for ; coming < p.least; coming++ {
		d := choosePlacement(p.img, p.v, p.hasCopy, onNode)
		if d == nil {
			stay := ""
			if slices.ContainsFunc(p.have, p.mustLeave) {
				stay = " on disks that stay"
			}
			p.problem = fmt.Sprintf("%d of %d copies%s: %s", coming, p.least, stay, explainNoDisk(p.img, p.v))
			p.least = max(coming, 1) // without a disk for more copies, an eviction does not wait for more
			return
		}
		onNode[d.node]++
		p.addCopy(d.node, d.uid)
	}
}

// planRemovals removes copies that the image does not need.
func (p *copyPlanner) planRemovals() {
	left := 0 // ready, on disks that stay
	for _, c := range p.ready {
		if !p.mustLeave(c) {
			left++
		}
	}
	// The copy on the least suitable disk is removed first, then the copy with the longest time without a use.
	order := slices.Clone(p.have)
	slices.SortStableFunc(order, func(a, b *api.ImageCopy) int {
		return cmp.Or(cmp.Compare(p.diskFit(a), p.diskFit(b)), p.lastNeeded(a).Compare(p.lastNeeded(b)))
	})
	for _, c := range order {
		leaving, asked := p.mustLeave(c), slices.Contains(p.img.Spec.CleanupDisks, c.Spec.Disk)
		idle := p.idleTime(c)
		why := ""
		switch {
		case p.v.isUsed(c.Spec.Disk):
			why = "a volume on the disk needs the copy"
		case p.isSource(c):
			why = "the copy is the source of another copy"
		default:
			after := left
			if slices.Contains(p.ready, c) && !leaving {
				after--
			}
			if after >= p.least {
				break
			}
			if why = p.problem; why == "" {
				why = "the others are not ready yet"
			}
			if len(p.ready) == 1 && p.ready[0] == c {
				why = "the image has no other ready copy; " + why
			}
		}
		switch {
		case why == "" && (leaving || asked || idle == 0):
			p.remove = append(p.remove, c)
			if slices.Contains(p.ready, c) && !leaving {
				left--
			}
			continue
		case why == "" && idle > 0:
			p.wakeAfter(idle)
		case leaving:
			p.stays = fmt.Sprintf("the copy stays on disk %s, which is to be left: %s", p.diskName(c.Spec.Disk), why)
		}
		if asked {
			p.cleaned = append(p.cleaned, c.Spec.Disk)
		}
	}
}

// planSources gives unfinished copies another source if their source failed or disappeared.
func (p *copyPlanner) planSources() {
	for _, c := range p.have {
		isSender := slices.ContainsFunc(p.ready, func(s *api.ImageCopy) bool { return s.Spec.Disk == c.Spec.From })
		switch {
		case c.Status.State == api.ImageReady:
		case c.Spec.From == "" && c.Status.State != api.ImageFailed:
		case c.Status.TriedFrom != c.Spec.From && (c.Spec.From == "" || isSender):
			// The copy tries its source first; otherwise two failing sources would take turns at every reconcile.
		case c.Spec.From != "" && isSender && (c.Status.State != api.ImageFailed || c.Status.Attempts < 2):
		default:
			f, ok := p.selectSource(c.Spec.Node, c.Spec.From)
			if ok && f != c.Spec.From && f != c.Spec.Disk {
				p.redirect = append(p.redirect, redirect{c, f})
			}
		}
	}
}

// selectSource finds the source of a copy on a node: the ready copy of the node that serves the fewest copies, else a
// ready copy of any node, else the origin. ok is false without a source. not is a disk from which the copy failed
// before.
func (p *copyPlanner) selectSource(node string, not api.UID) (uid api.UID, ok bool) {
	least := 0
	for _, c := range p.ready {
		if c.Spec.Disk == not {
			continue
		}
		serves := 0
		if c.Spec.Node != node {
			serves = 1 << 20 // copies of the node come first
		}
		for _, r := range p.have {
			if r.Spec.From == c.Spec.Disk && r.Status.State != api.ImageReady {
				serves++
			}
		}
		for _, w := range p.create {
			if w.from == c.Spec.Disk {
				serves++
			}
		}
		if uid == "" || serves < least {
			uid, least = c.Spec.Disk, serves
		}
	}
	return uid, uid != "" || canImport(p.img, p.have, node)
}

// canImport reports whether the origin can supply the image again. have are the copies that came from the origin.
func canImport(img *api.BackingImage, have []*api.ImageCopy, node string) bool {
	switch img.Spec.SourceType {
	case api.SourceDownload, api.SourceRegistry, api.SourceRestore:
		return true
	case api.SourceFile, api.SourceClone: // on a node with an earlier copy
		return len(have) == 0 || slices.ContainsFunc(have, func(c *api.ImageCopy) bool {
			return node == "" || c.Spec.Node == node
		})
	}
	return len(have) == 0
}

func (p *copyPlanner) addCopy(node string, uid api.UID) {
	f, ok := p.selectSource(node, "")
	if !ok {
		p.problem = fmt.Sprintf("node %s needs a copy, and the image has no ready copy as a source", node)
		return
	}
	p.create = append(p.create, placement{node, uid, f})
}

// hasCopy reports whether the disk has a copy or a planned copy.
func (p *copyPlanner) hasCopy(uid api.UID) bool {
	return slices.ContainsFunc(p.v.copies, func(c api.ImageCopy) bool { return c.Spec.Disk == uid }) ||
		slices.ContainsFunc(p.create, func(w placement) bool { return w.disk == uid })
}

// mustLeave reports whether the copy has to leave its disk.
func (p *copyPlanner) mustLeave(c *api.ImageCopy) bool {
	d := p.v.findDisk(c.Spec.Disk)
	if x := p.img.Status.Export; d != nil && x != nil && x.Disk == d.uid && !p.matchesTags(d) {
		return true // an export starts on the disk of its snapshot
	}
	return d != nil && d.leaving
}

// matchesTags reports whether a disk matches the image's selectors.
func (p *copyPlanner) matchesTags(d *diskState) bool {
	return hasTags(d.nodeTags, p.img.Spec.NodeSelector) && hasTags(d.diskTags, p.img.Spec.DiskSelector)
}

// isLost reports whether the disk has not answered for so long that the copy no longer counts.
func (p *copyPlanner) isLost(c *api.ImageCopy) bool {
	if !p.v.nodes[c.Spec.Node] {
		return true
	}
	if p.v.isAlive(c.Spec.Disk) || c.Status.State != api.ImageUnknown {
		return false
	}
	rest := silentAfter - p.rules.now.Sub(c.Status.LastTransition.Time)
	if rest > 0 {
		p.wakeAfter(rest)
	}
	return rest <= 0
}

// isSource reports whether an unfinished copy, or a replica on a disk of the node without a ready copy, reads the copy.
func (p *copyPlanner) isSource(c *api.ImageCopy) bool {
	if !slices.Contains(p.ready, c) {
		return false
	}
	for _, r := range p.have {
		if r.Spec.From == c.Spec.Disk && r.Status.State != api.ImageReady && r.Status.State != api.ImageFailed &&
			p.v.isAlive(r.Spec.Disk) {
			return true
		}
	}
	return slices.ContainsFunc(p.v.needed, func(n location) bool {
		return n.node == c.Spec.Node && p.v.isAlive(n.disk) &&
			!slices.ContainsFunc(p.ready, func(r *api.ImageCopy) bool { return r.Spec.Disk == n.disk })
	})
}

// diskFit orders copies by the fitness of their disks.
func (p *copyPlanner) diskFit(c *api.ImageCopy) int {
	d := p.v.findDisk(c.Spec.Disk)
	switch {
	case d == nil || d.leaving:
		return 0
	case !slices.Contains(p.ready, c):
		return 1
	case !p.matchesTags(d):
		return 2
	}
	return 3
}

// lastNeeded returns the end of the last use; zero: in use, or unknown.
func (p *copyPlanner) lastNeeded(c *api.ImageCopy) time.Time {
	for _, s := range p.img.Status.Copies {
		if s.Disk == c.Spec.Disk {
			return s.LastUsed.Time
		}
	}
	return time.Time{}
}

// idleTime returns the time until the copy has been without a use for too long: 0 now, -1 never.
func (p *copyPlanner) idleTime(c *api.ImageCopy) time.Duration {
	since := p.lastNeeded(c)
	if p.rules.unused <= 0 || since.IsZero() || !p.v.isAlive(c.Spec.Disk) {
		return -1
	}
	return max(p.rules.unused-p.rules.now.Sub(since), 0)
}

func (p *copyPlanner) wakeAfter(d time.Duration) {
	d += time.Second // times in the API have whole seconds
	if p.wait == 0 || d < p.wait {
		p.wait = d
	}
}

// diskName names a disk in messages.
func (p *copyPlanner) diskName(uid api.UID) string {
	if d := p.v.findDisk(uid); d != nil && d.path != "" {
		return d.path + " of node " + d.node
	}
	return string(uid)
}

// choosePlacement chooses the disk for a copy: on the node with the fewest copies, there the disk with the most room.
func choosePlacement(img *api.BackingImage, v *clusterView, taken func(api.UID) bool, onNode map[string]int,
) *diskState {
	var best *diskState
	for i := range v.disks {
		d := &v.disks[i]
		if !d.alive || !d.open || taken(d.uid) || d.available <= minSize(img) ||
			slices.Contains(img.Spec.CleanupDisks, d.uid) ||
			!hasTags(d.nodeTags, img.Spec.NodeSelector) || !hasTags(d.diskTags, img.Spec.DiskSelector) {
			continue
		}
		if best == nil || onNode[d.node] < onNode[best.node] ||
			onNode[d.node] == onNode[best.node] && d.available > best.available {
			best = d
		}
	}
	return best
}

func hasTags(tags, want []string) bool {
	for _, w := range want {
		if !slices.Contains(tags, w) {
			return false
		}
	}
	return true
}

// minSize returns the known minimum of bytes that a copy takes.
func minSize(img *api.BackingImage) int64 { return img.Status.Size }

// explainNoDisk explains why no disk takes a copy.
func explainNoDisk(img *api.BackingImage, v *clusterView) string {
	if len(v.disks) == 0 {
		return "no node has a disk: add one with `drover disk add`"
	}
	var why []string
	if s := append(slices.Clone(img.Spec.NodeSelector), img.Spec.DiskSelector...); len(s) > 0 {
		why = append(why, "tags "+strings.Join(s, ", "))
	}
	if n := minSize(img); n > 0 {
		why = append(why, "room for "+api.SizeText(n))
	}
	why = append(why, "ready and schedulable")
	return fmt.Sprintf("none of the %s left suits: it must have: %s", api.CountText(len(v.disks), "disk"),
		strings.Join(why, "; "))
}
