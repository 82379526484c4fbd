package replicas

import (
	"context"
	"errors"
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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/config"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"drover.io/drover/api"
	editor "drover.io/drover/api/await"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi"
	"drover.io/drover/replicas/device"
)

func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	_ = flag.Set("test.parallel", "4") // most of the time they wait; whoever asks for another number gets it
	os.Exit(m.Run())
}

const testNode = "n1"

// world is a machine: API server, holder, the controller and node roles on one manager, the data role on another.
type world struct {
	t      *testing.T
	ctx    context.Context
	dir    string
	server *kubeapi.Server
	c      client.WithWatch
	log    *slog.Logger
	disks  *Disks
	mgr    ctrl.Manager // of the controller and node roles

	stopRoles, stopData func()
	data                *Data
	host                *device.Host
	lost                bool                      // the next Resume is to fail
	refuse              func(client.Object) error // asked before the controller and node roles write a status
}

// logTo writes a log to the test's.
type logTo struct{ t *testing.T }

func (l logTo) Write(b []byte) (int, error) {
	l.t.Logf("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}

func newWorld(t *testing.T, disks ...string) *world {
	t.Helper()
	suite.System(t)
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	w := &world{t: t, ctx: ctx, dir: t.TempDir()}
	w.log = slog.New(slog.NewTextHandler(logTo{t}, nil))
	t.Cleanup(cancel)

	server, err := kubeapi.Start(ctx, kubeapi.Options{Dir: filepath.Join(w.dir, "api"), Volatile: true,
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	w.server = server
	t.Cleanup(func() {
		cancel()
		if err := server.Wait(); err != nil {
			t.Error(err)
		}
	})
	w.c, err = client.NewWithWatch(server.Config, client.Options{Scheme: testScheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	w.holder()
	if len(disks) == 0 {
		disks = []string{filepath.Join(w.dir, "disk")}
	}
	w.roles(disks)
	w.startData()
	t.Cleanup(w.tidy)
	return w
}

func testScheme(t *testing.T) *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(api.AddToScheme(s), clientscheme.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	return s
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

func (w *world) manager() ctrl.Manager {
	w.t.Helper()
	skip, grace := true, 2*time.Minute
	refuse := w.refuse
	mgr, err := ctrl.NewManager(w.server.Config, ctrl.Options{Scheme: testScheme(w.t),
		Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: &skip},
		GracefulShutdownTimeout: &grace, Logger: logr.Discard(),
		NewClient: func(config *rest.Config, o client.Options) (client.Client, error) {
			c, err := client.NewWithWatch(config, o)
			if err != nil || refuse == nil {
				return c, err
			}
			return interceptor.NewClient(c, interceptor.Funcs{SubResourceUpdate: func(ctx context.Context, c client.Client,
				sub string, obj client.Object, o ...client.SubResourceUpdateOption) error {
				if err := refuse(obj); err != nil {
					return err
				}
				return c.SubResource(sub).Update(ctx, obj, o...)
			}}), nil
		}})
	if err != nil {
		w.t.Fatal(err)
	}
	return mgr
}

// run starts a manager; what it returns stops it and waits.
func (w *world) run(mgr ctrl.Manager) func() {
	ctx, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	stopped := false
	stop := func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	}
	w.t.Cleanup(stop)
	return stop
}

func (w *world) roles(disks []string) {
	w.t.Helper()
	mgr := w.manager()
	o := NodeOptions{Name: testNode, Log: w.log, Heartbeat: 2 * time.Second, GoneAfter: 4 * time.Second}
	for _, path := range disks {
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

// startData does what the data process does: take the devices of the one before, then the loops.
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

// resumes takes up the devices of the process before. A disk that is slow keeps only its own volumes waiting, and a
// change of the members that the process before did not see the end of waits for the API.
func (w *world) resumes(d *Data) {
	w.t.Helper()
	err := d.Resume(w.ctx)
	later := err != nil && (strings.Contains(err.Error(), "it goes on when the disk does") ||
		strings.Contains(err.Error(), "a change of the members was under way: the API has to be asked"))
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
	for _, s := range w.data.all() {
		if s.dev != nil {
			if err := s.dev.Abort(); err != nil {
				w.t.Error(err)
			}
		}
	}
	w.stopData()
	w.stopRoles()
}

// watch tells what becomes of an object, or of all of a kind, from now on. It goes on from what a list has read: a watch
// without a version begins some time after it was answered, and tells nothing of an object that goes before that.
func (w *world) watch(list client.ObjectList, which ...client.ListOption) watch.Interface {
	w.t.Helper()
	if err := w.c.List(w.ctx, list, which...); err != nil {
		w.t.Fatal(err)
	}
	from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}}
	watch, err := w.c.Watch(w.ctx, list, append(which, from)...)
	if err != nil {
		w.t.Fatal(err)
	}
	return watch
}

// await waits until ok says so of the object, woken by its changes, or soon where ok looks at more than the object.
func await[T client.Object](w *world, obj T, list client.ObjectList, what string, ok func(T) bool) T {
	w.t.Helper()
	began := time.Now()
	watch := w.watch(list, client.MatchingFields{"metadata.name": obj.GetName()})
	defer watch.Stop()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	ctx, cancel := context.WithTimeout(w.ctx, 5*time.Minute)
	defer cancel()
	for {
		if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(obj), obj); err == nil && ok(obj) {
			w.t.Logf("%s: %s after %v", obj.GetName(), what, time.Since(began).Round(time.Millisecond))
			return obj
		}
		select {
		case <-watch.ResultChan():
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatalf("%s %s never was %s; it is %+v", list.GetObjectKind().GroupVersionKind().Kind, obj.GetName(), what, obj)
		}
	}
}

// gone waits until the object does not exist any more.
func gone[T client.Object](w *world, obj T, list client.ObjectList) {
	w.t.Helper()
	watch := w.watch(list, client.MatchingFields{"metadata.name": obj.GetName()})
	defer watch.Stop()
	ctx, cancel := context.WithTimeout(w.ctx, 5*time.Minute)
	defer cancel()
	for {
		if err := w.c.Get(w.ctx, client.ObjectKeyFromObject(obj), obj); client.IgnoreNotFound(err) != nil {
			w.t.Fatal(err)
		} else if err != nil {
			return
		}
		select {
		case <-watch.ResultChan():
		case <-ctx.Done():
			w.t.Fatalf("%s is still there: %+v", obj.GetName(), obj)
		}
	}
}

func (w *world) create(objs ...client.Object) {
	w.t.Helper()
	for _, o := range objs {
		if err := w.c.Create(w.ctx, o); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) remove(o client.Object) {
	w.t.Helper()
	if err := w.c.Delete(w.ctx, o); err != nil {
		w.t.Fatal(err)
	}
}

// edit changes an object as a person would: anew where its status changed meanwhile.
func edit[X any, T interface {
	*X
	client.Object
}](w *world, obj T, change func(T)) {
	w.t.Helper()
	now, err := editor.Edit(w.ctx, w.c, obj.GetName(), func(now T) (bool, error) { change(now); return true, nil })
	if err != nil {
		w.t.Fatal(err)
	}
	*obj = *now
}

// editStatus is edit for the status.
func editStatus[X any, T interface {
	*X
	client.Object
}](w *world, obj T, change func(T)) {
	w.t.Helper()
	now, err := editor.EditStatus(w.ctx, w.c, obj.GetName(), func(now T) (bool, error) { change(now); return true, nil })
	if err != nil {
		w.t.Fatal(err)
	}
	*obj = *now
}

// abandon removes an object that nobody lets go of.
func (w *world) abandon(o client.Object) {
	w.t.Helper()
	none := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	if err := w.c.Patch(w.ctx, o, none); err != nil {
		w.t.Fatal(err)
	}
	w.remove(o)
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

func volume(name string, size int64) *api.Volume {
	return &api.Volume{ObjectMeta: named(name), Spec: api.VolumeSpec{Size: size}}
}

func attachment(name string) *api.Attachment {
	return &api.Attachment{ObjectMeta: named(name), Spec: api.AttachmentSpec{Volume: name, Node: testNode}}
}

func (w *world) volumeIs(name string, what string, ok func(*api.Volume) bool) *api.Volume {
	w.t.Helper()
	return await(w, &api.Volume{ObjectMeta: named(name)}, &api.VolumeList{}, what, ok)
}

// says is about a volume's message.
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

// make creates a volume and waits until it is there.
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
