package imagestore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi/apitest"
	"drover.io/drover/imagestore"
	"drover.io/drover/imagestore/host"
	originhttp "drover.io/drover/imagestore/origin/http"
	"drover.io/drover/replicas/stack"
)

func TestMain(m *testing.M) {
	suite.SystemMain()
	ctrl.SetLogger(logr.Discard())
	os.Exit(apitest.Main(m))
}

// world is a cluster of a single node with disks, which can be restarted.
type world struct {
	t      *testing.T
	api    *rest.Config // of the world's own server
	client client.WithWatch
	disks  []*stack.Disk
	node   string
	opts   host.Options
	store  store // of backups

	mu   sync.Mutex
	away map[string]bool // UIDs of unreachable disks
	// instead replaces disks, by UID.
	instead map[string]block.Layers
	stop    func()
}

func newWorld(t *testing.T, disks int, dirs ...string) *world {
	t.Helper()
	server := apitest.Start(t)
	c := server.Client
	w := &world{t: t, api: server.Config, client: c, node: "node-1", stop: func() {}, opts: host.Options{
		RetryMin: time.Second, RetryMax: 2 * time.Second, ProgressEvery: 50 * time.Millisecond,
		Log:      slog.New(slog.NewTextHandler(&testLog{t: t}, nil)),
		Download: originhttp.Options{Start: 20 * time.Second, Stall: 20 * time.Second, Pause: time.Millisecond}}}
	w.opts.OpenBackup = w.store.open
	node := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: w.node}}
	status := api.NodeStatus{Heartbeat: alive()}
	for i := range disks {
		var dir string
		if i < len(dirs) {
			dir = dirs[i]
		} else {
			dir = t.TempDir()
		}
		d, err := stack.Add(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.Close() })
		w.disks = append(w.disks, d)
		node.Spec.Disks = append(node.Spec.Disks, api.DiskSpec{Path: dir, Tags: []string{fmt.Sprintf("disk-%d", i)}})
		status.Disks = append(status.Disks, api.DiskStatus{Path: dir, UID: api.UID(d.UID()), Ready: true,
			Capacity: 100 << 30, Available: 50<<30 - int64(i)})
	}
	w.create(node)
	node.Status = status
	if err := c.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	w.private(true) // servers of tests are on loopback
	w.start()
	t.Cleanup(func() {
		defer func() { w.stop() }()
		w.cleanUp()
	})
	return w
}

// alive is the heartbeat of a node which outlives a test.
func alive() metav1.Time { return metav1.NewTime(time.Now().Add(time.Hour)) }

func (w *world) start() {
	w.t.Helper()
	yes := true
	grace := patience
	mgr, err := ctrl.NewManager(w.api, ctrl.Options{Scheme: w.client.Scheme(), Metrics: server.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: &yes}, GracefulShutdownTimeout: &grace})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := imagestore.SetupController(mgr, w.opts.Log); err != nil {
		w.t.Fatal(err)
	}
	find := func(uid api.UID) (block.Layers, error) {
		i := slices.IndexFunc(w.disks, func(d *stack.Disk) bool { return d.UID() == string(uid) })
		w.mu.Lock()
		defer w.mu.Unlock()
		if i < 0 || w.away[string(uid)] {
			return nil, api.Errorf(api.Unavailable, "disk %s is not there: is its file system mounted?", uid)
		}
		if d := w.instead[string(uid)]; d != nil {
			return d, nil
		}
		return w.disks[i], nil
	}
	if err := imagestore.SetupNode(mgr, w.node, find, w.opts); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	w.stop = func() {
		w.stop = func() {}
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("the manager ended: %v", err)
		}
	}
}

// cleanUp deletes all objects and checks the disks for remains.
func (w *world) cleanUp() {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, o := range []client.Object{&api.Replica{}, &api.Volume{}, &api.BackingImage{}} {
		if err := w.client.DeleteAllOf(ctx, o); err != nil {
			w.t.Error(err)
		}
	}
	w.eventually("all images are gone", func() bool {
		var imgs api.BackingImageList
		var copies api.ImageCopyList
		return w.client.List(ctx, &imgs) == nil && w.client.List(ctx, &copies) == nil && len(imgs.Items)+len(copies.Items) == 0
	})
	if err := w.client.DeleteAllOf(ctx, &api.Node{}); err != nil {
		w.t.Error(err)
	}
	for i := range w.disks {
		w.clean(i)
	}
}

// clean checks a disk for remains.
func (w *world) clean(i int) {
	w.t.Helper()
	for _, name := range w.left(i) {
		w.t.Errorf("left on disk %d: %s", i, name)
	}
}

