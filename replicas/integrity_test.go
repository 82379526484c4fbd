package replicas

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/maintain"
)

// TestIntegrity: scrubs at intervals follow the setting. Every snapshot has a digest in any case. enabled finds a bit
// changed without a trace; fast-check only files with a trace; disabled nothing. A requested scrub finds everything.
func TestIntegrity(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create(&api.Setting{ObjectMeta: named("volume-scrub-interval"), Value: "1"})
	for _, c := range []struct{ name, global, own string }{
		{"all", "enabled", ""}, {"ignored", "enabled", "ignored"}, {"own", "disabled", "enabled"},
		{"fast", "fast-check", ""}, {"fast-own", "enabled", "fast-check"},
		{"off", "disabled", "ignored"}, {"off-own", "enabled", "disabled"},
	} {
		set := &api.Setting{ObjectMeta: named(maintain.SettingIntegrity), Value: c.global}
		if err := w.c.Create(w.ctx, set); err != nil {
			edit(w, set, func(s *api.Setting) { s.Value = c.global })
		}
		v := volume(c.name, 16<<20)
		v.Spec.SnapshotDataIntegrity = c.own
		w.create(v)
		w.volumeState(c.name, api.VolumeDetached)
		w.create(attachment(c.name))
		w.attached(c.name)
		w.fill(c.name, strings.Repeat("whole ", 100000), 0)
		s := w.snapshot(c.name, "of-"+c.name)
		w.detach(c.name)
		s = w.snapshotIs(s.Name, "with a digest", func(s *api.Snapshot) bool {
			return strings.HasPrefix(s.Status.Checksum, "sha256:")
		})
		file := filepath.Join(w.dir, "disk", "layers", string(s.Status.Layer), "data")
		fast := strings.HasPrefix(c.name, "fast")
		if fast { // untouched: the scrub does not read the file
			w.rot(file)
			w.scrubbed(c.name, true)
			if r := w.memberOf(c.name); len(r.Status.Damage) > 0 {
				t.Errorf("%s: a file that nobody touched was read: %+v", c.name, r.Status.Damage)
			}
			if err := os.Chmod(file, 0o440); err != nil { // a trace
				t.Fatal(err)
			}
		} else {
			w.rot(file)
		}
		off := strings.HasPrefix(c.name, "off")
		w.scrubbed(c.name, !off)
		if off {
			if r := w.memberOf(c.name); len(r.Status.Damage) > 0 {
				t.Errorf("%s: it was compared: %+v", c.name, r.Status.Damage)
			}
			r := w.memberOf(c.name)
			base := r.DeepCopy()
			r.Spec.Scrub = "asked"
			if err := w.c.Patch(w.ctx, r, client.MergeFrom(base)); err != nil {
				t.Fatal(err)
			}
		}
		await(w, w.memberOf(c.name), &api.ReplicaList{}, "damaged", func(r *api.Replica) bool {
			return len(r.Status.Damage) == 1 && r.Status.Damage[0].Layer == s.Status.Layer
		})
		w.conditionIs(c.name, api.ConditionIntact, "False")
	}
}

// rot changes a bit of a file without a trace: the times of the inodes stay in their order, as if the disk had lost
// the bit.
func (w *world) rot(file string) {
	w.t.Helper()
	record := filepath.Join(filepath.Dir(file), "layer.json")
	b, err := os.ReadFile(record)
	if err != nil {
		w.t.Fatal(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err = f.WriteAt([]byte{'W' ^ 0x40}, 6000); err == nil {
		err = f.Close()
	}
	if err != nil {
		w.t.Fatal(err)
	}
	// The scrub compares the time of the data with the time of the record.
	if err := os.WriteFile(record+".new", b, 0o600); err != nil {
		w.t.Fatal(err)
	}
	if err := os.Rename(record+".new", record); err != nil {
		w.t.Fatal(err)
	}
}

// scrubbed makes a volume's replica due, and waits for the scrub, or for the time in which a scrub would have come.
func (w *world) scrubbed(volume string, is bool) {
	w.t.Helper()
	r := await(w, w.memberOf(volume), &api.ReplicaList{}, "no more written to by the scrub before", func(r *api.Replica) bool {
		return !w.data.scrubber.Busy(r.Spec.UID)
	})
	w.data.scrubber.Forget() // the result of another replica's scrub counts for an hour
	long := time.Now().Add(-2 * time.Hour).Truncate(time.Second)
	editStatus(w, r, func(r *api.Replica) { r.Status.LastScrubbed = &metav1.Time{Time: long} })
	if is {
		await(w, r, &api.ReplicaList{}, "scrubbed", func(r *api.Replica) bool {
			return r.Status.LastScrubbed != nil && r.Status.LastScrubbed.After(long)
		})
		return
	}
	pause := time.NewTimer(4 * time.Second) // the scrubber looks every second
	select {
	case <-pause.C:
	case <-w.ctx.Done():
	}
	if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(r), r); err != nil || r.Status.LastScrubbed.After(long) {
		w.t.Errorf("%s: %v, scrubbed %v", volume, err, r.Status.LastScrubbed)
	}
}
