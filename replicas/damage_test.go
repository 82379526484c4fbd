package replicas

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"drover.io/drover/api"
)

// replicaOf is the only replica of a volume.
func (w *world) replicaOf(volume string) *api.Replica {
	w.t.Helper()
	var list api.ReplicaList
	if err := w.c.List(w.ctx, &list); err != nil {
		w.t.Fatal(err)
	}
	for i := range list.Items {
		if list.Items[i].Spec.Volume == volume {
			return &list.Items[i]
		}
	}
	w.t.Fatalf("volume %s has no replica", volume)
	return nil
}

// stackFile is a replica's record on the disk.
func (w *world) stackFile(r *api.Replica) string {
	return filepath.Join(w.dir, "disk", "replicas", string(r.Spec.UID), "stack.json")
}

// TestUnreadableReplicaIsNotGivenUp: a record that cannot be read for a while is told, and nothing more.
func TestUnreadableReplicaIsNotGivenUp(t *testing.T) {
	w := newWorld(t)
	w.make("v1", 16*mib)
	r := w.replicaOf("v1")
	good, err := os.ReadFile(w.stackFile(r))
	if err != nil {
		t.Fatal(err)
	}
	w.stopData()
	if err := os.WriteFile(w.stackFile(r), []byte("not to be read"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.startData()
	r = await(w, r, &api.ReplicaList{}, "unreadable", func(r *api.Replica) bool { return r.Status.Message != "" })
	if r.Status.Mode != api.ReplicaCurrent || !strings.Contains(r.Status.Message, "stack.json") {
		t.Fatalf("%+v", r.Status)
	}
	if err := os.WriteFile(w.stackFile(r), good, 0o600); err != nil {
		t.Fatal(err)
	}
	await(w, r, &api.ReplicaList{}, "readable", func(r *api.Replica) bool { return r.Status.Message == "" })
	w.create(attachment("v1"))
	a := w.attached("v1")
	w.remove(a)
	gone(w, a, &api.AttachmentList{})
}
