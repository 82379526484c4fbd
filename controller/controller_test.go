package controller

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi"
)

var (
	store client.WithWatch
	door  *Server
	// heard are the events of the door.
	heard = events.NewFakeRecorder(100)
)

// TestMain runs one API server for all tests.
func TestMain(m *testing.M) {
	suite.SystemMain()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "drover-controller-")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		ctx, cancel := context.WithCancel(context.Background())
		server, err := kubeapi.Start(ctx, kubeapi.Options{Dir: dir, Volatile: true})
		if err != nil {
			panic(err)
		}
		scheme := runtime.NewScheme()
		if err := api.AddToScheme(scheme); err != nil {
			panic(err)
		}
		if store, err = client.NewWithWatch(server.Config, client.Options{Scheme: scheme}); err != nil {
			panic(err)
		}
		door = New(store, heard)
		code := m.Run()
		cancel()
		_ = server.Wait() // open connections are cut
		return code
	}())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, k api.Kind, words ...string) {
	t.Helper()
	if !api.Is(err, k) {
		t.Fatalf("error %v is of kind %v, want %v", err, api.KindOf(err), k)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// loops stands in for the rooms' reconcilers: until the test ends, loops calls the functions for new and changed
// objects.
func loops(t *testing.T, volume func(*api.Volume), attachment func(*api.Attachment)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	follow := func(list client.ObjectList, see func(runtime.Object)) {
		w, err := store.Watch(ctx, list)
		must(t, err)
		wg.Go(func() {
			for e := range w.ResultChan() {
				if e.Type == watch.Added || e.Type == watch.Modified {
					see(e.Object)
				}
			}
		})
	}
	if volume != nil {
		follow(&api.VolumeList{}, func(o runtime.Object) { volume(o.(*api.Volume)) })
	}
	if attachment != nil {
		follow(&api.AttachmentList{}, func(o runtime.Object) { attachment(o.(*api.Attachment)) })
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// ready writes the planner's status of a volume with a replica.
func ready(t *testing.T) func(*api.Volume) {
	return func(v *api.Volume) {
		if v.Status.Size == v.Spec.Size {
			return
		}
		v.Status.State, v.Status.Size = api.VolumeDetached, v.Spec.Size
		if err := store.Status().Update(context.Background(), v); client.IgnoreNotFound(err) != nil &&
			!strings.Contains(err.Error(), "modified") {
			t.Error(err)
		}
	}
}

func attached(t *testing.T) func(*api.Attachment) {
	return func(a *api.Attachment) {
		if a.Status.Ready {
			return
		}
		a.Status.Ready, a.Status.Device = true, "/dev/null"
		if err := store.Status().Update(context.Background(), a); client.IgnoreNotFound(err) != nil {
			t.Error(err)
		}
	}
}

func capability(m csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: m},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}}
}

const writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER

func request(name string, parameters ...string) *csi.CreateVolumeRequest {
	r := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{capability(writer)},
		CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, Parameters: map[string]string{}}
	for i := 0; i < len(parameters); i += 2 {
		r.Parameters[parameters[i]] = parameters[i+1]
	}
	return r
}

func create(t *testing.T, r *csi.CreateVolumeRequest) *csi.Volume {
	t.Helper()
	res, err := door.CreateVolume(t.Context(), r)
	must(t, err)
	t.Cleanup(func() {
		_, err := door.DeleteVolume(context.Background(), &csi.DeleteVolumeRequest{VolumeId: res.Volume.VolumeId})
		must(t, err)
	})
	return res.Volume
}

func makeNode(t *testing.T, name string) {
	t.Helper()
	n := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	must(t, store.Create(t.Context(), n))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), n)) })
}

