package attach

import (
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

// TestStaleAttachment: an attachment, deleted or moved to another node, is still in the node's cache. The node does
// not claim the volume again. The node was cut off, for example, and the members said first that the engine here has
// ended.
func TestStaleAttachment(t *testing.T) {
	server := apitest.Start(t)
	as := attachmentsWithoutAPI(t)
	as.reach(server)
	v := volumeOf(server, "v")
	stale := &api.Attachment{ObjectMeta: apitest.Named("v"), Spec: api.AttachmentSpec{Volume: "v", Node: as.Name}}
	server.Create(stale)
	server.Delete(stale)
	try := func(when string) {
		t.Helper()
		if s, err := (&reconciler{as}).createSession(server.Ctx, stale.DeepCopy()); s != nil || !api.Is(err, api.Busy) {
			t.Errorf("%s: %v", when, err)
		}
		var now api.Volume
		if err := server.Client.Get(server.Ctx, client.ObjectKeyFromObject(v), &now); err != nil {
			t.Fatal(err)
		}
		if now.Status.Epoch != v.Status.Epoch || now.Status.EngineNode != "" {
			t.Errorf("%s: the volume is at epoch %d, was at %d", when, now.Status.Epoch, v.Status.Epoch)
		}
	}
	try("detached")
	elsewhere := &api.Attachment{ObjectMeta: apitest.Named("v"), Spec: api.AttachmentSpec{Volume: "v", Node: "n2"}}
	server.Create(elsewhere)
	try("attached elsewhere")
}

// TestReplicaWakesAttachment: a change of a replica requeues the Attachment of a volume that is not attached here yet.
func TestReplicaWakesAttachment(t *testing.T) {
	server := apitest.Start(t)
	as := attachmentsWithoutAPI(t)
	as.reach(server)
	server.Create(&api.Attachment{ObjectMeta: apitest.Named("v"), Spec: api.AttachmentSpec{Volume: "v", Node: as.Name}})
	r := &api.Replica{ObjectMeta: apitest.Named("v-1"), Spec: api.ReplicaSpec{Volume: "v"}}
	if all := as.replicaChanged(server.Ctx, r); len(all) != 1 || all[0].Name != "v" {
		t.Errorf("the replica wakes %v", all)
	}
}
