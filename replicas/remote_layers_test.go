package replicas

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
)

// TestImageOfAnotherDiskIsReadThere: a node still copies an image to a volume's disk. The volume is attached at once
// and reads another disk's copy, also after a restart of the data process, and needs the other disk no more once its
// own disk has a copy.
func TestImageOfAnotherDiskIsReadThere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWorld(t, filepath.Join(dir, "near"), filepath.Join(dir, "far"))
	var n api.Node
	n.Name = testNode
	await(w, &n, &api.NodeList{}, "ready", func(n *api.Node) bool {
		return len(n.Status.Disks) == 2 && n.Status.Disks[0].Ready && n.Status.Disks[1].Ready
	})
	disk := map[string]api.UID{}
	for _, d := range n.Status.Disks {
		disk[filepath.Base(d.Path)] = d.UID
	}
	layer := api.NewUID()
	img := &api.BackingImage{ObjectMeta: named("debian"), Spec: api.BackingImageSpec{SourceType: api.SourceFile}}
	w.create(img)
	editStatus(w, img, func(i *api.BackingImage) {
		i.Status = api.BackingImageStatus{UUID: api.NewUID(), Layers: []api.UID{layer}, State: api.ImageReady,
			VirtualSize: 32 * mib}
	})
	data := bytes.Repeat([]byte("golden!!"), mib/8)
	put := func(where string) {
		t.Helper()
		on, err := w.disks.Layers(disk[where])
		if err != nil {
			t.Fatal(err)
		}
		lw, err := on.Create(w.ctx, string(layer), 32*mib)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := lw.WriteAt(data, 5*mib); err != nil {
			t.Fatal(err)
		}
		if _, _, err := lw.Seal(w.ctx); err != nil {
			t.Fatal(err)
		}
	}
	copies := map[string]*api.ImageCopy{}
	state := func(where string, s api.ImageState) {
		t.Helper()
		c := copies[where]
		if c == nil {
			c = &api.ImageCopy{ObjectMeta: named("copy-" + where), Spec: api.ImageCopySpec{Image: "debian",
				UUID: img.Status.UUID, Layers: img.Status.Layers, Node: testNode, Disk: disk[where]}}
			w.create(c)
			copies[where] = c
		}
		editStatus(w, c, func(c *api.ImageCopy) { c.Status.State = s })
	}
	state("near", api.ImageInProgress)
	put("far")
	state("far", api.ImageReady)

	vol := volume("v1", 64*mib)
	vol.Spec.BackingImage, vol.Spec.DiskSelector = "debian", []string{"near"}
	w.create(vol)
	w.volumeState("v1", api.VolumeDetached)
	w.create(attachment("v1"))
	a := w.attached("v1")
	checkDevice(t, a.Status.Device, 5*mib, data)
	var r api.Replica
	r.Name = w.volumeState("v1", api.VolumeAttached).Status.Members[0]
	await(w, &r, &api.ReplicaList{}, "reading there", func(r *api.Replica) bool {
		return r.Spec.Disk == disk["near"] && strings.Contains(r.Status.Message, "reads layers from disk")
	})
	own := bytes.Repeat([]byte("own data"), mib/8)
	writeDevice(t, a.Status.Device, 6*mib, own)
	w.stopData()
	w.startData()
	w.sh("blockdev --flushbufs " + a.Status.Device)
	checkDevice(t, a.Status.Device, 5*mib, data)
	checkDevice(t, a.Status.Device, 6*mib, own)

	put("near")
	state("near", api.ImageReady)
	await(w, &r, &api.ReplicaList{}, "at home", func(r *api.Replica) bool { return r.Status.Message == "" })
	if err := os.RemoveAll(filepath.Join(dir, "far", "layers")); err != nil {
		t.Fatal(err)
	}
	w.sh("blockdev --flushbufs " + a.Status.Device)
	checkDevice(t, a.Status.Device, 5*mib, data)
	checkDevice(t, a.Status.Device, 6*mib, own)
}

// TestResumeOfAReplicaThatReadsAnotherDisk: before the API answers, a process resumes a device whose replica reads
// layers of another disk. The process knows the disk from the record of the hydrating layer; without such a record,
// as from an older version, from the device record.
func TestResumeOfAReplicaThatReadsAnotherDisk(t *testing.T) {
	t.Parallel()
	for _, older := range []bool{false, true} {
		t.Run(fmt.Sprintf("older=%v", older), func(t *testing.T) {
			t.Parallel()
			w, disk := twoDisks(t)
			w.set("replica-copy-rate-limit", "1")
			w.on("a", "near", 64*mib)
			w.create(attachment("a"))
			data := pattern(56 * mib)
			writeDevice(t, w.attached("a").Status.Device, 0, data)
			w.detach("a")
			w.begin("b", "vol://a", "far", "", 64*mib)
			w.volumeState("b", api.VolumeDetached)
			w.create(attachment("b"))
			dev := w.attached("b").Status.Device
			checkDevice(t, dev, 0, data[:mib])
			near, err := w.disks.Get(disk["near"])
			if err != nil {
				t.Fatal(err)
			}
			far, err := w.disks.Get(disk["far"])
			if err != nil {
				t.Fatal(err)
			}
			spec := w.data.attachments.Session("b").Device().Spec()
			if bytes.Contains(spec.Blob, []byte("lenders")) {
				t.Fatalf("the device record has lenders: %s", spec.Blob)
			}
			if older {
				var was map[string]any
				if err := json.Unmarshal(spec.Blob, &was); err != nil {
					t.Fatal(err)
				}
				was["lenders"] = []map[string]any{{"disk": disk["near"], "path": near.Path()}}
				raw, err := json.Marshal(was)
				if err == nil {
					err = w.host.SetBlob(spec.Key, raw)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			w.stopData()
			if older {
				if err := os.RemoveAll(filepath.Join(far.Path(), "hydrating")); err != nil {
					t.Fatal(err)
				}
			}
			if w.host, err = device.Open(w.ctx, filepath.Join(w.dir, "run")); err != nil {
				t.Fatal(err)
			}
			w.data, err = NewData(DataOptions{Node: testNode, Host: w.host, Log: w.log, Heartbeat: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			w.resumes(w.data)
			w.sh("blockdev --flushbufs " + dev)
			read := make(chan error, 1)
			go func() {
				f, err := os.Open(dev)
				if err != nil {
					read <- err
					return
				}
				got := make([]byte, len(data)-40*mib)
				if _, err = f.ReadAt(got, 40*mib); err == nil && !bytes.Equal(got, data[40*mib:]) {
					err = errors.New("it reads something else")
				}
				read <- errors.Join(err, f.Close())
			}()
			select {
			case err := <-read:
				if err != nil {
					t.Error(err)
				}
				w.loops()
			case <-time.After(time.Minute):
				t.Error("a read waits for the API")
				w.loops()
				<-read
			}
			w.set("replica-copy-rate-limit", "0")
			await(w, w.memberOf("b"), &api.ReplicaList{}, "at home", func(r *api.Replica) bool {
				return !r.Status.Pinned && r.Status.Copy == nil && r.Status.Message == ""
			})
			at := filepath.Join(near.Path(), "layers")
			if err := os.Rename(at, at+".away"); err != nil { // a merge may be at work there
				t.Fatal(err)
			}
			w.sh("blockdev --flushbufs " + dev)
			checkDevice(t, dev, 0, data)
		})
	}
}