func TestSizes(t *testing.T) {
	for _, c := range []struct {
		required, limit, virtual int64
		fs                       string
		want                     int64 // 0: out of range
	}{
		{5 << 20, 0, 0, "", 10 << 20},
		{2000000000, 0, 0, "", 2000683008},
		{0, 0, 0, "", 1 << 30},
		{0, 64<<20 + 1, 0, "", 64 << 20},
		{0, 0, 300<<20 + 512, "", 302 << 20},
		{1, 10<<20 - 1, 0, "", 0},
		{11 << 20, 11 << 20, 0, "", 0},
		{64 << 20, 0, 65 << 20, "", 0},
		{100 << 20, 0, 0, "xfs", 0},
		{300 << 20, 0, 0, "xfs", 300 << 20},
		{api.MaxVolumeSize + 1, 0, 0, "", 0},
	} {
		w := &wish{spec: api.VolumeSpec{FSType: c.fs}}
		var n int64
		var err error
		w.required, w.limit, err = checkCapacityRange(&csi.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit})
		if err == nil {
			n, err = w.volumeSize(c.virtual)
		}
		if n != c.want || (c.want == 0 && !api.Is(err, api.OutOfRange)) {
			t.Errorf("%+v: %d bytes, %v", c, n, err)
		}
	}
	for _, r := range []*csi.CapacityRange{{RequiredBytes: -1}, {LimitBytes: -1}, {RequiredBytes: 2, LimitBytes: 1}} {
		if _, _, err := checkCapacityRange(r); !api.Is(err, api.Invalid) {
			t.Errorf("%v: %v", r, err)
		}
	}
}

func TestParameters(t *testing.T) {
	w := &wish{}
	must(t, w.parseParameters(map[string]string{"csi.storage.k8s.io/pvc/name": "x", "numberOfReplicas": "1", "diskSelector": "ssd, fast",
		"staleReplicaTimeout": "20", "mkfsParams": "-i 8192", "dataLocality": "strict-local", "fsType": "xfs",
		"freezeFilesystemForSnapshot": "true", "snapshotDataIntegrity": "fast-check", "migratable": "false", "frontend": "blockdev", "encrypted": "", "backingImageName": "golden",
		"backingImageDataSourceType": "download", "backingImageDataSourceParameters": `{"url":"https://x/y","n":3}`,
		"backingImageChecksum": strings.Repeat("AB", 64), "backingImageMinNumberOfCopies": "2"}))
	must(t, w.image.completeSource())
	if s := w.spec; s.NumberOfReplicas != 1 || !slices.Equal(s.DiskSelector, []string{"ssd", "fast"}) ||
		s.StaleReplicaTimeout != 20 || s.MkfsParams != "-i 8192" || s.DataLocality != "strict-local" || s.FSType != "xfs" ||
		s.BackingImage != "golden" || s.FreezeFilesystemForSnapshot != "enabled" ||
		s.SnapshotDataIntegrity != "fast-check" {
		t.Errorf("spec %+v", s)
	}
	if i := w.image; i.source != api.SourceDownload || i.parameters["url"] != "https://x/y" || i.parameters["n"] != "3" ||
		i.checksum != strings.Repeat("ab", 64) || i.copies != 2 {
		t.Errorf("image %+v", i)
	}
	// The controller takes over every key or refuses the key by name.
	for key, p := range parameters {
		err := new(wish).parseParameters(map[string]string{key: "\x01 no value of any key"})
		switch {
		case err == nil && p.set == nil:
			t.Errorf("%s is not supported yet, but not refused", key)
		case err != nil && (!api.Is(err, api.Invalid) || !strings.Contains(err.Error(), key)):
			t.Errorf("%s: %v", key, err)
		}
		for _, v := range p.neutral {
			must(t, new(wish).parseParameters(map[string]string{key: v}))
		}
	}
	for _, given := range []map[string]string{
		{"backingImage": "a", "backingImageName": "b"}, {"backingImage": "../a"}, {"backingImageURL": "https://x"},
		{"backingImage": "a", "backingImageDataSourceParameters": "{}"}, {"backingImage": "a", "backingImageDataSourceType": "upload"},
		{"backingImage": "a", "backingImageDataSourceType": "download"}, {"backingImage": "a", "backingImageDataSourceParameters": "["},
		{"backingImage": "a", "backingImageURL": "https://x", "backingImageDataSourceType": "download",
			"backingImageDataSourceParameters": `{"url":"https://y"}`},
		{"backingImage": "a", "backingImageChecksum": "12"}, {"nodeSelector": "a,,b"}, {"numberOfReplicas": "0"},
	} {
		w := &wish{}
		err := w.parseParameters(given)
		if err == nil {
			err = w.image.completeSource()
		}
		if !api.Is(err, api.Invalid) {
			t.Errorf("%v: %v", given, err)
		}
	}
}

