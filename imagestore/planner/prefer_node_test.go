package planner

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestFirstCopyIsOnThePreferredNode: the first copy of a restored volume's image is on the node for the volume's first
// replica, that of another backup on the only node that can read the backup on demand, if the node takes a copy, and
// else on the disk with the most room.
func TestFirstCopyIsOnThePreferredNode(t *testing.T) {
	for _, c := range []struct {
		prefer, readableOn string
		open               bool
		want               api.UID
	}{{"b", "", true, "on-b"}, {"", "", true, "on-a"}, {"b", "", false, "on-a"}, {"none", "", true, "on-a"},
		{"", "b", true, "on-b"}, {"a", "b", true, "on-a"}, {"", "b", false, "on-a"}} {
		v := &clusterView{readableOn: c.readableOn, nodes: map[string]bool{"a": true, "b": true}, disks: []diskState{
			{uid: "on-a", node: "a", alive: true, open: true, available: 2 << 30},
			{uid: "on-b", node: "b", alive: true, open: c.open, available: 1 << 30}}}
		img := &api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: "i", Annotations: map[string]string{
			api.AnnotationPrefer: c.prefer}}, Spec: api.BackingImageSpec{SourceType: api.SourceRestore}}
		if p := planCopies(img, v, planRules{}); len(p.create) != 1 || p.create[0].disk != c.want {
			t.Errorf("%+v: %+v", c, p.create)
		}
	}
}
