package planner

import (
	"flag"
	"io"
	"os"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/driver/kubeapi/apitest"
)

func TestMain(m *testing.M) {
	flag.Parse()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Main(m))
}

// createVolume creates a detached volume of 16 MiB with one current replica, on a ready disk of node n1.
func createVolume(s *apitest.Server, name string) *api.Volume {
	s.T.Helper()
	disk := api.UID("0b3c9a52-6f0e-4a38-9f6f-0d3b7c5d1a10")
	n := &api.Node{ObjectMeta: apitest.Named("n1")}
	if s.Client.Get(s.Ctx, client.ObjectKey{Name: "n1"}, n) != nil {
		n.Spec.Disks = []api.DiskSpec{{Path: "/d"}}
		s.Create(n)
		apitest.EditStatus(s, n, func(n *api.Node) {
			n.Status.Heartbeat, n.Status.HeartbeatSeconds = metav1.NewTime(time.Now().Truncate(time.Second)), 10
			n.Status.Disks = []api.DiskStatus{{Path: "/d", UID: disk, Ready: true, Capacity: 100 * gib, Available: 90 * gib}}
		})
	}
	v := apitest.Volume(name, 16<<20)
	v.Spec.NumberOfReplicas = 1
	v.Finalizers = []string{api.Finalizer}
	s.Create(v)
	uid := api.NewUID()
	r := &api.Replica{ObjectMeta: apitest.Named(name + ".r1"), Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: name,
		VolumeUID: uid, Node: "n1", Disk: disk, Size: v.Spec.Size}}
	s.Create(r)
	apitest.EditStatus(s, r, func(r *api.Replica) {
		r.Status.Mode, r.Status.Size = api.ReplicaCurrent, r.Spec.Size
	})
	apitest.EditStatus(s, v, func(v *api.Volume) {
		v.Status.UID, v.Status.Members, v.Status.Epoch, v.Status.Size = uid, []string{r.Name}, 1, v.Spec.Size
		v.Status.State, v.Status.Robustness = api.VolumeDetached, api.RobustHealthy
	})
	return v
}