func TestTopology(t *testing.T) {
	loops(t, ready(t), nil)
	term := func(kv ...string) *csi.Topology { return &csi.Topology{Segments: map[string]string{kv[0]: kv[1]}} }
	r := request("topology")
	r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{term("zone", "z"),
		term(api.TopologyNode, "a"), term(api.TopologyNode, "b")}, Preferred: []*csi.Topology{term(api.TopologyNode, "b")}}
	id := create(t, r).VolumeId
	v, err := door.readVolume(t.Context(), id)
	must(t, err)
	if !slices.Equal(v.Spec.Nodes, []string{"b", "a"}) {
		t.Errorf("nodes %v", v.Spec.Nodes)
	}
	r.AccessibilityRequirements.Requisite = r.AccessibilityRequirements.Requisite[:1]
	r.AccessibilityRequirements.Preferred = nil
	_, err = door.CreateVolume(t.Context(), r)
	wantKind(t, err, api.Full, api.TopologyNode)
	r.AccessibilityRequirements.Requisite = []*csi.Topology{term(api.TopologyNode, "elsewhere")}
	_, err = door.CreateVolume(t.Context(), r)
	wantKind(t, err, api.Exists)
}

// TestNoRoom: CreateVolume deletes a volume without room again, so that the next try may create another volume.
func TestNoRoom(t *testing.T) {
	loops(t, func(v *api.Volume) {
		if len(v.Status.Conditions) > 0 || v.DeletionTimestamp != nil {
			return
		}
		meta.SetStatusCondition(&v.Status.Conditions, metav1.Condition{Type: api.ConditionScheduled, Status: "False",
			Reason: "NoDisk", Message: "every disk is full", ObservedGeneration: v.Generation})
		if err := store.Status().Update(context.Background(), v); err != nil {
			t.Error(err)
		}
	}, nil)
	_, err := door.CreateVolume(t.Context(), request("no-room"))
	wantKind(t, err, api.Full, "every disk is full", "no-room")
	_, err = door.readVolume(t.Context(), "no-room")
	wantKind(t, err, api.NotFound)
}

// gaveUp is the error of a call which ran out of time after creating the object. On a busy machine, the creation can
// take more than a moment.
func gaveUp(t *testing.T, r *csi.CreateVolumeRequest, obj client.Object, name string) error {
	t.Helper()
	for patience := 700 * time.Millisecond; ; patience *= 4 {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := door.CreateVolume(ctx, r)
		cancel()
		if err == nil {
			t.Fatalf("%s: the call did not wait", name)
		}
		there := store.Get(t.Context(), client.ObjectKey{Name: name}, obj)
		if there == nil || patience > time.Minute {
			must(t, there)
			return err
		}
	}
}

// TestJoins: a call which runs out of time names the awaited volume; a later call joins, and finds the same volume.
func TestJoins(t *testing.T) {
	v := &api.Volume{}
	wantKind(t, gaveUp(t, request("joins"), v, "joins"), api.Busy, "joins")
	done := make(chan error, 1)
	go func() {
		_, err := door.CreateVolume(t.Context(), request("joins"))
		done <- err
	}()
	v.Status.State, v.Status.Size = api.VolumeDetached, v.Spec.Size
	must(t, store.Status().Update(t.Context(), v))
	must(t, <-done)
	_, err := door.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "joins"})
	must(t, err)
}

