package recover_test

import (
	"context"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
	"drover.io/drover/block/uring"
	"drover.io/drover/driver/cli"
	"drover.io/drover/driver/recover"
)

// TestEpochIsRaisedBesideOtherWriters: recover raises an epoch although another writer changes the volume meanwhile,
// but not if the volume's epoch changes.
func TestEpochIsRaisedBesideOtherWriters(t *testing.T) {
	w := newWorld(t)
	d := w.disk()
	w.node("one", true, d)
	s := w.replica(d, "v")
	w.run(cli.RecoverOptions{Apply: true})
	loop, err := uring.New(16)
	w.must(err)
	ended := make(chan error, 1)
	go func() { ended <- loop.Run() }()
	r, err := d.OpenReplica(t.Context(), s.UID, loop)
	w.must(err)
	w.must(r.Adopt(t.Context(), 7, 1, []string{s.UID}))
	w.must(r.Close())
	loop.Close()
	w.must(<-ended)
	set := func(change func(*api.VolumeStatus)) {
		t.Helper()
		var v api.Volume
		w.must(w.client.Get(t.Context(), client.ObjectKey{Name: "v"}, &v))
		change(&v.Status)
		w.must(w.client.Status().Update(t.Context(), &v))
	}
	raise := func(meanwhile func(*api.VolumeStatus)) (epoch int64, err error) {
		set(func(v *api.VolumeStatus) {
			*v = api.VolumeStatus{UID: api.UID(s.VolumeUID), State: api.VolumeDetached, Epoch: 3}
		})
		beside := interceptor.NewClient(w.client, interceptor.Funcs{
			List: func(ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption) error {
				err := c.List(ctx, list, o...)
				if _, is := list.(*api.VolumeList); is && err == nil {
					set(meanwhile)
				}
				return err
			}})
		_, err = recover.Run(t.Context(), beside, cli.RecoverOptions{Apply: true, NoWait: true, RaiseEpochs: true})
		var v api.Volume
		w.must(w.client.Get(t.Context(), client.ObjectKey{Name: "v"}, &v))
		return v.Status.Epoch, err
	}
	if epoch, err := raise(func(v *api.VolumeStatus) { v.Used = 4096 }); err != nil || epoch != 7 {
		t.Errorf("beside another writer: epoch %d, %v", epoch, err)
	}
	epoch, err := raise(func(v *api.VolumeStatus) { v.Epoch = 4 })
	if !api.Is(err, api.Exists) || !strings.Contains(err.Error(), "again") || epoch != 4 {
		t.Errorf("beside an engine: epoch %d, %v", epoch, err)
	}
}
