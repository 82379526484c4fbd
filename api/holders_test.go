package api

import "testing"

// TestHolders: a replica that is no member, or that of a former volume of the name, is not read for a snapshot.
func TestHolders(t *testing.T) {
	replica := func(name string, volume UID) (r Replica) {
		r.Name, r.Spec.VolumeUID = name, volume
		return r
	}
	list := ReplicaList{Items: []Replica{replica("left-out", "v"), replica("member", "v"), replica("former", "u"),
		replica("too", "v")}}
	v, s := &Volume{}, &Snapshot{}
	v.Status.Members, s.Status.VolumeUID = []string{"member", "former", "too"}, "v"
	if got := list.Holders(v, s); len(got) != 2 || got[0].Name != "member" || got[1].Name != "too" {
		t.Errorf("%v", got)
	}
}
