package attach

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/disks"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/host/localnode"
	"drover.io/drover/replicas/host/remote"
	"drover.io/drover/replicas/host/volumelock"
	"drover.io/drover/replicas/stack"
)

// noReplicas is a node whose other owners know no replicas.
type noReplicas struct{}

func (noReplicas) Disk(_ context.Context, uid api.UID) (*stack.Disk, error) {
	return nil, api.Errorf(api.Unavailable, "disk %s is not on this node", uid)
}
func (noReplicas) Damaged(context.Context, api.UID, error) {}
func (noReplicas) Created(api.UID)                         {}
func (noReplicas) Wake(string)                             {}

// reach gives the owner an API, as the manager does once the caches have synced.
func (as *Attachments) reach(server *apitest.Server) {
	as.Client, as.Reader = server.Client, server.Client
	as.ReachedAPI()
}

// attachmentsWithoutAPI is the owner of the node "a" before the node reached the API, with a holder.
func attachmentsWithoutAPI(t *testing.T) *Attachments {
	t.Helper()
	run := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- device.RunHolder(ctx, filepath.Join(run, "hold.sock")) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var host *device.Host
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C { // until the holder listens
		var err error
		if host, err = device.Open(ctx, run); err == nil {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	threads, err := iothreads.Start(2, log)
	if err != nil {
		t.Fatal(err)
	}
	node := &localnode.Node{Name: "a", Log: log, Locks: volumelock.New(), Threads: threads,
		Disks: disks.NewRegistry(disks.RegistryOptions{})}
	server, err := remote.New(remote.Options{Node: node.Name, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	watch := engine.NewWatch()
	as := New(Options{Node: node, Host: host, Remote: server, Watch: watch})
	as.Connect(noReplicas{}, nil)
	t.Cleanup(func() {
		if err := as.Stop(); err != nil {
			t.Error(err)
		}
		if n, err := as.Close(); n > 0 || err != nil {
			t.Errorf("%d sessions wait for their disks, %v", n, err)
		}
		watch.Close()
		for _, err := range []error{server.Close(), node.Disks.Close(), threads.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	})
	return as
}

// volumeOf creates a volume with one member, as the planner does.
func volumeOf(server *apitest.Server, name string) *api.Volume {
	server.T.Helper()
	v := apitest.Volume(name, 16<<20)
	server.Create(v)
	apitest.EditStatus(server, v, func(v *api.Volume) {
		v.Status.UID, v.Status.Members, v.Status.Epoch = api.NewUID(), []string{name + "-1"}, 3
	})
	return v
}
