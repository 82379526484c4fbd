// Package apitest gives the tests of the rooms embedded API servers, and waits there for objects. A test has a server
// for itself; when the test ends, after the managers that Run started, the package deletes all objects, and the
// server serves the next test. Main ends the servers.
package apitest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi"
)

// Server is an API server with a client.
type Server struct {
	T      *testing.T
	Ctx    context.Context // ends with the test
	Config *rest.Config
	Client client.WithWatch
	Log    *slog.Logger
}

// servers are the API servers of this process.
var servers struct {
	sync.Mutex
	ctx  context.Context // of all; nil outside of Main
	dir  string
	all  []*kubeapi.Server
	idle []*kubeapi.Server // no test uses them now
}

// Main runs the tests of a package and returns the exit code of the process.
func Main(m *testing.M) int {
	dir, err := os.MkdirTemp("", "drover-apitest-")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// More heap for less processor time.
	debug.SetGCPercent(400)
	debug.SetMemoryLimit(2 << 30)
	ctx, cancel := context.WithCancel(context.Background())
	servers.ctx, servers.dir = ctx, dir
	defer func() {
		cancel()
		for _, s := range servers.all {
			_ = s.Wait()
		}
	}()
	return m.Run()
}

// takeServer returns a server without objects that no other test uses.
func takeServer() (*kubeapi.Server, error) {
	servers.Lock()
	defer servers.Unlock()
	if servers.ctx == nil {
		return nil, errors.New("TestMain of the package has to call apitest.Main")
	}
	if last := len(servers.idle) - 1; last >= 0 {
		s := servers.idle[last]
		servers.idle = servers.idle[:last]
		return s, nil
	}
	s, err := kubeapi.Start(servers.ctx, kubeapi.Options{Dir: filepath.Join(servers.dir, strconv.Itoa(len(servers.all))),
		Listen: "127.0.0.1", Volatile: true, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	servers.all = append(servers.all, s)
	return s, nil
}

// Start returns an API server without objects.
func Start(t *testing.T) *Server {
	t.Helper()
	suite.Slow(t)
	server, err := takeServer()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	t.Cleanup(cancel)
	s := &Server{T: t, Ctx: ctx, Config: server.Config, Log: slog.New(slog.NewTextHandler(testLog{t}, nil))}
	if s.Client, err = client.NewWithWatch(server.Config, client.Options{Scheme: newScheme(t)}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.deleteAll(); err != nil {
			t.Errorf("delete the objects of the test: %v", err) // no other test gets the server
			return
		}
		servers.Lock()
		defer servers.Unlock()
		servers.idle = append(servers.idle, server)
	})
	return s
}

// deleteAll deletes the objects of all kinds, whatever their finalizers wait for.
func (s *Server) deleteAll() error {
	kinds := []schema.GroupVersionKind{corev1.SchemeGroupVersion.WithKind("Secret"),
		coordinationv1.SchemeGroupVersion.WithKind("Lease"), eventsv1.SchemeGroupVersion.WithKind("Event")}
	known := s.Client.Scheme().KnownTypes(api.GroupVersion)
	for kind := range known {
		if _, ok := known[kind+"List"]; ok {
			kinds = append(kinds, api.GroupVersion.WithKind(kind))
		}
	}
	noFinalizers := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))
	for _, kind := range kinds {
		for {
			list := &metav1.PartialObjectMetadataList{}
			list.SetGroupVersionKind(kind.GroupVersion().WithKind(kind.Kind + "List"))
			if err := s.Client.List(s.Ctx, list); err != nil {
				return fmt.Errorf("list %s: %w", kind.Kind, err)
			}
			if len(list.Items) == 0 {
				break
			}
			for i := range list.Items {
				o := &list.Items[i]
				o.SetGroupVersionKind(kind)
				if len(o.Finalizers) > 0 {
					if err := s.Client.Patch(s.Ctx, o, noFinalizers); client.IgnoreNotFound(err) != nil {
						return fmt.Errorf("%s %s: %w", kind.Kind, o.Name, err)
					}
				}
				if err := s.Client.Delete(s.Ctx, o); client.IgnoreNotFound(err) != nil {
					return fmt.Errorf("%s %s: %w", kind.Kind, o.Name, err)
				}
			}
		}
	}
	return nil
}

// testLog writes a log to the log of a test.
type testLog struct{ t *testing.T }

// Write implements io.Writer.
func (l testLog) Write(b []byte) (int, error) {
	l.t.Logf("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}

func newScheme(t *testing.T) *runtime.Scheme {
	s := runtime.NewScheme()
	if err := errors.Join(api.AddToScheme(s), clientscheme.AddToScheme(s)); err != nil {
		t.Fatal(err)
	}
	return s
}

// Manager makes a manager. Before the manager's client writes a status it asks refuse, unless refuse is nil, for an
// error to return instead.
func (s *Server) Manager(refuse func(client.Object) error) ctrl.Manager {
	s.T.Helper()
	skip, grace := true, 2*time.Minute
	mgr, err := ctrl.NewManager(s.Config, ctrl.Options{Scheme: newScheme(s.T),
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
		s.T.Fatal(err)
	}
	return mgr
}

// Run starts a manager. The returned function stops the manager and waits for its end; the end of the test does so too.
func (s *Server) Run(mgr ctrl.Manager) (stop func()) {
	ctx, cancel := context.WithCancel(s.Ctx)
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			s.T.Error(err)
		}
	}
	s.T.Cleanup(stop)
	return stop
}

// Watch reports every later change of the objects of a list. The watch starts at the version that the list has read: a
// watch without a version starts some time after the server answered, and misses a deletion in between.
func (s *Server) Watch(list client.ObjectList, which ...client.ListOption) watch.Interface {
	s.T.Helper()
	if err := s.Client.List(s.Ctx, list, which...); err != nil {
		s.T.Fatal(err)
	}
	from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}}
	watch, err := s.Client.Watch(s.Ctx, list, append(which, from)...)
	if err != nil {
		s.T.Fatal(err)
	}
	return watch
}