func TestImage(t *testing.T) {
	loops(t, ready(t), nil)
	url := []string{"backingImage", "img", "backingImageURL", "https://x/img"}
	img := &api.BackingImage{}
	wantKind(t, gaveUp(t, request("imaged", url...), img, "img"), api.Busy, "img")
	t.Cleanup(func() { must(t, store.Delete(context.Background(), img)) })
	if img.Spec.SourceType != api.SourceDownload || img.Spec.SourceParameters["url"] != "https://x/img" {
		t.Errorf("image %+v", img.Spec)
	}
	img.Status.State, img.Status.Message = api.ImageFailed, "no such host"
	must(t, store.Status().Update(t.Context(), img))
	_, err := door.CreateVolume(t.Context(), request("imaged", url...))
	wantKind(t, err, api.Unavailable, "img", "no such host")
	_, err = door.readVolume(t.Context(), "imaged")
	wantKind(t, err, api.NotFound) // no volume before the image
	img.Status.State, img.Status.VirtualSize, img.Status.Checksum = api.ImageReady, 48<<20, strings.Repeat("0", 128)
	must(t, store.Status().Update(t.Context(), img))
	_, err = door.CreateVolume(t.Context(), request("imaged", append(url, "backingImageChecksum", strings.Repeat("1", 128))...))
	wantKind(t, err, api.Invalid, "img", "checksum")
	create(t, request("imaged", append(url, "backingImageChecksum", strings.Repeat("0", 128))...))
}

func publish(node, id string, readOnly bool) error {
	_, err := door.ControllerPublishVolume(context.Background(), &csi.ControllerPublishVolumeRequest{VolumeId: id,
		NodeId: node, VolumeCapability: capability(writer), Readonly: readOnly})
	return err
}

func unpublish(node, id string) error {
	_, err := door.ControllerUnpublishVolume(context.Background(), &csi.ControllerUnpublishVolumeRequest{VolumeId: id,
		NodeId: node})
	return err
}

func TestPublish(t *testing.T) {
	loops(t, ready(t), attached(t))
	makeNode(t, "node-a")
	makeNode(t, "node-b")
	id := create(t, request("published")).VolumeId
	must(t, publish("node-a", id, false))
	must(t, publish("node-a", id, false))
	wantKind(t, publish("node-a", id, true), api.Exists)
	wantKind(t, publish("node-b", id, false), api.InUse, "node-a")
	wantKind(t, publish("node-c", id, false), api.NotFound, "node-c")
	wantKind(t, publish("../x", id, false), api.NotFound)
	_, err := door.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	wantKind(t, err, api.InUse, "node-a")
	must(t, unpublish("node-b", id)) // node-b has no attachment
	wantKind(t, publish("node-b", id, false), api.InUse)
	must(t, unpublish("node-a", id))
	must(t, publish("node-b", id, true))
	must(t, unpublish("", id)) // from any node
	must(t, unpublish("node-b", id))

	set := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: "volume-attach-limit"}, Value: "2"}
	must(t, store.Create(t.Context(), set))
	defer func() { must(t, store.Delete(context.Background(), set)) }()
	ids := []string{id}
	for _, n := range []string{"p1", "p2", "p3", "p4", "p5"} {
		ids = append(ids, create(t, request(n)).VolumeId)
	}
	errs := make([]error, len(ids))
	var wg sync.WaitGroup
	for i, id := range ids {
		wg.Go(func() { errs[i] = publish("node-a", id, false) })
	}
	wg.Wait()
	full := 0
	for _, err := range errs {
		if api.Is(err, api.Full) {
			full++
		} else {
			must(t, err)
		}
	}
	if full != len(ids)-2 {
		t.Errorf("%d of %d attachments were refused at a limit of 2", full, len(ids))
	}
	for _, id := range ids {
		must(t, unpublish("node-a", id))
	}
}

