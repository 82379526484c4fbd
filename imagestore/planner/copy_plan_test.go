package planner

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestPlan plans the wanted copies from the existing copies. A copy is written disk:state, with +From, !used, ~hours
// unused; a disk in upper case is evicted, a disk with a minus does not answer.
func TestPlan(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		name, disks, copies string
		least               int32
		source              api.SourceType
		deleting            bool
		clean               string
		want                string // create from>disk, drop, repair disk<from
		stays, problem      string
	}{
		{name: "the first from the source", disks: "a b", want: ">a"},
		{name: "nothing while it is made", disks: "a b", copies: "a:in-progress", least: 2},
		{name: "then the others", disks: "a b c", copies: "a:ready", least: 3, want: "a>b a>c"},
		{name: "where a volume is", disks: "a b", copies: "a:ready b!", want: "a>b"},
		{name: "the minimum cannot be", disks: "a b", copies: "a:ready b:ready", least: 3, problem: "2 of 3 copies"},
		{name: "a failed copy does not count", disks: "a b c", copies: "a:ready b:failed", least: 2, want: "a>c b<a"},
		{name: "unused for long", disks: "a b", copies: "a:ready~2 b:ready~3", want: "-b"},
		{name: "unused for a moment", disks: "a b", copies: "a:ready~0 b:ready~0"},
		{name: "unused, but wanted", disks: "a b", copies: "a:ready~9 b:ready~9", least: 2},
		{name: "unused, but the last", disks: "a", copies: "a:ready~9"},
		{name: "used", disks: "a b", copies: "a:ready! b:ready!~9"},
		{name: "unused and failed", disks: "a b", copies: "a:ready~9 b:failed~9", want: "-b b<a"},
		{name: "cleaned", disks: "a b", copies: "a:ready~0 b:ready~0", clean: "a", want: "-a"},
		{name: "cleaned, all", disks: "a b", copies: "a:ready~0 b:ready~0", clean: "a b", want: "-a"},
		{name: "cleaned, but used", disks: "a b", copies: "a:ready! b:ready~0", clean: "a"},
		{name: "left: moves first", disks: "A b", copies: "a:ready", want: "a>b", stays: "disk a"},
		{name: "left: under way", disks: "A b", copies: "a:ready b:in-progress+a", stays: "disk a"},
		{name: "left: moved", disks: "A b", copies: "a:ready b:ready+a", want: "-a"},
		{name: "left: nowhere to go", disks: "A B", copies: "a:ready", stays: "the image has no other ready copy",
			problem: "0 of 1 copies on disks that stay"},
		{name: "left: used", disks: "A b", copies: "a:ready! b:ready", stays: "a volume on the disk needs the copy"},
		{name: "left: more wanted than can be", disks: "A b c", copies: "a:ready b:ready c:ready", least: 3, want: "-a",
			problem: "2 of 3 copies"},
		{name: "left: more wanted, and there is room", disks: "A b c", copies: "a:ready b:ready", least: 2, want: "a>c",
			stays: "disk a"},
		{name: "left: failed there, begun elsewhere", disks: "A b", copies: "a:failed", source: api.SourceDownload,
			want: ">b"},
		{name: "a copy is made from it", disks: "a b c", copies: "a:ready~9 b:ready~9 c:in-progress+b", least: 1, want: "-a"},
		{name: "a volume reads it from there", disks: "a b c", copies: "a:ready~9 b:ready~9 c:pending!", least: 1},
		{name: "the sender is gone", disks: "a b c", copies: "a:ready b:failed+c", least: 1, want: "b<a"},
		{name: "failed, from the only sender: again", disks: "a b", copies: "a:ready b:failed+a"},
		{name: "an upload that is damaged, from another", disks: "a b", copies: "a:failed b:ready", source: api.SourceUpload,
			least: 2, want: "a<b", problem: "1 of 2 copies"},
		{name: "a disk is away: nothing at first", disks: "-a b", copies: "a:unknown", source: api.SourceDownload},
		{name: "a disk is away for long", disks: "-a b", copies: "a:unknown^", source: api.SourceDownload, want: ">b"},
		{name: "away for long, and cannot be asked for again", disks: "-a b", copies: "a:unknown^", source: api.SourceUpload},
		{name: "away for long: another for the minimum", disks: "-a b c", copies: "a:unknown^ b:ready", least: 2,
			want: "b>c"},
		{name: "an unused one that is away is not removed", disks: "-a b", copies: "a:unknown~9 b:ready~9"},
		{name: "deleted but used: no more copies", disks: "a b c", copies: "a:ready!", least: 2, deleting: true},
		{name: "deleted but used where there is none", disks: "a b", copies: "a:ready b!", deleting: true, want: "a>b"},
		{name: "the least busy sends", disks: "a b c d", copies: "a:ready b:ready c:in-progress+a", least: 4, want: "b>d"},
	} {
		t.Run(c.name, func(t *testing.T) {
			img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: c.source, MinNumberOfCopies: c.least}}
			img.Status.UUID = "image"
			if c.source == "" {
				img.Spec.SourceType = api.SourceFile
			}
			if c.deleting {
				img.DeletionTimestamp = &metav1.Time{Time: now}
			}
			for _, d := range strings.Fields(c.clean) {
				img.Spec.CleanupDisks = append(img.Spec.CleanupDisks, api.UID(d))
			}
			v := &clusterView{nodes: map[string]bool{"n": true}}
			for i, d := range strings.Fields(c.disks) {
				name := strings.ToLower(strings.TrimPrefix(d, "-"))
				p := diskState{uid: api.UID(name), node: "n", available: int64(100 - i), alive: d[0] != '-'}
				p.leaving = d != strings.ToLower(d)
				p.open = !p.leaving
				v.disks = append(v.disks, p)
			}
			for _, text := range strings.Fields(c.copies) {
				parse(t, text, img, v, now)
			}
			p := planCopies(img, v, planRules{now: now, unused: time.Hour})
			if got := p.text(); got != c.want {
				t.Errorf("plan %q, want %q", got, c.want)
			}
			if !strings.Contains(p.stays, c.stays) || (c.stays == "") != (p.stays == "") {
				t.Errorf("stays %q, want %q", p.stays, c.stays)
			}
			if !strings.Contains(p.problem, c.problem) || (c.problem == "") != (p.problem == "") {
				t.Errorf("problem %q, want %q", p.problem, c.problem)
			}
			for _, d := range img.Spec.CleanupDisks { // a wish is over, or the copy is removed
				dropped := slices.ContainsFunc(p.remove, func(c *api.ImageCopy) bool { return c.Spec.Disk == d })
				if !slices.Contains(p.cleaned, d) && !dropped {
					t.Errorf("the clean-up of %s never ends", d)
				}
			}
		})
	}
}

