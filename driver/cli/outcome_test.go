package cli_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
)

// told creates a node with a disk, and volumes.
func told(t *testing.T, node string, volumes ...string) {
	t.Helper()
	n := &api.Node{Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: "/" + node}}}}
	n.Name = node
	objects := []client.Object{n}
	for _, name := range volumes {
		v := &api.Volume{Spec: api.VolumeSpec{Size: 10 << 20}}
		v.Name = name
		objects = append(objects, v)
	}
	for _, o := range objects {
		if err := store.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Delete(context.Background(), o) })
	}
}

// TestOutcomesInEveryForm: commands without an object to show print the outcome in every form known to -o.
func TestOutcomesInEveryForm(t *testing.T) {
	told(t, "told", "told-1", "told-2", "told-3")
	for _, c := range []struct {
		line, kind, name, node, result, typed string
	}{
		{"node set told --tags a", "Node", "told", "", "set", "node.storage.drover.io/told"},
		{"node drain told --undo", "Node", "told", "", "is in use again", "node.storage.drover.io/told"},
		{"volume detach told-1", "Volume", "told-1", "", "was not attached", "volume.storage.drover.io/told-1"},
		{"disk evict /told --undo", "Disk", "/told", "told", "is in use again", "told:/told"},
	} {
		say := func(form string) string {
			r := drover(t, kubeconfig(append(strings.Split(c.line, " "), "-o", form)...)...)
			r.mustSay(t, 0)
			return r.out
		}
		if out := say("name"); out != c.typed+"\n" {
			t.Errorf("%s -o name: %q", c.line, out)
		}
		if out := say("table"); !strings.Contains(out, c.result) || strings.Contains(out, "{") {
			t.Errorf("%s: %q", c.line, out)
		}
		for form, read := range map[string]func([]byte, any) error{"json": json.Unmarshal,
			"yaml": func(b []byte, v any) error { return yaml.Unmarshal(b, v) }} {
			var got struct{ Kind, Name, Node, Result string }
			if err := read([]byte(say(form)), &got); err != nil || got.Kind != c.kind || got.Name != c.name ||
				got.Node != c.node || got.Result != c.result {
				t.Errorf("%s -o %s: %+v, %v", c.line, form, got, err)
			}
		}
	}
	r := drover(t, kubeconfig("volume", "delete", "told-1", "told-2", "-o", "yaml")...)
	r.mustSay(t, 0)
	docs := strings.Split(r.out, "---\n")
	if len(docs) != 2 || !strings.Contains(docs[0], "name: told-1\n") || !strings.Contains(docs[1], "name: told-2\n") {
		t.Errorf("two names as yaml: %q", r.out)
	}
	drover(t, kubeconfig("volume", "delete", "told-3", "-o", "xml")...).mustSay(t, 2, "table, wide, json, yaml or name")
	drover(t, kubeconfig("volume", "show", "told-3")...).mustSay(t, 0) // and nothing was done
}

// TestNodesAreChangedBesideTheirStatus: commands change a node's spec while the node writes the status all the time,
// and report no conflict.
func TestNodesAreChangedBesideTheirStatus(t *testing.T) {
	told(t, "beating")
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			n := &api.Node{}
			n.Name = "beating"
			beat := fmt.Appendf(nil, `{"status":{"kernel":"%d"}}`, i)
			if err := store.Status().Patch(t.Context(), n, client.RawPatch(types.MergePatchType, beat)); err != nil {
				ended <- err
				return
			}
		}
	}()
	for i := range 10 {
		drover(t, kubeconfig("node", "set", "beating", "--tags", fmt.Sprint("t", i))...).mustSay(t, 0)
		drover(t, kubeconfig("disk", "evict", "/beating")...).mustSay(t, 0)
		drover(t, kubeconfig("disk", "evict", "/beating", "--undo")...).mustSay(t, 0)
	}
	close(stop)
	if err := within(t, "end of the beats", ended); err != nil {
		t.Error(err)
	}
	var n api.Node
	if err := store.Get(t.Context(), client.ObjectKey{Name: "beating"}, &n); err != nil ||
		len(n.Spec.Tags) != 1 || n.Spec.Tags[0] != "t9" || n.Spec.Disks[0].EvictionRequested {
		t.Errorf("%v, %+v", err, n.Spec)
	}
}
