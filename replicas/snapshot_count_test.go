package replicas

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// tells waits for an event about an object.
func (w *world) tells(name, reason, part string) {
	w.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		var list eventsv1.EventList
		if err := w.c.List(w.ctx, &list); err != nil {
			w.t.Fatalf("no event %s of %s with %q: %v", reason, name, part, err)
		}
		for _, e := range list.Items {
			if e.Regarding.Name == name && e.Reason == reason && strings.Contains(e.Note, part) {
				return
			}
		}
		<-tick.C
	}
}

// conditionIs waits until a condition of a volume has a status, and returns its message.
func (w *world) conditionIs(volume, kind, status string) string {
	w.t.Helper()
	v := w.volumeIs(volume, kind+" "+status, func(v *api.Volume) bool {
		c := meta.FindStatusCondition(v.Status.Conditions, kind)
		return c != nil && string(c.Status) == status
	})
	return meta.FindStatusCondition(v.Status.Conditions, kind).Message
}

// TestVolumeReportsTooManySnapshots: a volume with more snapshots than the setting allows, 100 by default, has a
// condition and takes more; with fewer snapshots the condition ends.
func TestVolumeReportsTooManySnapshots(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("counted", 16<<20)
	w.create(attachment("counted"))
	w.attached("counted")
	take := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			w.create(&api.Snapshot{ObjectMeta: named(fmt.Sprintf("s%d", i)), Spec: api.SnapshotSpec{Volume: "counted",
				CreateSnapshot: true}})
		}
		for i := from; i < to; i++ {
			w.ready(fmt.Sprintf("s%d", i))
		}
	}
	set := &api.Setting{ObjectMeta: named("snapshot-count-warning-threshold"), Value: "20"}
	most := 100
	if !suite.All() {
		most = 20
		w.create(set)
	}
	take(0, most)
	if v := w.volumeState("counted", api.VolumeAttached); meta.FindStatusCondition(v.Status.Conditions,
		api.ConditionTooMany) != nil {
		t.Errorf("%d are too many: %+v", most, v.Status.Conditions)
	}
	over := fmt.Sprintf("%d snapshots", most+1)
	take(most, most+1)
	if text := w.conditionIs("counted", api.ConditionTooMany, "True"); !strings.Contains(text, over) {
		t.Error(text)
	}
	w.tells("counted", "TooManySnapshots", over)
	take(most+1, most+2)
	drop := func(i int) {
		s := &api.Snapshot{ObjectMeta: named(fmt.Sprintf("s%d", i))}
		w.remove(s)
		gone(w, s, &api.SnapshotList{})
	}
	drop(7)
	w.volumeIs("counted", "with one less", func(v *api.Volume) bool {
		c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionTooMany)
		return c != nil && c.Status == "True" && strings.Contains(c.Message, over)
	})
	drop(11)
	w.conditionIs("counted", api.ConditionTooMany, "False")
	w.tells("counted", "FewerSnapshots", "")

	if suite.All() {
		w.create(set)
	}
	edit(w, set, func(s *api.Setting) { s.Value = strconv.Itoa(most - 1) })
	w.conditionIs("counted", api.ConditionTooMany, "True")
	edit(w, set, func(s *api.Setting) { s.Value = "0" })
	w.conditionIs("counted", api.ConditionTooMany, "False")
	w.detach("counted")
}
