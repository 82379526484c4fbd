package replicas

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// written creates an object with exactly the given fields, as kubectl does.
func (w *world) written(kind, name string, spec map[string]any) {
	w.t.Helper()
	w.create(&unstructured.Unstructured{Object: map[string]any{
		"apiVersion": api.GroupVersion.String(), "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec}})
}

// TestEmptyFieldsWrittenOut: Drover can still update objects with immutable fields after a user wrote empty fields
// out.
func TestEmptyFieldsWrittenOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.written("Attachment", "a", map[string]any{"volume": "a", "node": testNode, "readOnly": false})
	w.attached("a")
	w.written("Snapshot", "s1", map[string]any{"volume": "a", "createSnapshot": true, "labels": map[string]any{}})
	w.ready("s1")
	w.written("Snapshot", "nothing", map[string]any{"volume": "a", "createSnapshot": false})
	none := &api.Snapshot{ObjectMeta: named("nothing")} // for a missing snapshot: deleted
	gone(w, none, &api.SnapshotList{})
	w.written("SnapshotGroup", "g", map[string]any{"volumes": []any{"a"}, "labels": map[string]any{}})
	await(w, &api.SnapshotGroup{ObjectMeta: named("g")}, &api.SnapshotGroupList{}, "ready",
		func(g *api.SnapshotGroup) bool { return g.Status.ReadyToUse })
	for _, o := range []client.Object{&api.Snapshot{ObjectMeta: named("s1")}, &api.Attachment{ObjectMeta: named("a")}} {
		if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(o), o); err != nil {
			t.Fatal(err)
		}
		switch o := o.(type) {
		case *api.Snapshot:
			o.Spec.Labels = map[string]string{"x": "y"}
		case *api.Attachment:
			o.Spec.ReadOnly = true
		}
		if err := w.c.Update(w.ctx, o); err == nil {
			t.Errorf("%T %s could be changed", o, o.GetName())
		}
	}
}

// TestSnapshotIsAdornedAgain: Drover restores a label, a finalizer and an owner that a user took off a snapshot.
func TestSnapshotIsAdornedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	s := w.snapshot("a", "s1")
	want := s.Labels[api.LabelVolume]
	for what, spoil := range map[string]func(*api.Snapshot){
		"label":     func(s *api.Snapshot) { s.Labels[api.LabelVolume] = "other" },
		"finalizer": func(s *api.Snapshot) { s.Finalizers = nil },
		"owner":     func(s *api.Snapshot) { s.OwnerReferences = nil },
	} {
		edit(w, s, spoil)
		s = w.snapshotIs("s1", what, func(s *api.Snapshot) bool {
			return s.Labels[api.LabelVolume] == want && slices.Contains(s.Finalizers, api.Finalizer) &&
				len(s.OwnerReferences) == 1
		})
	}
}

// TestLongNames: a volume with a long name, cut at a character that must not end a label's value, has replicas,
// snapshots and devices like others.
func TestLongNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	name := strings.Repeat("a", 62) + "-b"
	w.make(name, 64<<20)
	w.snapshot(name, strings.Repeat("s", 62)+".t")
	w.create(attachment(name))
	w.attached(name)
}
