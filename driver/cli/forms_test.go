package cli_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"drover.io/drover/api"
)

// TestListAndShowInEveryForm: list and show print every form known to -o, and refuse any other form.
func TestListAndShowInEveryForm(t *testing.T) {
	v := &api.Volume{Spec: api.VolumeSpec{Size: 10 << 20}}
	v.Name = "formed"
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceUpload}}
	img.Name = "formed-image"
	n := &api.Node{Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: "/formed/disk"}}}}
	n.Name = "formed-node"
	s := &api.Snapshot{Spec: api.SnapshotSpec{Volume: "formed"}}
	s.Name = "formed-snapshot"
	target := newTarget("formed-target")
	b := newBackup("formed-backup", "formed", "formed-target")
	for _, o := range []client.Object{v, img, n, s, target, b} {
		if err := store.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Delete(context.Background(), o) })
	}
	for line, name := range map[string]string{
		"volume list": "volume.storage.drover.io/formed", "volume show formed": "volume.storage.drover.io/formed",
		"image list": "backingimage.storage.drover.io/formed-image", "image show formed-image": "backingimage.storage.drover.io/formed-image",
		"snapshot list":                 "snapshot.storage.drover.io/formed-snapshot",
		"snapshot show formed-snapshot": "snapshot.storage.drover.io/formed-snapshot",
		"target list":                   "backuptarget.storage.drover.io/formed-target",
		"target show formed-target":     "backuptarget.storage.drover.io/formed-target",
		"backup list":                   "backup.storage.drover.io/formed-backup",
		"backup show formed-backup":     "backup.storage.drover.io/formed-backup",
		"node list":                     "node.storage.drover.io/formed-node", "node show formed-node": "node.storage.drover.io/formed-node",
		"disk list": "formed-node:/formed/disk",
		"version":   "", "preflight": "",
	} {
		say := func(form string) result {
			argv := append(strings.Split(line, " "), "-o", form)
			if name != "" {
				argv = kubeconfig(argv...)
			}
			return drover(t, argv...)
		}
		code := 0
		if line == "preflight" { // the code depends on the machine
			code = say("table").code
		}
		say("table").mustSay(t, code, strings.TrimPrefix(name, strings.SplitAfter(name, "/")[0]))
		say("name").mustSay(t, code, name)
		var got any
		r := say("json")
		if r.mustSay(t, code); json.Unmarshal([]byte(r.out), &got) != nil || got == nil {
			t.Errorf("%s -o json: %q", line, r.out)
		}
		got = nil
		r = say("yaml")
		if r.mustSay(t, code); yaml.Unmarshal([]byte(r.out), &got) != nil || got == nil || strings.HasPrefix(r.out, "{") {
			t.Errorf("%s -o yaml: %q", line, r.out)
		}
		say("xml").mustSay(t, 2, "table, wide, json, yaml or name")
	}
}