// Await waits until ok accepts the object. Every change of the object makes ok run, and every second does, for an ok
// that reads more than the object.
func Await[T client.Object](s *Server, obj T, list client.ObjectList, what string, ok func(T) bool) T {
	s.T.Helper()
	began := time.Now()
	watch := s.Watch(list, client.MatchingFields{"metadata.name": obj.GetName()})
	defer watch.Stop()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	ctx, cancel := context.WithTimeout(s.Ctx, 5*time.Minute)
	defer cancel()
	for {
		if err := s.Client.Get(s.Ctx, client.ObjectKeyFromObject(obj), obj); err == nil && ok(obj) {
			s.T.Logf("%s: %s after %v", obj.GetName(), what, time.Since(began).Round(time.Millisecond))
			return obj
		}
		select {
		case <-watch.ResultChan():
		case <-tick.C:
		case <-ctx.Done():
			s.T.Fatalf("%s %s never was %s; it is %+v", list.GetObjectKind().GroupVersionKind().Kind, obj.GetName(), what, obj)
		}
	}
}

// AwaitEvent waits for an event that is the one, or was before, and returns the event.
func (s *Server) AwaitEvent(what string, is func(*eventsv1.Event) bool) *eventsv1.Event {
	s.T.Helper()
	var list eventsv1.EventList
	watch := s.Watch(&list)
	defer watch.Stop()
	for i := range list.Items {
		if e := &list.Items[i]; is(e) {
			return e
		}
	}
	ctx, cancel := context.WithTimeout(s.Ctx, 5*time.Minute)
	defer cancel()
	for {
		select {
		case got, open := <-watch.ResultChan():
			if e, ok := got.Object.(*eventsv1.Event); ok && is(e) {
				return e
			}
			if !open {
				s.T.Fatalf("the watch of events ended before the event: %s", what)
			}
		case <-ctx.Done():
			s.T.Fatalf("no event: %s", what)
		}
	}
}

// AwaitDeleted waits until the object does not exist.
func (s *Server) AwaitDeleted(obj client.Object, list client.ObjectList) {
	s.T.Helper()
	watch := s.Watch(list, client.MatchingFields{"metadata.name": obj.GetName()})
	defer watch.Stop()
	ctx, cancel := context.WithTimeout(s.Ctx, 5*time.Minute)
	defer cancel()
	for {
		if err := s.Client.Get(s.Ctx, client.ObjectKeyFromObject(obj), obj); client.IgnoreNotFound(err) != nil {
			s.T.Fatal(err)
		} else if err != nil {
			return
		}
		select {
		case <-watch.ResultChan():
		case <-ctx.Done():
			s.T.Fatalf("%s still exists: %+v", obj.GetName(), obj)
		}
	}
}

// Create creates objects.
func (s *Server) Create(objs ...client.Object) {
	s.T.Helper()
	for _, o := range objs {
		if err := s.Client.Create(s.Ctx, o); err != nil {
			s.T.Fatal(err)
		}
	}
}

// Delete asks for the deletion of an object.
func (s *Server) Delete(o client.Object) {
	s.T.Helper()
	if err := s.Client.Delete(s.Ctx, o); err != nil {
		s.T.Fatal(err)
	}
}

// Edit changes an object as a person would: again after each conflict.
func Edit[X any, T interface {
	*X
	client.Object
}](s *Server, obj T, change func(T)) {
	s.T.Helper()
	now, err := await.Edit(s.Ctx, s.Client, obj.GetName(), func(now T) (bool, error) { change(now); return true, nil })
	if err != nil {
		s.T.Fatal(err)
	}
	*obj = *now
}

// EditStatus is Edit for the status.
func EditStatus[X any, T interface {
	*X
	client.Object
}](s *Server, obj T, change func(T)) {
	s.T.Helper()
	now, err := await.EditStatus(s.Ctx, s.Client, obj.GetName(), func(now T) (bool, error) {
		change(now)
		return true, nil
	})
	if err != nil {
		s.T.Fatal(err)
	}
	*obj = *now
}

// Named is the metadata of an object.
func Named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

// Volume is a volume that is not created yet.
func Volume(name string, size int64) *api.Volume {
	return &api.Volume{ObjectMeta: Named(name), Spec: api.VolumeSpec{Size: size}}
}

// AwaitVolume waits until ok accepts a volume.
func (s *Server) AwaitVolume(name, what string, ok func(*api.Volume) bool) *api.Volume {
	s.T.Helper()
	return Await(s, &api.Volume{ObjectMeta: Named(name)}, &api.VolumeList{}, what, ok)
}
