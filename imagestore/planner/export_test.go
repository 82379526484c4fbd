package planner

import (
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
)

// TestPlanExport: the first copy of a volume's image is on the disk of the layers, against the selectors. The planner
// removes the first copy after a suitable copy is ready, and not before.
func TestPlanExport(t *testing.T) {
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceExport, MinNumberOfCopies: 1,
		DiskSelector: []string{"fast"}}}
	img.Status.UUID, img.Status.Layers = "u", []api.UID{"l"}
	img.Status.Export = &api.ExportFact{Node: "n", Disk: "a"}
	v := &clusterView{nodes: map[string]bool{"n": true}, disks: []diskState{
		{node: "n", uid: "a", alive: true, open: true, available: 1 << 30},
		{node: "n", uid: "b", alive: true, open: true, available: 1 << 30, diskTags: []string{"fast"}}}}
	r := planRules{now: time.Now(), unused: time.Hour}
	p := planCopies(img, v, r)
	if len(p.create) != 1 || p.create[0] != (placement{"n", "a", ""}) {
		t.Fatalf("%+v", p.create)
	}
	on := func(disk api.UID, s api.ImageState) api.ImageCopy {
		c := *newCopy(img, placement{node: "n", disk: disk})
		c.Status.State = s
		return c
	}
	v.copies = []api.ImageCopy{on("a", api.ImageReady)}
	if p = planCopies(img, v, r); len(p.create)+len(p.remove) > 0 {
		t.Fatalf("copied without digests: %+v, %+v", p.create, p.remove)
	}
	v.copies[0].Status.Digest = "sha256:1"
	p = planCopies(img, v, r)
	if len(p.create) != 1 || p.create[0] != (placement{"n", "b", "a"}) || len(p.remove) > 0 {
		t.Fatalf("%+v, %+v", p.create, p.remove)
	}
	v.copies = append(v.copies, on("b", api.ImageInProgress))
	v.copies[1].Spec.From = "a"
	if p = planCopies(img, v, r); len(p.create)+len(p.remove) > 0 {
		t.Fatalf("%+v, %+v", p.create, p.remove)
	}
	v.copies[1].Status.State, v.copies[1].Status.Digest = api.ImageReady, "sha256:1"
	if p = planCopies(img, v, r); len(p.remove) != 1 || p.remove[0].Spec.Disk != "a" {
		t.Fatalf("%+v", p.remove)
	}
}

// TestHolder: an image is made from a member, and preferably from a reachable member.
func TestHolder(t *testing.T) {
	v := &api.Volume{Status: api.VolumeStatus{UID: "v", Members: []string{"v.1", "v.2"}}}
	rep := func(name, disk string, of api.UID, mode api.ReplicaMode) api.Replica {
		r := api.Replica{Spec: api.ReplicaSpec{Disk: api.UID(disk), VolumeUID: of}}
		r.Name, r.Status.Mode = name, mode
		return r
	}
	look := &clusterView{disks: []diskState{{uid: "near", alive: true}, {uid: "far"}}}
	former, away := rep("v.0", "near", "v", api.ReplicaCurrent), rep("v.1", "far", "v", api.ReplicaCurrent)
	there, other := rep("v.2", "near", "v", api.ReplicaCurrent), rep("v.2", "near", "other", api.ReplicaCurrent)
	for _, c := range []struct {
		name string
		reps []api.Replica
		want string
	}{
		{"one that answers", []api.Replica{former, away, there}, "v.2"},
		{"the first", []api.Replica{there, away}, "v.2"},
		{"it comes back, perhaps", []api.Replica{former, away}, "v.1"},
		{"of another volume, no member, not whole", []api.Replica{other, former,
			rep("v.1", "near", "v", api.ReplicaStale)}, ""},
	} {
		got := ""
		if r := selectReplica(v, c.reps, look); r != nil {
			got = r.Name
		}
		if got != c.want {
			t.Errorf("%s: %q, not %q", c.name, got, c.want)
		}
	}
}

// TestInShort: an image of a volume has no SHA-512, and the summary shows no checksum.
func TestInShort(t *testing.T) {
	s := &api.BackingImageStatus{Format: "raw", VirtualSizeText: "1 GiB"}
	if got := summarizeImage(s); got != "raw image, 1 GiB" {
		t.Errorf("%q", got)
	}
	s.Checksum = strings.Repeat("0123456789abcdef", 8)
	if got := summarizeImage(s); got != "raw image, 1 GiB, SHA-512 0123456789abcdef..." {
		t.Errorf("%q", got)
	}
}
