package backups_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/driver/kubeapi/apitest"
)

// onFileSystem puts the repository of the world onto a file system in memory with room for size bytes.
func (w *world) onFileSystem(size int64) {
	w.T.Helper()
	aside := w.T.TempDir()
	must(w.T, os.CopyFS(aside, os.DirFS(w.folder)))
	must(w.T, unix.Mount("test", w.folder, "tmpfs", 0, fmt.Sprintf("size=%d", size)))
	w.T.Cleanup(func() { must(w.T, unix.Unmount(w.folder, unix.MNT_DETACH)) })
	must(w.T, os.CopyFS(w.folder, os.DirFS(aside)))
	s, err := folder.Open(w.Ctx, w.folder)
	must(w.T, err)
	w.store.Store = s
}

func (w *world) remount(flags uintptr, data string) {
	w.T.Helper()
	must(w.T, unix.Mount("test", w.folder, "tmpfs", unix.MS_REMOUNT|flags, data))
}

// refuse is a hook that fails operations of the kind.
func refuse(kind api.Kind, operations ...string) hook {
	return func(_ context.Context, operation, name string) error {
		for _, o := range operations {
			if o == operation {
				return api.Errorf(kind, "cannot %s object %s: the test refuses", operation, name)
			}
		}
		return nil
	}
}

// awaitCondition waits until a condition of the target has a reason.
func (w *world) awaitCondition(kind, reason string, status metav1.ConditionStatus) *api.BackupTarget {
	w.T.Helper()
	return apitest.Await(w.Server, w.target, &api.BackupTargetList{}, kind+" "+reason, func(t *api.BackupTarget) bool {
		c := meta.FindStatusCondition(t.Status.Conditions, kind)
		return c != nil && c.Reason == reason && c.Status == status
	})
}

// awaitGauge waits until the gauge of the target's failed writes has a value.
func (w *world) awaitGauge(want float64) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.Ctx, patience)
	defer cancel()
	for {
		families, err := metrics.Registry.Gather()
		must(w.T, err)
		for _, f := range families {
			if f.GetName() != "drover_backup_target_write_failed" {
				continue
			}
			for _, m := range f.GetMetric() {
				if m.GetLabel()[0].GetValue() == w.target.Name && m.GetGauge().GetValue() == want {
					return
				}
			}
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			w.T.Fatalf("drover_backup_target_write_failed does not become %v", want)
		}
	}
}

// mustRestore restores a backup and compares the bytes.
func (w *world) mustRestore(b *api.Backup, want []byte) {
	w.T.Helper()
	must(w.T, w.Client.Get(w.Ctx, client.ObjectKeyFromObject(b), b))
	open := w.openBackup(b.Status.URL)
	sink := &memorySink{got: make([]byte, len(want))}
	must(w.T, open.Restore(w.Ctx, sink))
	if !bytes.Equal(sink.got, want) {
		w.T.Errorf("backup %s: the restore has other bytes than the snapshot", b.Name)
	}
	must(w.T, open.Close())
}

