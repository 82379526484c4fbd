package planner

import (
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// TestHindranceOfADeletion: a deletion reports why a copy cannot be removed, and not the failure of the copy's import.
func TestHindranceOfADeletion(t *testing.T) {
	gone := metav1.NewTime(time.Now())
	c := on("n1", "a", api.ImageFailed, "", 1)
	c.DeletionTimestamp = &gone
	v := &clusterView{nodes: map[string]bool{"n1": true}, copies: []api.ImageCopy{c},
		disks: []diskState{{uid: "a", node: "n1", path: "/srv/a", alive: true}}}
	for message, want := range map[string]string{
		"wrong checksum": "",
		api.CopyNotRemoved + errors.ErrUnsupported.Error(): "disk /srv/a of node n1: " + api.CopyNotRemoved,
	} {
		v.copies[0].Status.Message = message
		if got := explainStuckCopy(v); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%q: told %q, want %q", message, got, want)
		}
	}
}

// TestTooFewCopiesAreCounted: an image with too few copies reports the number, also without a problem.
func TestTooFewCopiesAreCounted(t *testing.T) {
	img := &api.BackingImage{Spec: api.BackingImageSpec{MinNumberOfCopies: 2}}
	for message, want := range map[string]string{
		"":                  "1 of 2 copies are ready: the others are being made",
		"1 of 2 copies: no": "1 of 2 copies: no",
	} {
		s := api.BackingImageStatus{State: api.ImageReady, ReadyCopies: 1, Message: message}
		setConditions(img, &clusterView{}, copyPlan{}, &s)
		c := meta.FindStatusCondition(s.Conditions, api.ConditionReady)
		if c == nil || c.Reason != "TooFewCopies" || c.Message != want {
			t.Errorf("%q: %+v, want %q", message, c, want)
		}
	}
}

// TestImageHasTheBytesOfItsBestCopy: an image has the bytes and the end of its most advanced copy, and changes them
// with the percentage alone, so that a large image is not written twice a second.
func TestImageHasTheBytesOfItsBestCopy(t *testing.T) {
	end := metav1.Now()
	best, late := on("n1", "a", api.ImageInProgress, "", 1), on("n1", "b", api.ImageInProgress, "", 1)
	best.Status.Progress, late.Status.Progress = 40, 10
	best.Status.ByteProgress = api.ByteProgress{BytesDone: 400, BytesTotal: 1000, EstimatedEnd: &end}
	v := &clusterView{nodes: map[string]bool{"n1": true}, copies: []api.ImageCopy{late, best, late}}
	img := &api.BackingImage{Status: api.BackingImageStatus{UUID: best.Spec.UUID}}
	img.Status = describeImage(img, v, copyPlan{})
	v.copies[1].Status.BytesDone = 405
	img.Status = describeImage(img, v, copyPlan{})
	if !equality.Semantic.DeepEqual(img.Status.ByteProgress, best.Status.ByteProgress) || img.Status.Progress != 40 {
		t.Errorf("%+v", img.Status)
	}
	v.copies[1].Status.Progress = 41
	if s := describeImage(img, v, copyPlan{}); s.BytesDone != 405 {
		t.Errorf("%+v", s.ByteProgress)
	}
}

// TestImageSaysWhyReadsWait: the image of a backup that cannot be read now says so, also by a condition, and stays
// readable. Progress ends the condition, and the end of the restore removes it.
func TestImageSaysWhyReadsWait(t *testing.T) {
	c := on("n1", "a", api.ImageInProgress, "", 1)
	c.Status.Readable, c.Status.Digest, c.Status.Message = true, "c0ffee", "the store is away"
	v := &clusterView{nodes: map[string]bool{"n1": true}, copies: []api.ImageCopy{c},
		disks: []diskState{{uid: "a", node: "n1", path: "/srv/a", alive: true}}}
	img := &api.BackingImage{Status: api.BackingImageStatus{UUID: c.Spec.UUID}}
	if s := describeImage(img, v, copyPlan{}); s.Message != "the store is away" || !s.Readable {
		t.Errorf("the image says %q, readable: %v", s.Message, s.Readable)
	}
	expect := func(what string, status metav1.ConditionStatus, message string) {
		t.Helper()
		img.Status = describeImage(img, v, copyPlan{})
		c := meta.FindStatusCondition(img.Status.Conditions, api.ConditionStalled)
		if c == nil && status != "" || c != nil && (c.Status != status || c.Message != message) {
			t.Errorf("%s: %+v, want %q", what, c, status)
		}
	}
	expect("stalled", metav1.ConditionTrue, "the store is away")
	v.copies[0].Status.Message = ""
	expect("progress", metav1.ConditionFalse, "")
	v.copies[0].Status.State = api.ImageReady
	expect("ready", "", "")
}

// TestWaitingRestoreCountsNoTries: the message of a restore that waits for its store names no next try.
func TestWaitingRestoreCountsNoTries(t *testing.T) {
	c := on("n1", "a", api.ImageFailed, "", 1)
	c.Status.Message, c.Status.NextTry = "the store is away", metav1.NewTime(time.Now())
	if got := explainCopy(&c); !strings.Contains(got, "next try") {
		t.Errorf("after a try: %q", got)
	}
	if c.Status.Attempts = 0; explainCopy(&c) != "the store is away" {
		t.Errorf("without tries: %q", explainCopy(&c))
	}
}
