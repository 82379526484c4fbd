package planner

import (
	"testing"
	"time"

	"drover.io/drover/api"
)

// TestPlanAcrossNodes: a copy comes from the copy's own node first, then from the least busy disk of another node, and
// from elsewhere after failures.
func TestPlanAcrossNodes(t *testing.T) {
	for _, c := range []struct {
		name         string
		copies       []api.ImageCopy
		least        int32
		needed       string // disk
		create, mend string // disk of the source
	}{
		{"another node", []api.ImageCopy{on("n1", "a", api.ImageReady, "", 0)}, 1, "c", "a", ""},
		{"the own node first", []api.ImageCopy{on("n1", "a", api.ImageReady, "", 0), on("n2", "d", api.ImageReady, "", 0)}, 1,
			"c", "d", ""},
		{"the least busy", []api.ImageCopy{on("n1", "a", api.ImageReady, "", 0), on("n1", "b", api.ImageReady, "", 0),
			on("n2", "d", api.ImageInProgress, "a", 0)}, 1, "c", "b", ""},
		{"failed twice", []api.ImageCopy{on("n1", "a", api.ImageReady, "", 0), on("n1", "b", api.ImageReady, "", 0),
			on("n2", "c", api.ImageFailed, "a", 2)}, 1, "", "", "b"},
		{"failed twice from another", []api.ImageCopy{on("n1", "a", api.ImageReady, "", 0), on("n1", "b", api.ImageReady, "", 0),
			tried(on("n2", "c", api.ImageFailed, "b", 2), "a")}, 1, "", "", ""},
		{"failed from one that is gone", []api.ImageCopy{on("n1", "a", api.ImageUnknown, "", 0), on("n1", "b", api.ImageReady, "", 0),
			tried(on("n2", "c", api.ImageFailed, "a", 1), "b")}, 1, "", "", "b"},
		{"failed once", []api.ImageCopy{on("n1", "a", api.ImageReady, "", 0), on("n1", "b", api.ImageReady, "", 0),
			on("n2", "c", api.ImageFailed, "a", 1)}, 1, "", "", ""},
	} {
		img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceUpload, MinNumberOfCopies: c.least}}
		img.Status.UUID = "image"
		v := &clusterView{nodes: map[string]bool{"n1": true, "n2": true}, copies: c.copies}
		for _, d := range []struct {
			uid  api.UID
			node string
		}{{"a", "n1"}, {"b", "n1"}, {"c", "n2"}, {"d", "n2"}} {
			v.disks = append(v.disks, diskState{uid: d.uid, node: d.node, alive: true, open: true, available: 100})
		}
		if c.needed != "" {
			v.needed = []location{{"n2", api.UID(c.needed)}}
		}
		p := planCopies(img, v, planRules{now: time.Now()})
		create, mend := "", ""
		if len(p.create) == 1 {
			create = string(p.create[0].from)
		}
		if len(p.redirect) == 1 {
			mend = string(p.redirect[0].from)
		}
		if create != c.create || mend != c.mend || len(p.create) > 1 || len(p.redirect) > 1 {
			t.Errorf("%s: create %+v, repair %+v, problem %q", c.name, p.create, p.redirect, p.problem)
		}
	}
}

func on(node string, disk api.UID, state api.ImageState, from api.UID, attempts int32) api.ImageCopy {
	c := api.ImageCopy{Spec: api.ImageCopySpec{UUID: "image", Node: node, Disk: disk, From: from}}
	c.Status.State, c.Status.Attempts = state, attempts
	if state == api.ImageFailed {
		c.Status.TriedFrom = from
	}
	return c
}

func tried(c api.ImageCopy, from api.UID) api.ImageCopy {
	c.Status.TriedFrom = from
	return c
}
