package kubeapi

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// serving is a server on a folder, until stop.
type serving struct {
	*testing.T
	*Server
	client client.WithWatch
	stop   func()
}

func serve(t *testing.T, o Options) *serving {
	t.Helper()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctx, cancel := context.WithCancel(context.Background())
	s, err := Start(ctx, o)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	v := &serving{T: t, Server: s}
	v.stop = func() {
		cancel()
		if err := s.Wait(); err != nil {
			t.Errorf("Wait: %v", err)
		}
	}
	t.Cleanup(v.stop)
	scheme := runtime.NewScheme()
	if err := api.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	if v.client, err = client.NewWithWatch(s.Config, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	return v
}

func (s *serving) put(name, value string) error {
	obj := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"value": value}}}
	err := s.client.Create(s.Context(), obj)
	if apierrors.IsAlreadyExists(err) {
		return s.client.Patch(s.Context(), obj, client.RawPatch("application/merge-patch+json",
			fmt.Appendf(nil, `{"metadata":{"annotations":{"value":%q}}}`, value)))
	}
	return err
}

func (s *serving) value(name string) string {
	s.Helper()
	var got api.Node
	if err := s.client.Get(s.Context(), client.ObjectKey{Name: name}, &got); apierrors.IsNotFound(err) {
		return "none"
	} else if err != nil {
		s.Fatal(err)
	}
	return got.Annotations["value"]
}

func (s *serving) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// until polls ok, because no event announces the change.
func (s *serving) until(what string, ok func() bool) {
	s.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(3 * time.Minute); !ok(); {
		select {
		case <-tick.C:
		case <-deadline:
			s.Fatal("no " + what)
		}
	}
}

// firstSnapshot waits for the snapshot at the server's start: the next snapshot is an hour away.
func (s *serving) firstSnapshot(dir string) {
	s.Helper()
	s.until("first snapshot", func() bool {
		snaps, err := Snapshots(dir)
		s.must(err)
		return len(snaps) > 0
	})
}

// TestRestore: a snapshot can be restored. Clients with later revisions get an error, and the next start sets WentBack.
func TestRestore(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	if s.WentBack {
		t.Error("a first start went back in time")
	}
	s.firstSnapshot(dir)
	s.must(s.put("a", "old"))
	s.must(s.store.takeSnapshot(time.Now().Add(2 * time.Hour)))
	s.must(s.put("a", "new"))
	var list api.NodeList
	s.must(s.client.List(t.Context(), &list))
	if _, err := Restore(dir, "x"); !api.Is(err, api.NotFound) {
		t.Errorf("no such snapshot: %v", err)
	}
	snaps, err := Snapshots(dir)
	if err != nil || len(snaps) == 0 {
		t.Fatal(snaps, err)
	}
	last := snaps[len(snaps)-1]
	if _, err := Restore(dir, last); !api.Is(err, api.InUse) {
		t.Errorf("restore under a running server: %v", err)
	}
	s.stop()
	s = serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	if s.WentBack || s.value("a") != "new" {
		t.Errorf("an ordinary restart went back: %v, %s", s.WentBack, s.value("a"))
	}
	s.stop()

	broken := filepath.Join(t.TempDir(), "broken.db")
	b, err := os.ReadFile(last)
	s.must(err)
	b[len(b)/2] ^= 1
	s.must(os.WriteFile(broken, b, 0o600))
	if _, err := Restore(dir, broken); !api.Is(err, api.Corrupt) {
		t.Errorf("a damaged snapshot: %v", err)
	}
	aside, err := Restore(dir, last)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(aside, "member")); err != nil {
		t.Errorf("the former state is not kept: %v", err)
	}
	s = serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	if !s.WentBack || s.value("a") != "old" {
		t.Errorf("after a restore: %v, %s", s.WentBack, s.value("a"))
	}
	w, err := s.client.Watch(t.Context(), &api.NodeList{},
		&client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.ResourceVersion}})
	if err == nil {
		defer w.Stop()
		select {
		case e := <-w.ResultChan():
			err = apierrors.FromObject(e.Object)
		case <-time.After(2 * time.Minute):
			t.Fatal("a watch from a revision that was lost waits for ever")
		}
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Errorf("a watch from a revision that was lost: %v", err)
	}
}