func TestExpandAndModify(t *testing.T) {
	loops(t, func(v *api.Volume) {
		if v.Spec.Size <= 128<<20 {
			ready(t)(v)
		} else if !meta.IsStatusConditionFalse(v.Status.Conditions, api.ConditionExpanded) {
			meta.SetStatusCondition(&v.Status.Conditions, metav1.Condition{Type: api.ConditionExpanded, Status: "False",
				Reason: "NoRoom", Message: "the disk is too small", ObservedGeneration: v.Generation})
			if err := store.Status().Update(context.Background(), v); err != nil {
				t.Error(err)
			}
		}
	}, nil)
	id := create(t, request("expanded")).VolumeId
	expand := func(required, limit int64) (int64, error) {
		r, err := door.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id,
			CapacityRange: &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}})
		return r.GetCapacityBytes(), err
	}
	for _, c := range []struct{ required, limit, want int64 }{{64 << 20, 0, 64 << 20}, {1, 0, 64 << 20},
		{100<<20 + 1, 0, 102 << 20}, {100 << 20, 200 << 20, 102 << 20}} {
		n, err := expand(c.required, c.limit)
		must(t, err)
		if n != c.want {
			t.Errorf("%+v: %d", c, n)
		}
	}
	_, err := expand(1, 64<<20)
	wantKind(t, err, api.OutOfRange, "shrink")
	_, err = expand(103<<20, 103<<20)
	wantKind(t, err, api.OutOfRange)
	_, err = expand(1<<30, 0)
	wantKind(t, err, api.Full, "the disk is too small")

	modify := func(kv ...string) error {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		_, err := door.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: m})
		return err
	}
	must(t, modify("staleReplicaTimeout", "7", "dataLocality", "best-effort"))
	must(t, modify("freezeFilesystemForSnapshot", "ignored"))
	must(t, modify("snapshotDataIntegrity", "disabled"))
	for _, bad := range [][]string{{"staleReplicaTimeout", "8", "fsType", "xfs"}, {"staleReplicaTimeout", "9", "nope", "1"},
		{"staleReplicaTimeout", "10", "numberOfReplicas", "30"}, {"freezeFilesystemForSnapshot", "yes"},
		{"snapshotDataIntegrity", "true"}} {
		wantKind(t, modify(bad...), api.Invalid, bad[len(bad)-2])
	}
	v, err := door.readVolume(t.Context(), id)
	must(t, err)
	if v.Spec.StaleReplicaTimeout != 7 || v.Spec.DataLocality != "best-effort" || v.Spec.NumberOfReplicas != 1 ||
		v.Spec.FreezeFilesystemForSnapshot != "ignored" || v.Spec.SnapshotDataIntegrity != "disabled" {
		t.Errorf("modified in part: %+v", v.Spec)
	}
	create2, err := door.CreateVolume(t.Context(), request("expanded")) // a repeat, after all changes
	must(t, err)
	if create2.Volume.VolumeId != id {
		t.Error("another volume")
	}
}

