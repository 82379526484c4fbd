package imagestore

import (
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

// A deletion tells why a copy cannot be removed, and not of the failure that the copy had when it was made.
func TestHindranceOfADeletion(t *testing.T) {
	gone := metav1.NewTime(time.Now())
	c := on("n1", "a", api.ImageFailed, "", 1)
	c.DeletionTimestamp = &gone
	v := &view{nodes: map[string]bool{"n1": true}, copies: []api.ImageCopy{c},
		disks: []place{{uid: "a", node: "n1", path: "/srv/a", alive: true}}}
	for message, want := range map[string]string{
		"wrong checksum": "",
		notRemoved + errors.ErrUnsupported.Error(): "disk /srv/a of node n1: " + notRemoved,
	} {
		v.copies[0].Status.Message = message
		if got := hindrance(v); (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("%q: told %q, want %q", message, got, want)
		}
	}
}
