package attach

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/host/localnode"
)

// asked is an API without objects, and reports each request.
type asked struct {
	client.Client
	ch chan struct{}
}

func (a asked) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	select {
	case a.ch <- struct{}{}:
	default:
	}
	return apierrors.NewNotFound(schema.GroupResource{}, "v")
}

// TestOthersBeforeTheAPI: a resumed session is notified of a replica before the node reaches the API. The session
// looks for other replicas once the node has reached the API, without a second notification.
func TestOthersBeforeTheAPI(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		there := asked{ch: make(chan struct{}, 1)}
		as := &Attachments{Node: &localnode.Node{Name: "a", Log: slog.New(slog.DiscardHandler), Client: there}}
		s := as.newSession(blob{Volume: "v", VolumeUID: api.NewUID(), Alone: true}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan bool)
		go func() { ended <- as.awaitOthers(ctx, s) }()
		s.membership.wakeRebuilds()
		synctest.Wait()
		as.ReachedAPI()
		select {
		case <-there.ch:
		case <-time.After(time.Hour):
			t.Error("the session does not look for other replicas")
		}
		cancel()
		if <-ended {
			t.Error("there are others")
		}
	})
}
