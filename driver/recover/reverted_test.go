package recover_test

import (
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/driver/cli"
	"drover.io/drover/replicas/stack"
)

// TestRecoverKeepsTheEpochOfARevert: a recovered volume names the epoch of its last revert, so that no engine takes a
// member that was not reverted. A replica that joined after its revert has the content of the members, and the epoch of
// its revert says nothing of them.
func TestRecoverKeepsTheEpochOfARevert(t *testing.T) {
	w := newWorld(t)
	d := w.disk()
	w.node("one", true, d)
	reverted, joined := w.replica(d, "reverted"), w.replica(d, "joined")
	loop, err := uring.New(16)
	w.must(err)
	ended := make(chan error, 1)
	go func() { ended <- loop.Run() }()
	adopt := func(s stack.Spec, epoch int64, change func(r *stack.Replica)) {
		t.Helper()
		r, err := d.OpenReplica(t.Context(), s.UID, loop)
		w.must(err)
		w.must(r.Adopt(t.Context(), epoch, 1, []string{s.UID}))
		change(r)
		w.must(r.Close())
	}
	for _, s := range []stack.Spec{reverted, joined} {
		snap := stack.Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID()), Name: "monday",
			Created: time.Now().UTC()}
		adopt(s, 7, func(r *stack.Replica) { w.must(r.Cut(t.Context(), snap)) })
		w.must(d.Revert(t.Context(), s.UID, snap.UID, 9))
	}
	other := string(api.NewUID()) // the member that the second replica joins
	r, err := d.OpenReplica(t.Context(), joined.UID, loop)
	w.must(err)
	w.must(r.Adopt(t.Context(), 11, 1, []string{other}))
	w.must(r.Adopt(t.Context(), 12, 1, []string{other, joined.UID}))
	w.must(r.Close())
	loop.Close()
	w.must(<-ended)

	w.run(cli.RecoverOptions{Apply: true})
	for name, want := range map[string]int64{"reverted": 9, "joined": 0} {
		var v api.Volume
		w.must(w.client.Get(t.Context(), client.ObjectKey{Name: name}, &v))
		if facts, err := v.Recovered(); err != nil || facts == nil || facts.RevertedEpoch != want {
			t.Errorf("the recovered volume %s has the facts %+v, %v, and should name the revert of epoch %d", name, facts,
				err, want)
		}
	}
}