// parse reads a copy; a disk without a state has a volume alone.
func parse(t *testing.T, text string, img *api.BackingImage, v *clusterView, now time.Time) {
	t.Helper()
	disk := api.UID(text[:1])
	if strings.Contains(text, "!") {
		v.needed = append(v.needed, location{"n", disk})
	}
	_, state, there := strings.Cut(strings.ReplaceAll(text, "!", ""), ":")
	if !there {
		return
	}
	c := api.ImageCopy{Spec: api.ImageCopySpec{UUID: "image", Node: "n", Disk: disk}}
	c.Status.LastTransition = metav1.NewTime(now)
	sum := api.ImageCopySummary{Disk: disk}
	if state, there = strings.CutSuffix(state, "^"); there {
		c.Status.LastTransition = metav1.NewTime(now.Add(-time.Hour))
	}
	if s, hours, ok := strings.Cut(state, "~"); ok {
		var n int
		if _, err := fmt.Sscan(hours, &n); err != nil {
			t.Fatal(err)
		}
		state, sum.LastUsed = s, metav1.NewTime(now.Add(-time.Duration(n)*time.Hour))
	}
	if s, from, ok := strings.Cut(state, "+"); ok {
		state, c.Spec.From = s, api.UID(from)
	}
	c.Status.State = api.ImageState(state)
	v.copies = append(v.copies, c)
	img.Status.Copies = append(img.Status.Copies, sum)
}

func (p copyPlan) text() string {
	var out []string
	for _, c := range p.create {
		out = append(out, string(c.from)+">"+string(c.disk))
	}
	for _, c := range p.remove {
		out = append(out, "-"+string(c.Spec.Disk))
	}
	for _, r := range p.redirect {
		out = append(out, string(r.object.Spec.Disk)+"<"+string(r.from))
	}
	return strings.Join(out, " ")
}
