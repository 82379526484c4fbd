package kubeapi_test

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi"
)

// TestObjectsHaveNoManagedFields: the server keeps no managed fields of an object that clients create and change, and
// begins with the first server-side apply.
func TestObjectsHaveNoManagedFields(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir(), Volatile: true})
	c := newClient(t, s.Config)
	managers := func(name string) (all []string) {
		var n api.Node
		if err := c.Get(t.Context(), client.ObjectKey{Name: name}, &n); err != nil {
			t.Fatal(err)
		}
		for _, f := range n.ManagedFields {
			all = append(all, f.Manager)
		}
		return all
	}
	apply := func(name, value string) {
		t.Helper()
		wish := fmt.Appendf(nil, `{"apiVersion":%q,"kind":"Node","metadata":{"name":%q,"labels":{"applied":%q}}}`,
			api.GroupVersion, name, value)
		if err := c.Patch(t.Context(), &api.Node{ObjectMeta: anything(name, "").ObjectMeta},
			client.RawPatch(types.ApplyPatchType, wish), client.FieldOwner("someone")); err != nil {
			t.Fatal(err)
		}
	}
	n := anything("created", "1")
	if err := c.Create(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	n.Status.DataAddress = "192.0.2.1:1"
	if err := c.Status().Update(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if m := managers("created"); m != nil {
		t.Errorf("a created object has the managers %q, want none", m)
	}
	apply("created", "x")
	if m := managers("created"); len(m) != 2 {
		t.Errorf("after a server-side apply the managers are %q, want the one of the apply and the one before", m)
	}
	apply("applied", "x")
	apply("applied", "y")
	if m := managers("applied"); len(m) != 1 || m[0] != "someone" {
		t.Errorf("an applied object has the managers %q, want the one of the apply", m)
	}
}

// BenchmarkCreateWithStatus creates Backups and writes their status, sixteen at once, with two watches.
func BenchmarkCreateWithStatus(b *testing.B) {
	s, _ := start(b, kubeapi.Options{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
	c := newClient(b, s.Config)
	for range 2 {
		w, err := c.Watch(b.Context(), &api.BackupList{})
		if err != nil {
			b.Fatal(err)
		}
		go func() {
			for range w.ResultChan() { // until the end of the context
			}
		}()
	}
	cpu := func() float64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e6
	}
	var next atomic.Int64
	var workers sync.WaitGroup
	b.ResetTimer()
	before := cpu()
	for range 16 {
		workers.Go(func() {
			for i := next.Add(1); i <= int64(b.N); i = next.Add(1) {
				o := &api.Backup{Spec: api.BackupSpec{BackupTargetName: "default", Volume: "volume",
					SnapshotID: fmt.Sprintf("%064x", i), Labels: map[string]string{"recurring-job": "daily"}}}
				o.Name, o.Finalizers = fmt.Sprintf("backup-%d", i), []string{api.Finalizer}
				o.Labels = map[string]string{api.LabelVolume: "volume", api.LabelBackupTarget: "default"}
				if err := c.Create(b.Context(), o); err != nil {
					b.Error(err)
					return
				}
				o.Status = api.BackupStatus{CommonBackupStatus: api.CommonBackupStatus{State: api.BackupCompleted,
					SnapshotID: o.Spec.SnapshotID, URL: "file:///somewhere?backup=" + o.Name + "&volume=volume", Progress: 100,
					BackupCreatedAt: time.Now().UTC().Format(time.RFC3339), Labels: o.Spec.Labels}, SnapshotName: "snapshot",
					VolumeName: "volume", VolumeSize: 10 << 30}
				if err := c.Status().Update(b.Context(), o); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	workers.Wait()
	b.ReportMetric((cpu()-before)/float64(b.N), "cpu-ms/op")
}
