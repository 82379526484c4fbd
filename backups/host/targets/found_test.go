package targets

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
	"drover.io/drover/backups/tags"
)

// TestFoundBackupsHaveURLsOfTheirOwn: two snapshots of one name and volume, such as those of two clusters, become
// Backups with two URLs. A restore names its backup by the URL.
func TestFoundBackupsHaveURLsOfTheirOwn(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	s.saveMany(100, factsOf("nightly").Tags(), factsOf("nightly").Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	var urls []string
	for name, b := range w.backups() {
		urls = append(urls, b.Status.URL)
		if want := api.BackupURL(s.url(), name, "vol"); b.Status.URL != want {
			t.Errorf("backup %s has the URL %s, want %s", name, b.Status.URL, want)
		}
	}
	slices.Sort(urls)
	if len(urls) != 2 || urls[0] == urls[1] {
		t.Errorf("URLs of two backups: %q", urls)
	}
}

// TestNameOfATagStopsNoVisit: a name in a tag from which no second name of an object can be made hides no other backup.
func TestNameOfATagStopsNoVisit(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	long := strings.Repeat("l", tags.NameLimit-10) + "." + strings.Repeat("m", 9)
	ids := s.saveMany(100, factsOf(long).Tags(), factsOf(long).Tags(), factsOf("other").Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	found := map[string]bool{}
	for _, b := range w.backups() {
		found[b.Spec.SnapshotID] = b.Status.State == api.BackupCompleted
	}
	for _, id := range ids {
		if !found[id.String()] {
			t.Errorf("snapshot %s has no completed Backup", id)
		}
	}
}

// TestHostileLabelsStopNoVisit: labels of the greatest allowed length, all of characters that JSON writes as six, hide
// no other backup.
func TestHostileLabelsStopNoVisit(t *testing.T) {
	w := newWorld(t, "node-1")
	s := newShelf(t, "x")
	hostile := factsOf("hostile").Tags()
	for i := range 64 {
		hostile = append(hostile, fmt.Sprintf("label:%03d%s=%s", i, strings.Repeat("\x01", 317),
			strings.Repeat("\x02", 1024)))
	}
	s.saveMany(100, hostile, factsOf("other").Tags())
	w.addTarget("default", s.url(), "x")
	w.awaitReason("default", api.ReasonAvailable, "")
	for _, name := range []string{"hostile", "other"} {
		if b := w.backups()[name]; b == nil || b.Status.State != api.BackupCompleted {
			t.Errorf("backup %s: %+v", name, b)
		}
	}
}

// TestFloodOfBackupsIsBounded: the store has more backups than a target may have Backups. The visit makes the allowed
// ones, and says how many others exist.
func TestFloodOfBackupsIsBounded(t *testing.T) {
	t.Parallel()
	w := startWorld(t, func(r *targetReconciler) { r.opts.MostBackups = 2 }, "node-1")
	s := newShelf(t, api.PublishedPassword)
	var all [][]string
	for i := range 5 {
		f := factsOf(fmt.Sprintf("b%d", i))
		f.Object = uid(4 + i)
		all = append(all, f.Tags())
	}
	s.saveMany(1000, all...)
	w.addTarget("default", s.url(), "")
	target := w.awaitReason("default", api.ReasonAvailable, "")
	c := meta.FindStatusCondition(target.Status.Conditions, api.ConditionTooManyBackups)
	if n := len(w.backups()); n != 2 || c == nil || !strings.Contains(c.Message, "3 backups") ||
		target.Status.Backups != 5 {
		t.Errorf("%d Backups, condition %+v, status %+v", n, c, target.Status)
	}
}