// TestStoreThatRefusesWritesIsReported: after the first attempt that a store of readable objects fails, a condition of
// the target and a gauge say why. The target stays available, backups are restored from it, and the next complete
// backup ends the condition.
func TestStoreThatRefusesWritesIsReported(t *testing.T) {
	const room = 12 << 20
	for _, c := range []struct {
		name, reason string
		begin, end   func(w *world)
	}{
		{"no room", api.ReasonNoRoom, func(w *world) {
			var st unix.Statfs_t
			must(t, unix.Statfs(w.folder, &st))
			must(t, os.WriteFile(filepath.Join(w.folder, "other"), make([]byte, int64(st.Bfree)*st.Bsize), 0o600))
		}, func(w *world) { must(t, os.Remove(filepath.Join(w.folder, "other"))) }},
		{"little room", api.ReasonNoRoom, func(w *world) { // a lock has room, and a pack has none
			var st unix.Statfs_t
			must(t, unix.Statfs(w.folder, &st))
			must(t, os.WriteFile(filepath.Join(w.folder, "other"), make([]byte, int64(st.Bfree)*st.Bsize-1<<20), 0o600))
		}, func(w *world) { must(t, os.Remove(filepath.Join(w.folder, "other"))) }},
		{"read-only file system", api.ReasonReadOnlyStore, func(w *world) { w.remount(unix.MS_RDONLY, "") },
			func(w *world) { w.remount(0, "") }},
		{"no permission", api.ReasonDenied, func(w *world) { w.store.set(refuse(api.Denied, "put", "delete"), nil) },
			func(w *world) { w.store.set(nil, nil) }},
		{"no reason", api.ReasonWriteFailed, func(w *world) { w.store.set(refuse(api.Unavailable, "put"), nil) },
			func(w *world) { w.store.set(nil, nil) }},
	} {
		passed := t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			w.onFileSystem(room)
			v := w.newVolume("v", 6*chunk, map[int64][]byte{0: randomBytes(1, chunk)},
				map[int64][]byte{chunk: randomBytes(2, 2*chunk)})
			w.start(nil)
			first := w.newBackup("first", v, 0)
			w.awaitState(first, api.BackupCompleted)
			w.awaitAvailable(w.target.Name)
			w.awaitGauge(0)

			c.begin(w)
			second := w.newBackup("second", v, 1)
			failed := w.awaitCondition(api.ConditionWriteFailed, c.reason, metav1.ConditionTrue)
			if !failed.Status.Available {
				t.Errorf("the target is unavailable: %s", failed.Status.Message)
			}
			w.AwaitEvent("write failed", func(e *eventsv1.Event) bool {
				return e.Reason == "BackupTargetWriteFailed" && strings.HasPrefix(e.Note, c.reason+": ")
			})
			w.awaitGauge(1)
			if c.reason != api.ReasonWriteFailed { // a store that does not answer may answer a moment later
				w.mustRestore(first, v.contents[0])
			}

			c.end(w)
			w.awaitState(second, api.BackupCompleted)
			w.awaitCondition(api.ConditionWriteFailed, api.ReasonWritten, metav1.ConditionFalse)
			w.awaitGauge(0)
			w.mustRestore(second, v.contents[1])
		})
		if !passed {
			break // without a report, each further case waits as long
		}
	}
}

// TestStoreWithoutDeletionsIsReported: a store that keeps everything takes backups. The first deletion that it refuses
// says so in the condition of sweeps, not in that of writes.
func TestStoreWithoutDeletionsIsReported(t *testing.T) {
	w := newWorld(t)
	w.opts.Targets.Retry, w.opts.Targets.SweepDelay = time.Second, time.Millisecond
	v := w.newVolume("v", 6*chunk, map[int64][]byte{0: randomBytes(1, chunk)}, map[int64][]byte{0: randomBytes(2, chunk)})
	w.store.set(refuse(api.Denied, "delete"), nil)
	w.start(nil)
	first, second := w.newBackup("first", v, 0), w.newBackup("second", v, 1)
	w.awaitState(first, api.BackupCompleted)
	w.awaitState(second, api.BackupCompleted)
	w.awaitAvailable(w.target.Name)
	w.Delete(first)
	refused := w.awaitCondition(api.ConditionSweepFailed, api.ReasonSweepNotPermitted, metav1.ConditionTrue)
	if meta.IsStatusConditionTrue(refused.Status.Conditions, api.ConditionWriteFailed) || !refused.Status.Available {
		t.Errorf("a store without deletions: %+v", refused.Status)
	}
	w.AwaitEvent("deletion refused", func(e *eventsv1.Event) bool { return e.Reason == "SweepFailed" })
	w.mustRestore(second, v.contents[1])
	w.store.set(nil, nil)
	w.AwaitDeleted(first, &api.BackupList{})
	w.awaitCondition(api.ConditionSweepFailed, api.ReasonSwept, metav1.ConditionFalse)
}
