package host

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestHealsOfANewVerificationAreSeen: restores ask again for damaged chunks after a heal, also when the verification
// that healed has just begun, and counts fewer healed blobs than the one before.
func TestHealsOfANewVerificationAreSeen(t *testing.T) {
	day := func(n int) *metav1.Time { return &metav1.Time{Time: time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC)} }
	before := api.VerificationFact{EndedAt: day(1), HealedBlobs: 5, DamagedBlobs: 2}
	changed := func(change func(*api.VerificationFact)) *api.VerificationFact {
		v := before
		change(&v)
		return &v
	}
	for what, c := range map[string]struct {
		was, is *api.VerificationFact
		want    bool
	}{
		"no verification": {nil, nil, false},
		"the first heal":  {nil, &api.VerificationFact{HealedBlobs: 1}, true},
		"a part without a heal": {&before, changed(func(v *api.VerificationFact) { v.PartEndedAt = day(2) }),
			false},
		"a further heal": {&before, changed(func(v *api.VerificationFact) { v.HealedBlobs = 6 }), true},
		"less damage":    {&before, changed(func(v *api.VerificationFact) { v.DamagedBlobs = 1 }), true},
		"a begin without a heal": {&before, changed(func(v *api.VerificationFact) {
			v.StartedAt, v.HealedBlobs = day(2), 0
		}), false},
		"a begin with a heal": {&before, changed(func(v *api.VerificationFact) {
			v.StartedAt, v.HealedBlobs = day(2), 3
		}), true},
		"a verification of one step with a heal": {&before, changed(func(v *api.VerificationFact) {
			v.EndedAt, v.HealedBlobs = day(2), 3
		}), true},
	} {
		if got := isHealed(c.was, c.is); got != c.want {
			t.Errorf("%s: %v, want %v", what, got, c.want)
		}
	}
}

// TestRestoreThatFailsAtOnceIsReadable: a restore that fails before its first report, because the store lost a chunk of
// a small backup, has a layer that volumes can read.
func TestRestoreThatFailsAtOnceIsReadable(t *testing.T) {
	n := &copyReconciler{opts: Options{RetryMin: time.Second, RetryMax: time.Minute}}
	c := &api.ImageCopy{}
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceRestore}}
	failed := &transfer{err: api.Errorf(api.Corrupt, "the store lost a chunk"), source: string(api.SourceRestore)}
	n.endTransfer(c, img, failed, &c.Status)
	if c.Status.Readable || c.Status.State != api.ImageFailed {
		t.Errorf("without a layer: %+v", c.Status)
	}
	failed.setRestoring(readableLayer{digest: "digest", size: 1 << 20}, func() (string, bool) { return "", false })
	n.endTransfer(c, img, failed, &c.Status)
	if st := c.Status; !st.Readable || st.Digest != "digest" || st.VirtualSize != 1<<20 || st.State != api.ImageFailed {
		t.Errorf("with a layer: %+v", st)
	}
}
