package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestManyVolumes makes volumes with three replicas on images, attaches a tenth of the volumes on two nodes, and the
// third node dies and returns under writes: no rebuild is a full rebuild. In the end all objects are deleted, and
// nothing is left on the disks. DROVER_MANY is the number of volumes (`make test-many`: 250).
func TestManyVolumes(t *testing.T) {
	many := suite.Count(t, "DROVER_MANY", 0, 50)
	if many == 0 {
		t.Skip("DROVER_MANY=n makes n volumes; DROVER_TEST=all makes 50")
	}
	images, used := max(2, many/25), max(3, many/10)
	c := start(t, Options{Nodes: 3})
	began := time.Now()
	tell := func(format string, args ...any) {
		t.Logf("%6.1f s  "+format, append([]any{time.Since(began).Seconds()}, args...)...)
	}
	const imageSize, size, part = 4 << 20, 16 << 20, 256 << 10
	url := servePattern(t, c, imageSize)
	image := func(i int) string { return fmt.Sprintf("image-%d", i%images) }
	for i := range images {
		c.command(t, "image", "import", url, "--name", image(i))
	}
	tell("%d images", images)
	name := func(i int) string { return fmt.Sprintf("v-%d", i) }
	for i := range many {
		v := &api.Volume{Spec: api.VolumeSpec{Size: size, NumberOfReplicas: 3, BackingImage: image(i)}}
		v.Name = name(i)
		must(t, c.Objects.Create(t.Context(), v))
	}
	all := func(what string) {
		t.Helper()
		for i := range many {
			awaitVolume(t, c, name(i), what, whole)
		}
	}
	all("made")
	tell("%d volumes with three replicas", many)

	devices := make([]string, used)
	var wg sync.WaitGroup
	errs := make([]error, used)
	for i := range used {
		wg.Go(func() {
			_, err := c.try(t, "volume", "attach", name(i), "--node", c.Nodes[i%2].Name)
			var a api.Attachment
			errs[i] = errors.Join(err, c.Objects.Get(t.Context(), client.ObjectKey{Name: name(i)}, &a))
			devices[i] = a.Status.Device
		})
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	content := func(i, round int) []byte { return bytes.Repeat(fmt.Appendf(nil, "%07d.%07d\n", i, round), part/16) }
	write := func(round int) {
		t.Helper()
		for i, dev := range devices {
			f, err := os.OpenFile(dev, os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteAt(content(i, round), int64(imageSize/2+round*part))
			must(t, errors.Join(err, f.Sync(), f.Close()))
		}
	}
	write(0)
	tell("%d of them attached and written", used)

	rebuilt := func(what string) (sum float64) {
		for i := range used {
			sum += c.metric(t, c.Nodes[i%2], `drover_volume_rebuild`+what+`,process="data",volume="`+name(i)+`"`)
		}
		return sum
	}
	fulls := rebuilt(`s_total{kind="full"`)
	lost := c.Nodes[2]
	must(t, lost.PowerOff())
	write(1)
	for i := range used {
		awaitVolume(t, c, name(i), "without the node that is lost", func(v *api.Volume) bool {
			return len(v.Status.Members) == 2
		})
	}
	tell("%s is lost, and all that are attached were written without it", lost.Name)
	must(t, lost.PowerOn())
	must(t, lost.Serve(t.Context()))
	all("whole again")
	tell("whole again")
	if n := rebuilt(`s_total{kind="full"`) - fulls; n != 0 {
		t.Errorf("%v replicas were made anew", n)
	}
	write(2)
	for i, dev := range devices {
		f, err := os.Open(dev)
		must(t, err)
		must(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		for round := range 3 {
			got := make([]byte, part)
			_, err := f.ReadAt(got, int64(imageSize/2+round*part))
			must(t, err)
			if !bytes.Equal(got, content(i, round)) {
				t.Errorf("volume %s lost what was written in round %d", name(i), round)
			}
		}
		must(t, f.Close())
		checkPattern(t, dev, 0, imageSize/2)
	}

	for i := range used {
		wg.Go(func() { _, errs[i] = c.try(t, "volume", "detach", name(i)) })
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	tell("all detached")
	for i := range many {
		must(t, c.Objects.Delete(t.Context(), &api.Volume{ObjectMeta: metav1.ObjectMeta{Name: name(i)}}))
	}
	eventually(t, "all volumes are gone", func() bool {
		var volumes api.VolumeList
		var replicas api.ReplicaList
		must(t, errors.Join(c.Objects.List(t.Context(), &volumes), c.Objects.List(t.Context(), &replicas)))
		return len(volumes.Items)+len(replicas.Items) == 0
	})
	tell("all volumes deleted")
	for i := range images {
		must(t, c.Objects.Delete(t.Context(), &api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: image(i)}}))
	}
	var paths []string
	defer func() {
		if t.Failed() {
			t.Log(strings.Join(paths, "\n"))
		}
	}()
	eventually(t, "nothing is left on the disks", func() bool {
		paths = nil
		for _, m := range c.Nodes {
			for _, folder := range []string{"replicas", "layers", "images"} {
				found, err := filepath.Glob(m.Disks[0].View(folder, "*"))
				must(t, err)
				paths = append(paths, found...)
			}
		}
		return len(paths) == 0
	})
	tell("all deleted, nothing left")
}
