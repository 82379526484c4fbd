package kubeapi

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	etcdserverpb "go.etcd.io/etcd/api/v3/etcdserverpb"
	apixv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"drover.io/drover/api"
)

// formerState is the database of the version before the change of the group (commit 116c202): a node with an image, two
// volumes, an attachment, snapshots and a group of snapshots; a lease, a secret and events.
func formerState(t *testing.T) map[string]json.RawMessage {
	t.Helper()
	f, err := os.Open("testdata/group-drover.io.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	state := map[string]json.RawMessage{}
	if err := json.NewDecoder(z).Decode(&state); err != nil {
		t.Fatal(err)
	}
	return state
}

// openTestStore opens the database in dir until the returned function is called.
func openTestStore(t *testing.T, dir string) (*store, func()) {
	t.Helper()
	s, err := openStore(t.Context(), Options{Dir: dir, Log: slog.New(slog.DiscardHandler), Volatile: true}.withDefaults())
	if err != nil {
		t.Fatal(err)
	}
	return s, s.close
}

func putAll(t *testing.T, s *store, state map[string]json.RawMessage) {
	t.Helper()
	for key, value := range state {
		if _, err := s.etcd.Server.Put(t.Context(), &etcdserverpb.PutRequest{Key: []byte(key), Value: value}); err != nil {
			t.Fatal(err)
		}
	}
}

// dump is everything in the database for the API server.
func dump(t *testing.T, s *store) map[string]string {
	t.Helper()
	list, err := s.listPage(t.Context(), "/registry/", "", 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, kv := range list {
		all[string(kv.Key)] = string(kv.Value)
	}
	return all
}

func decoded(t *testing.T, value []byte) (object map[string]any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(value))
	d.UseNumber()
	if err := d.Decode(&object); err != nil {
		t.Fatal(err)
	}
	return object
}

// movedState is the expected database after the move: each object with another group, and no former definition.
func movedState(t *testing.T, former map[string]json.RawMessage) map[string]map[string]any {
	t.Helper()
	want := map[string]map[string]any{}
	for key, value := range former {
		switch {
		case strings.HasPrefix(key, definitionObjects) && strings.HasSuffix(key, ".drover.io"):
		case strings.HasPrefix(key, "/registry/drover.io/"):
			text := strings.ReplaceAll(string(value), `"apiVersion":"drover.io/`, `"apiVersion":"storage.drover.io/`)
			if text == string(value) {
				t.Fatalf("%s has no group", key)
			}
			want[strings.Replace(key, "drover.io", "storage.drover.io", 1)] = decoded(t, []byte(text))
		default:
			want[key] = decoded(t, value)
		}
	}
	return want
}

func compareState(t *testing.T, s *store, want map[string]map[string]any) {
	t.Helper()
	got := dump(t, s)
	for key, object := range want {
		if value, ok := got[key]; !ok {
			t.Errorf("%s is lost", key)
		} else if !reflect.DeepEqual(decoded(t, []byte(value)), object) {
			t.Errorf("%s is\n%s, want\n%v", key, value, object)
		}
	}
	for key := range got {
		if want[key] == nil {
			t.Errorf("%s should not exist", key)
		}
	}
}

// TestMoveOfGroupGoesOnAfterAKill: a kill after any number of moved objects loses and doubles no object: the next start
// moves the rest.
func TestMoveOfGroupGoesOnAfterAKill(t *testing.T) {
	former := formerState(t)
	want := movedState(t, former)
	for _, moves := range []int{0, 1, 7, len(want)} {
		dir := t.TempDir()
		s, end := openTestStore(t, dir)
		putAll(t, s, former)
		if moves > 0 { // as moveGroup begins
			if err := s.copyBeforeMove(); err != nil {
				t.Fatal(err)
			}
		}
		for after, n := "", 0; n < moves; n++ {
			key, moved, err := s.moveNext(t.Context(), after)
			if err != nil || key != "" && !moved {
				t.Fatal(key, moved, err)
			}
			if after = key; key == "" {
				break
			}
		}
		end()

		s, end = openTestStore(t, dir)
		if err := s.moveGroup(t.Context()); err != nil {
			t.Fatalf("after %d moves: %v", moves, err)
		}
		compareState(t, s, want)
		rev := s.etcd.Server.KV().Rev()
		if err := s.moveGroup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if now := s.etcd.Server.KV().Rev(); now != rev {
			t.Errorf("a second move wrote %d revisions", now-rev)
		}
		end()

		// The copy of the former state can be restored, and then is moved again.
		if moves == 7 {
			if _, err := Restore(dir, filepath.Join(dir, "etcd-snapshots", formerCopy)); err != nil {
				t.Fatal(err)
			}
			s, end = openTestStore(t, dir)
			if got := dump(t, s); len(got) != len(former) || got["/registry/drover.io/volumes/db"] == "" {
				t.Errorf("the copy has %v", slices.Sorted(maps.Keys(got)))
			}
			end()
		}
	}
}

// TestMoveOfGroupReplacesNothing: an object of the former group does not replace an object of the same name in today's
// group.
func TestMoveOfGroupReplacesNothing(t *testing.T) {
	s, end := openTestStore(t, t.TempDir())
	defer end()
	putAll(t, s, map[string]json.RawMessage{
		"/registry/drover.io/volumes/a":         json.RawMessage(`{"metadata":{"uid":"former"}}`),
		"/registry/drover.io/volumes/b":         json.RawMessage(`{"metadata":{"uid":"b"}}`),
		"/registry/storage.drover.io/volumes/a": json.RawMessage(`{"metadata":{"uid":"present"}}`),
	})
	if err := s.moveGroup(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := dump(t, s)
	if !strings.Contains(got["/registry/storage.drover.io/volumes/a"], "present") ||
		!strings.Contains(got["/registry/drover.io/volumes/a"], "former") ||
		!strings.Contains(got["/registry/storage.drover.io/volumes/b"], `"b"`) || len(got) != 3 {
		t.Errorf("the database has %v", got)
	}
}

// TestFirstStartMovesTheGroup: the first start of this version on a former version's state serves the same objects in
// today's group: UIDs, times, generations, finalizers, owners and statuses. The second start changes nothing.
func TestFirstStartMovesTheGroup(t *testing.T) {
	dir := t.TempDir()
	former := formerState(t)
	st, end := openTestStore(t, dir)
	putAll(t, st, former)
	end()
	versions := map[string]string{}
	for range 2 {
		s := serve(t, Options{Dir: dir})
		c, err := dynamic.NewForConfig(s.Config)
		s.must(err)
		for key, want := range movedState(t, former) {
			rest, ok := strings.CutPrefix(key, "/registry/storage.drover.io/")
			if !ok {
				continue
			}
			plural, name, _ := strings.Cut(rest, "/")
			got, err := c.Resource(api.GroupVersion.WithResource(plural)).Get(t.Context(), name, metav1.GetOptions{})
			s.must(err)
			version := got.GetResourceVersion()
			if was, ok := versions[key]; ok && was != version {
				t.Errorf("the second start changed %s", key)
			}
			versions[key] = version
			unstructured.RemoveNestedField(got.Object, "metadata", "resourceVersion")
			b, err := json.Marshal(got.Object)
			s.must(err)
			if have := decoded(t, b); !reflect.DeepEqual(have, want) {
				t.Errorf("%s is\n%v, want\n%v", key, have, want)
			}
		}
		leases := schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
		lease, err := c.Resource(leases).Namespace("default").Get(t.Context(), "drover-controller", metav1.GetOptions{})
		s.must(err)
		if holder, _, _ := unstructured.NestedString(lease.Object, "spec", "holderIdentity"); holder != "node-one" {
			t.Errorf("the lease is held by %q", holder)
		}
		_, err = c.Resource(schema.GroupVersionResource{Group: formerGroup, Version: "v1alpha1", Resource: "volumes"}).
			List(t.Context(), metav1.ListOptions{})
		if !apierrors.IsNotFound(err) {
			t.Errorf("the former group is still served: %v", err)
		}
		s.stop()
	}
	if len(versions) != 14 {
		t.Errorf("%d objects", len(versions))
	}
}

// TestFormerObjectsAreRefused: in a cluster with a database of others, the controller does not start beside objects of
// the former group.
func TestFormerObjectsAreRefused(t *testing.T) {
	s := serve(t, Options{Dir: t.TempDir()})
	today, err := readDefinitions()
	s.must(err)
	today = today[builtIn:]
	s.must(refuseFormerObjects(t.Context(), s.Config, today))

	cs, err := clientset.NewForConfig(s.Config)
	s.must(err)
	var former apixv1.CustomResourceDefinition
	s.must(json.Unmarshal(formerState(t)[definitionObjects+"settings.drover.io"], &former))
	former.ObjectMeta = metav1.ObjectMeta{Name: former.Name}
	crds := cs.ApiextensionsV1().CustomResourceDefinitions()
	s.must(applyDefinition(t.Context(), crds, &former))
	s.must(awaitEstablished(t.Context(), crds, map[string]bool{former.Name: true}))
	s.must(awaitDiscovery(t.Context(), cs.Discovery(), &former))
	s.must(refuseFormerObjects(t.Context(), s.Config, today)) // the definition alone is no harm

	c, err := dynamic.NewForConfig(s.Config)
	s.must(err)
	setting := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "drover.io/v1alpha1", "kind": "Setting",
		"metadata": map[string]any{"name": "replica-copy-rate-limit"}, "value": "7"}}
	_, err = c.Resource(schema.GroupVersionResource{Group: formerGroup, Version: "v1alpha1", Resource: "settings"}).
		Create(t.Context(), setting, metav1.CreateOptions{})
	s.must(err)
	err = refuseFormerObjects(t.Context(), s.Config, today)
	if !api.Is(err, api.InUse) || !strings.Contains(err.Error(), "settings.drover.io replica-copy-rate-limit") {
		t.Errorf("an object of the former group: %v", err)
	}
}