// TestLostState: the server notices a database which was lost or replaced between two runs.
func TestLostState(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	s.must(s.put("a", "1"))
	s.stop()
	old := filepath.Join(t.TempDir(), "etcd")
	s.must(os.CopyFS(old, os.DirFS(filepath.Join(dir, "etcd"))))
	s = serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	s.must(s.put("a", "2"))
	s.stop()
	for _, from := range []string{old, ""} {
		s.must(os.RemoveAll(filepath.Join(dir, "etcd")))
		want := "none"
		if from != "" {
			s.must(os.CopyFS(filepath.Join(dir, "etcd"), os.DirFS(from)))
			want = "1"
		}
		s = serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
		if !s.WentBack || s.value("a") != want {
			t.Errorf("%q: went back %v, a is %s", from, s.WentBack, s.value("a"))
		}
		s.stop()
	}
}

// TestCompaction: the server forgets old revisions, or the database would grow with every heartbeat.
func TestCompaction(t *testing.T) {
	s := serve(t, Options{Dir: t.TempDir(), MaintainEvery: time.Hour, Compact: 200 * time.Millisecond})
	kv := s.store.etcd.Server.KV()
	i := 0
	s.until("compaction", func() bool {
		i++
		s.must(s.put("a", fmt.Sprint(i)))
		return kv.FirstRev() > 20
	})
	if s.value("a") != fmt.Sprint(i) {
		t.Error("the present is gone too")
	}
}

// TestQuota: a full database refuses writes and reports Full. After objects are deleted, the database recovers without
// help.
func TestQuota(t *testing.T) {
	s := serve(t, Options{Dir: t.TempDir(), QuotaBytes: 4 << 20, MaintainEvery: 100 * time.Millisecond,
		Compact: 200 * time.Millisecond})
	big := strings.Repeat("x", 200<<10)
	n := 0
	s.until("refusal", func() bool { // old revisions may cause the first refusal: compaction makes room for more
		err := s.put(fmt.Sprint("big-", n), big)
		if err == nil {
			n++
		}
		if n > 100 {
			t.Fatal("the quota is not held")
		}
		return err != nil && strings.Contains(err.Error(), "space exceeded") && api.Is(s.Healthy(), api.Full)
	})
	for i := range n + 1 {
		obj := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("big-", i)}}
		if err := s.client.Delete(t.Context(), obj); client.IgnoreNotFound(err) != nil {
			t.Fatalf("delete in a full database: %v", err)
		}
	}
	s.until("recovery", func() bool { return s.Healthy() == nil && s.put("small", "y") == nil })
}

// TestSnapshotsRotate: the server keeps at most keepSnapshots snapshots, and always the newest.
func TestSnapshotsRotate(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	s.firstSnapshot(dir)
	at := time.Now()
	for i := range keepSnapshots + 3 {
		at = at.Add(2 * snapshotInterval)
		s.must(s.put("a", fmt.Sprint(i)))
		s.must(s.store.takeSnapshot(at))
		s.must(s.store.takeSnapshot(at.Add(time.Minute))) // too soon
	}
	snaps, err := Snapshots(dir)
	if err != nil || len(snaps) != keepSnapshots ||
		!strings.Contains(snaps[keepSnapshots-1], at.UTC().Format(time.RFC3339)) {
		t.Errorf("%v, %v", snaps, err)
	}
}

// TestSnapshotsAtOnce: taking a snapshot removes half-written files, but no snapshot in progress.
func TestSnapshotsAtOnce(t *testing.T) {
	dir := t.TempDir()
	s := serve(t, Options{Dir: dir, MaintainEvery: time.Hour})
	s.firstSnapshot(dir)
	at := time.Now()
	for i := range 5 {
		s.must(s.put("a", fmt.Sprint(i)))
		var g errgroup.Group
		for range 4 {
			at = at.Add(2 * snapshotInterval)
			at := at
			g.Go(func() error { return s.store.takeSnapshot(at) })
		}
		s.must(g.Wait())
	}
}
