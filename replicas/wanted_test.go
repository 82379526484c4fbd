package replicas

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestAttachBeforeReplica: an attach before the creation of the volume's replica continues once the replica exists.
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
	w.create(&api.Replica{ObjectMeta: metav1.ObjectMeta{Name: r.Name, Labels: r.Labels, Finalizers: []string{api.Finalizer}},
		Spec: r.Spec})
	w.attached("a")
}
