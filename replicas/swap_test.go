package replicas

import (
	"encoding/json"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"drover.io/drover/api"
)

// TestSwapOfADeadProcess: a change of the members that a dead process had asked for is either found, or can never be
// made any more, once its successor has looked.
func TestSwapOfADeadProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	v := w.make("v", 64<<20)
	d := w.data
	ask := func() (blob, *api.Volume) {
		v := w.volumeIs("v", "on its engine's node", func(v *api.Volume) bool {
			v.Status.EngineNode = d.Name
			return w.c.Status().Update(w.ctx, v) == nil
		})
		late := v.DeepCopy()
		late.Status.Epoch++
		late.Status.Members = append(late.Status.Members, "joining")
		return blob{Volume: "v", VolumeUID: v.Status.UID, Now: v.Status.Epoch, Next: v.Status.Epoch + 1,
			Members: []memberSpec{{Name: v.Status.Members[0]}}, Joining: &memberSpec{Name: "joining"}}, late
	}
	b, late := ask()
	for err := d.settleBlob(w.ctx, &b); err != nil; err = d.settleBlob(w.ctx, &b) {
		if !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
		b, late = ask() // the controller wrote its part meanwhile
	}
	if len(b.Members) != 1 || b.Next != 0 || b.Joining != nil {
		t.Errorf("the change was not made, and is found: %+v", b)
	}
	if err := w.c.Status().Update(w.ctx, late); !apierrors.IsConflict(err) {
		t.Fatalf("the change is made after the successor has looked: %v", err)
	}
	if now := w.volumeIs("v", "there", func(*api.Volume) bool { return true }); now.Status.Epoch != b.Now {
		t.Errorf("epoch %d, the successor has %d", now.Status.Epoch, b.Now)
	}
	b, late = ask()
	for err := w.c.Status().Update(w.ctx, late); err != nil; err = w.c.Status().Update(w.ctx, late) {
		if !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
		b, late = ask() // the controller wrote its part meanwhile
	}
	if err := d.settleBlob(w.ctx, &b); err != nil {
		t.Fatal(err)
	}
	if len(b.Members) != 2 || b.Members[1].Name != "joining" || b.Now != late.Status.Epoch {
		t.Errorf("the change was made, and is not found: %+v", b)
	}
	w.volumeIs("v", "as it was", func(now *api.Volume) bool {
		now.Status.Members, now.Status.EngineNode = v.Status.Members, ""
		return w.c.Status().Update(w.ctx, now) == nil
	})
}

// TestBlobsAreKeptInTheirOrder: what the holder is told of a session is never overtaken by what it was before.
func TestBlobsAreKeptInTheirOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v", 16*mib)
	w.create(attachment("v"))
	w.attached("v")
	s := w.data.session("v")
	for range 100 {
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				s.mates.mu.Lock()
				s.Now++
				s.mates.mu.Unlock()
				if err := w.data.keepBlob(s); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		var b blob
		if err := json.Unmarshal(s.dev.Spec().Blob, &b); err != nil || b.Now != s.snapshotBlob().Now {
			t.Fatalf("%d is kept after %d was: %v", b.Now, s.snapshotBlob().Now, err)
		}
	}
}
