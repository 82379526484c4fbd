package driver

import (
	"context"
	"log/slog"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi"
)

// TestRepeatedEventsAreCounted: the embedded server counts a repeated event, as a cluster does.
func TestRepeatedEventsAreCounted(t *testing.T) {
	suite.Slow(t)
	ctx, stop := context.WithCancel(t.Context())
	kube, err := kubeapi.Start(ctx, kubeapi.Options{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	mgr, err := ctrl.NewManager(withEvents(kube.Config), managerOptions())
	if err != nil {
		t.Fatal(err)
	}
	g := newGroup(ctx)
	g.run(mgr.Start)
	defer func() {
		stop()
		if err := g.wait(); err != nil {
			t.Error(err)
		}
		if err := kube.Wait(); err != nil {
			t.Error(err)
		}
	}()
	events, err := eventsclient.NewForConfig(kube.Config)
	if err != nil {
		t.Fatal(err)
	}
	w, err := events.Events("").Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	v := &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: "full", UID: "u"}}
	r := mgr.GetEventRecorder("test")
	r.Eventf(v, nil, "Warning", "DiskFull", "Write", "again")
	late := time.After(2 * time.Minute)
	for {
		select {
		case ev := <-w.ResultChan():
			if n := seriesCount(ev.Object); n > 1 {
				return
			}
			r.Eventf(v, nil, "Warning", "DiskFull", "Write", "again")
		case <-late:
			t.Fatal("a repeated event was not counted")
		}
	}
}

func seriesCount(obj runtime.Object) int32 {
	if e, ok := obj.(*eventsv1.Event); ok && e.Series != nil {
		return e.Series.Count
	}
	return 0
}
