package attach

import (
	"log/slog"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/stack"
)

// TestMemberHereFollowsTheMembers: a replica has moved from one disk of the node to another. The session and its
// record name the replica on the new disk.
func TestMemberHereFollowsTheMembers(t *testing.T) {
	before := memberSpec{Name: "v-a", UID: api.NewUID(), Node: "n", Disk: api.NewUID(), Path: "/a"}
	after := memberSpec{Name: "v-b", UID: api.NewUID(), Node: "n", Disk: api.NewUID(), Path: "/b"}
	there := memberSpec{Name: "v-c", UID: api.NewUID(), Node: "other", Disk: api.NewUID()}
	as := &Attachments{Node: &localnode.Node{Name: "n", Log: slog.New(slog.DiscardHandler)}}
	s := as.newSession(blob{Volume: "v", Members: []memberSpec{there, before}}, nil)
	if m, r := s.memberHere(); r != nil {
		t.Errorf("no replica is open, and the member here is %+v", m)
	}
	old, moved := &stack.Replica{}, &stack.Replica{}
	is := func(want memberSpec, replica *stack.Replica) {
		t.Helper()
		if m, r := s.memberHere(); m != want || r != replica {
			t.Errorf("the member here is %+v", m)
		}
		if b := s.snapshotBlob(); b.Replica != want.UID || b.Disk != want.Disk || b.Path != want.Path {
			t.Errorf("the record has replica %s on disk %s at %s", b.Replica, b.Disk, b.Path)
		}
	}
	s.local.Store(before.UID, old)
	is(before, old)
	s.local.Store(after.UID, moved) // and joins
	s.Members = append(s.Members, after)
	is(before, old)
	s.Members = []memberSpec{there, after} // the engine dropped the first
	is(after, moved)
	if s.localReplica(before.UID) != old {
		t.Error("the session forgot a former member")
	}
	s.Members = []memberSpec{there}
	is(memberSpec{}, nil)
}