// left lists the layers and images on a disk.
func (w *world) left(i int) []string {
	w.t.Helper()
	var all []string
	for _, sub := range []string{"layers", "images"} {
		entries, err := os.ReadDir(filepath.Join(w.disks[i].Path(), sub))
		if err != nil {
			w.t.Error(err)
		}
		for _, e := range entries {
			all = append(all, sub+"/"+e.Name())
		}
	}
	return all
}

// private sets whether sources may be on internal addresses.
func (w *world) private(allowed bool) {
	w.t.Helper()
	s := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: "allow-private-image-sources"}, Value: fmt.Sprint(allowed)}
	err := w.client.Create(w.t.Context(), s)
	if apierrors.IsAlreadyExists(err) {
		if err = w.client.Get(w.t.Context(), client.ObjectKeyFromObject(s), s); err == nil {
			s.Value = fmt.Sprint(allowed)
			err = w.client.Update(w.t.Context(), s)
		}
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	if err := w.client.Create(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) putStatus(o client.Object) {
	w.t.Helper()
	if err := w.client.Status().Update(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) image(name string, t api.SourceType, params map[string]string, more ...func(*api.BackingImageSpec)) {
	w.t.Helper()
	img := &api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: api.BackingImageSpec{SourceType: t, SourceParameters: params, MinNumberOfCopies: 1}}
	for _, m := range more {
		m(&img.Spec)
	}
	w.create(img)
}

func (w *world) delete(o client.Object, name string) {
	w.t.Helper()
	o.SetName(name)
	if err := w.client.Delete(context.Background(), o); err != nil {
		w.t.Fatal(err)
	}
}

// await watches an image until ok, and sees short states, too.
func (w *world) await(name, what string, ok func(*api.BackingImage) bool) *api.BackingImage {
	w.t.Helper()
	var img *api.BackingImage
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	w.eventually("image "+name+" "+what, func() bool {
		_, err := await.Until(ctx, w.client, name, func(i *api.BackingImage) (bool, error) {
			img = i
			return ok(i), nil
		})
		return err == nil
	}, func() string { return fmt.Sprintf("%+v", img) })
	return img
}

// sees is await for an effect of do, and sees short effects, too.
func (w *world) sees(name, what string, do func() error, ok func(*api.BackingImage) bool) *api.BackingImage {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	looks, seen := make(chan struct{}), make(chan error, 1)
	var img *api.BackingImage
	go func() {
		look := sync.OnceFunc(func() { close(looks) })
		_, err := await.Until(ctx, w.client, name, func(i *api.BackingImage) (bool, error) {
			defer look()
			img = i
			return ok(i), nil
		})
		look()
		seen <- err
	}()
	<-looks
	err := do()
	if err != nil {
		cancel()
		<-seen
		w.t.Fatal(err)
	}
	if err := <-seen; err != nil {
		w.t.Fatalf("image %s never %s: %v; last: %+v", name, what, err, img)
	}
	return img
}

func (w *world) state(name string, s api.ImageState) *api.BackingImage {
	w.t.Helper()
	return w.await(name, "is "+string(s), func(i *api.BackingImage) bool { return i.Status.State == s })
}

func (w *world) gone(name string) {
	w.t.Helper()
	w.eventually("image "+name+" is gone", func() bool {
		var img api.BackingImage
		return client.IgnoreNotFound(w.client.Get(context.Background(), client.ObjectKey{Name: name}, &img)) == nil && img.Name == ""
	})
}

func (w *world) copies(name string) []api.ImageCopy {
	w.t.Helper()
	var list api.ImageCopyList
	if err := w.client.List(context.Background(), &list, client.MatchingLabels{api.LabelImage: name}); err != nil {
		w.t.Fatal(err)
	}
	return list.Items
}

// patience is how long things may take on a busy machine.
const patience = 2 * time.Minute

// eventually fails the test unless ok comes true.
func (w *world) eventually(what string, ok func() bool, state ...func() string) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(patience)
	defer end.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-end.C:
			last := ""
			for _, s := range state {
				last = s()
			}
			w.t.Fatalf("not in time: %s; last: %s", what, last)
		}
	}
}

// holds checks the content of the image on disk i.
func (w *world) holds(i int, img *api.BackingImage, content []byte) {
	w.t.Helper()
	src, err := w.disks[i].Open(string(img.Status.Layers[0]))
	if err != nil {
		w.t.Fatal(err)
	}
	defer src.Close()
	b := make([]byte, len(content))
	if _, err := src.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		w.t.Fatal(err)
	}
	if !bytes.Equal(b, content) {
		w.t.Fatal("the layer holds something else")
	}
}

// testLog writes to the log of a test.
type testLog struct {
	t  *testing.T
	mu sync.Mutex
}

func (l *testLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.t.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}
