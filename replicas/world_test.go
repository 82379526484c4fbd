package replicas

import (
	"context"
	"flag"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/disks"
)

func TestMain(m *testing.M) {
	suite.SystemMain()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	_ = flag.Set("test.parallel", "4") // the tests mostly wait; a flag may set another number
	os.Exit(apitest.Main(m))
}

const testNode = "n1"

// world is a machine: API server, holder, the controller and node roles on one manager, the data role on another.
type world struct {
	t     *testing.T
	ctx   context.Context
	dir   string
	api   *apitest.Server
	c     client.WithWatch
	log   *slog.Logger
	disks *disks.Registry
	mgr   ctrl.Manager // of the controller and node roles

	stopRoles, stopData func()
	data                *Data
	host                *device.Host
	lost                bool                      // the next Resume is to fail
	refuse              func(client.Object) error // asked before the controller and node roles write a status
}

func newWorld(t *testing.T, paths ...string) *world {
	t.Helper()
	suite.System(t)
	w := &world{t: t, dir: t.TempDir()}
	w.api = apitest.Start(t)
	w.ctx, w.c, w.log = w.api.Ctx, w.api.Client, w.api.Log
	w.holder()
	if len(paths) == 0 {
		paths = []string{filepath.Join(w.dir, "disk")}
	}
	w.roles(paths)
	w.startData()
	t.Cleanup(w.tidy)
	return w
}

func (w *world) holder() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	socket := filepath.Join(w.dir, "run", "hold.sock")
	go func() { done <- device.RunHolder(ctx, socket) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	for tick := time.NewTicker(time.Millisecond); ; { // as the data process does
		if c, err := net.Dial("unixpacket", socket); err == nil {
			tick.Stop()
			_ = c.Close()
			return
		}
		select {
		case <-tick.C:
		case <-w.ctx.Done():
			w.t.Fatal("the holder does not answer")
		}
	}
}

func (w *world) manager() ctrl.Manager { return w.api.Manager(w.refuse) }

func (w *world) run(mgr ctrl.Manager) (stop func()) { return w.api.Run(mgr) }

func (w *world) roles(paths []string) {
	w.t.Helper()
	mgr := w.manager()
	o := disks.Options{Name: testNode, Log: w.log, Heartbeat: 2 * time.Second, GoneAfter: 4 * time.Second}
	for _, path := range paths {
		o.Disks = append(o.Disks, api.DiskSpec{Path: path, Tags: []string{filepath.Base(path)}})
	}
	var err error
	if w.disks, err = SetupNode(mgr, o); err != nil {
		w.t.Fatal(err)
	}
	if err := SetupController(mgr, w.log); err != nil {
		w.t.Fatal(err)
	}
	w.mgr = mgr
	w.stopRoles = w.run(mgr)
}

// startData does the work of the data process: first the devices of the former process, then the reconcilers.
func (w *world) startData() {
	w.t.Helper()
	host, err := device.Open(w.ctx, filepath.Join(w.dir, "run"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.host = host
	w.data, err = NewData(DataOptions{Node: testNode, Host: host, Log: w.log, Heartbeat: time.Second})
	if err != nil {
		w.t.Fatal(err)
	}
	w.resumes(w.data)
	w.loops()
}

// resumes resumes the devices of the former process. A slow disk keeps only its own volumes waiting, and an
// unfinished swap of the former process waits for the API.
func (w *world) resumes(d *Data) {
	w.t.Helper()
	err := d.Resume(w.ctx)
	later := err != nil && (strings.Contains(err.Error(), "I/O continues when the disk answers") ||
		strings.Contains(err.Error(), "a swap of the members was in progress: the API server must be reached"))
	if later && !w.lost {
		w.t.Logf("resume: %v", err)
	} else if (err != nil) != w.lost {
		w.t.Errorf("resume: %v", err)
	}
}

func (w *world) loops() {
	w.t.Helper()
	mgr := w.manager()
	if err := SetupData(mgr, w.data); err != nil {
		w.t.Fatal(err)
	}
	stop := w.run(mgr)
	data := w.data
	w.stopData = func() {
		stop()
		if err := data.Close(); err != nil {
			w.t.Error(err)
		}
	}
}

// tidy leaves no device behind, whatever the test did.
func (w *world) tidy() {
	for _, s := range w.data.attachments.Sessions() {
		if dev := s.Device(); dev != nil {
			if err := dev.Abort(); err != nil {
				w.t.Error(err)
			}
		}
	}
	w.stopData()
	w.stopRoles()
}

func (w *world) watch(list client.ObjectList, which ...client.ListOption) watch.Interface {
	return w.api.Watch(list, which...)
}

func await[T client.Object](w *world, obj T, list client.ObjectList, what string, ok func(T) bool) T {
	w.t.Helper()
	return apitest.Await(w.api, obj, list, what, ok)
}

func gone[T client.Object](w *world, obj T, list client.ObjectList) {
	w.t.Helper()
	w.api.AwaitDeleted(obj, list)
}

func (w *world) create(objs ...client.Object) {
	w.t.Helper()
	w.api.Create(objs...)
}

func (w *world) remove(o client.Object) {
	w.t.Helper()
	w.api.Delete(o)
}

func edit[X any, T interface {
	*X
	client.Object
}](w *world, obj T, change func(T)) {
	w.t.Helper()
	apitest.Edit(w.api, obj, change)
}

func editStatus[X any, T interface {
	*X
	client.Object
}](w *world, obj T, change func(T)) {
	w.t.Helper()
	apitest.EditStatus(w.api, obj, change)
}

// abandon removes an object with its finalizers.
func (w *world) abandon(o client.Object) {
	w.t.Helper()
	none := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	if err := w.c.Patch(w.ctx, o, none); err != nil {
		w.t.Fatal(err)
	}
	w.remove(o)
}

func named(name string) metav1.ObjectMeta { return apitest.Named(name) }

func volume(name string, size int64) *api.Volume { return apitest.Volume(name, size) }

func attachment(name string) *api.Attachment {
	return &api.Attachment{ObjectMeta: named(name), Spec: api.AttachmentSpec{Volume: name, Node: testNode}}
}

func (w *world) volumeIs(name string, what string, ok func(*api.Volume) bool) *api.Volume {
	w.t.Helper()
	return w.api.AwaitVolume(name, what, ok)
}

// says checks a volume's message.
func says(part string) func(*api.Volume) bool {
	return func(v *api.Volume) bool { return strings.Contains(v.Status.Message, part) }
}

func (w *world) volumeState(name string, state api.VolumeState) *api.Volume {
	w.t.Helper()
	return w.volumeIs(name, string(state), func(v *api.Volume) bool { return v.Status.State == state })
}

func (w *world) attached(name string) *api.Attachment {
	w.t.Helper()
	return await(w, &api.Attachment{ObjectMeta: named(name)}, &api.AttachmentList{}, "ready",
		func(a *api.Attachment) bool { return a.Status.Ready })
}

// make creates a volume and waits until the volume is detached.
func (w *world) make(name string, size int64) *api.Volume {
	w.t.Helper()
	w.create(volume(name, size))
	return w.volumeState(name, api.VolumeDetached)
}

func (w *world) sh(command string) string {
	w.t.Helper()
	out, err := exec.CommandContext(w.ctx, "sh", "-ec", command).CombinedOutput()
	if err != nil {
		w.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}