func TestCapacityAndHealth(t *testing.T) {
	n := &api.Node{ObjectMeta: metav1.ObjectMeta{Name: "big"}, Spec: api.NodeSpec{Disks: []api.DiskSpec{
		{Path: "/a", Tags: []string{"ssd"}}, {Path: "/b", ReservedBytes: 10 << 30}, {Path: "/full"}, {Path: "/gone"}}}}
	must(t, store.Create(t.Context(), n))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), n)) })
	n.Status.Disks = []api.DiskStatus{
		{Path: "/a", UID: "a", Ready: true, Capacity: 100 << 30, Available: 50 << 30},
		{Path: "/b", UID: "b", Ready: true, Capacity: 30 << 30, Available: 30 << 30},
		{Path: "/full", UID: "c", Ready: true, Capacity: 100 << 30, Available: 1 << 30},
		{Path: "/gone", UID: "d", Capacity: 100 << 30, Available: 50 << 30}}
	must(t, store.Status().Update(t.Context(), n))
	r := &api.Replica{ObjectMeta: metav1.ObjectMeta{Name: "r"}, Spec: api.ReplicaSpec{Disk: "a", Node: "big", Size: 20 << 30}}
	must(t, store.Create(t.Context(), r))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), r)) })
	picky := &api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: "picky"}, Spec: api.BackingImageSpec{
		SourceType: api.SourceUpload, DiskSelector: []string{"ssd"}}}
	must(t, store.Create(t.Context(), picky))
	t.Cleanup(func() { must(t, store.Delete(context.Background(), picky)) })
	for _, c := range []struct {
		req       *csi.GetCapacityRequest
		all, most int64 // GiB
	}{
		{&csi.GetCapacityRequest{}, 220, 180},
		{&csi.GetCapacityRequest{Parameters: map[string]string{"diskSelector": "ssd"}}, 180, 180},
		{&csi.GetCapacityRequest{Parameters: map[string]string{"nodeSelector": "none"}}, 0, 0},
		{&csi.GetCapacityRequest{Parameters: map[string]string{"backingImage": "picky"}}, 180, 180},
		{&csi.GetCapacityRequest{Parameters: map[string]string{"backingImage": "new", "backingImageURL": "https://x/y",
			"backingImageNodeSelector": "none"}}, 0, 0},
		{&csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{Segments: map[string]string{api.TopologyNode: "big"}}}, 220, 180},
		{&csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{Segments: map[string]string{api.TopologyNode: "x"}}}, 0, 0},
		{&csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{
			capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)}}, 0, 0},
	} {
		got, err := door.GetCapacity(t.Context(), c.req)
		must(t, err)
		// Percentages of bytes are cut, not rounded.
		near := func(n, g int64) bool { return n <= g<<30 && n >= g<<30-(8<<20) }
		if !near(got.AvailableCapacity, c.all) || !near(got.MaximumVolumeSize.Value, c.most) {
			t.Errorf("%v: %v", c.req, got)
		}
	}

	loops(t, ready(t), nil)
	for _, name := range []string{"well", "ill-1", "ill-2"} {
		id := create(t, request(name)).VolumeId
		if name == "well" {
			continue
		}
		v, err := door.readVolume(t.Context(), id)
		must(t, err)
		v.Status.Robustness, v.Status.Message = api.RobustDegraded, "a disk is gone"
		must(t, store.Status().Update(t.Context(), v))
	}
	one, err := door.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: 1})
	must(t, err)
	two, err := door.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: one.NextToken})
	must(t, err)
	if len(one.Entries) != 1 || len(two.Entries) != 1 || one.Entries[0].VolumeId != "ill-1" || two.Entries[0].VolumeId != "ill-2" ||
		two.NextToken != "" || one.Entries[0].HealthStatuses[0].Status != csi.VolumeHealthErrorType_DEGRADED {
		t.Errorf("health %v, then %v", one, two)
	}
	h, err := door.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: "well"})
	must(t, err)
	if len(h.VolumeHealth.HealthStatuses) > 0 {
		t.Errorf("a well volume: %v", h)
	}
	v, err := door.readVolume(t.Context(), "well")
	must(t, err)
	for replicas, want := range map[int32]csi.VolumeHealthErrorType{
		1: csi.VolumeHealthErrorType_DATA_LOSS, 3: csi.VolumeHealthErrorType_DEGRADED} {
		v.Spec.NumberOfReplicas = replicas
		v.Status.Conditions = []metav1.Condition{{Type: api.ConditionIntact, Status: "False", Message: "2 MiB at 7"}}
		got := volumeHealth(v).HealthStatuses
		if len(got) != 1 || got[0].Status != want || got[0].Reason != "DataDamaged" || got[0].Message != "2 MiB at 7" {
			t.Errorf("%d replicas, damage: %v", replicas, got)
		}
	}
}

// TestCallerLeaves: a call ends with the caller, and the error is Busy and explains the end.
func TestCallerLeaves(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := door.CreateVolume(ctx, request("left"))
	if !api.Is(err, api.Busy) || errors.Is(err, context.Canceled) && err.Error() == context.Canceled.Error() {
		t.Errorf("error %v", err)
	}
}
