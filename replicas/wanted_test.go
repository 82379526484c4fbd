package replicas

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// TestStaleAttachment: a node whose cache still has an attachment that is another node's by now does not take the volume
// back. It was cut off, say, and heard of the end of its engine from the members first.
func TestStaleAttachment(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 64<<20)
	w.create(attachment("a"))
	stale := w.attached("a")
	w.detach("a")
	l := &attachmentLoop{w.data}
	claimed := func() int64 {
		t.Helper()
		var v api.Volume
		if err := w.c.Get(w.ctx, client.ObjectKey{Name: "a"}, &v); err != nil {
			t.Fatal(err)
		}
		return v.Status.Epoch
	}
	before := claimed()
	try := func(what string) {
		t.Helper()
		if s, err := l.make(w.ctx, stale.DeepCopy()); s != nil || !api.Is(err, api.Busy) {
			t.Errorf("%s: %v", what, err)
		}
		if now := claimed(); now != before {
			t.Errorf("%s: the volume is at epoch %d, was at %d", what, now, before)
		}
	}
	try("detached")
	elsewhere := attachment("a")
	elsewhere.Spec.Node = "n2"
	w.create(elsewhere)
	try("attached elsewhere")
	w.remove(elsewhere)
	w.create(attachment("a"))
	w.attached("a")
}

// TestAttachBeforeReplica: an attach that comes before the replica that the volume names goes on when that is there.
func TestAttachBeforeReplica(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("a", 16<<20)
	r := w.memberOf("a")
	w.abandon(r)
	gone(w, &api.Replica{ObjectMeta: named(r.Name)}, &api.ReplicaList{})
	w.create(attachment("a"))
	await(w, attachment("a"), &api.AttachmentList{}, "refused", func(a *api.Attachment) bool {
		return strings.Contains(a.Status.Message, "does not exist")
	})
	// Whether the loop looks by itself once more, for its own write, is a matter of luck.
	if all := w.data.replicaChanged(w.ctx, r); len(all) != 1 || all[0].Name != "a" {
		t.Errorf("the replica wakes %v", all)
	}
	w.create(&api.Replica{ObjectMeta: metav1.ObjectMeta{Name: r.Name, Labels: r.Labels, Finalizers: []string{api.Finalizer}},
		Spec: r.Spec})
	w.attached("a")
}
