package replicas

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// TestManyVolumes attaches a hundred volumes at a time: more loop devices than a kernel begins with.
func TestManyVolumes(t *testing.T) {
	w := newWorld(t)
	n := suite.Count(t, "DROVER_MANY", 20, 100)
	name := func(i int) string { return fmt.Sprintf("m%d", i) }
	began := time.Now()
	for i := range n {
		w.create(volume(name(i), 16*mib), attachment(name(i)))
	}
	devices := map[string]bool{}
	for i := range n {
		a := await(w, attachment(name(i)), &api.AttachmentList{}, "ready",
			func(a *api.Attachment) bool { return a.Status.Ready })
		devices[a.Status.Device] = true
		writeDevice(t, a.Status.Device, 0, bytes.Repeat([]byte{byte(i)}, 8192))
	}
	t.Logf("%d volumes created, attached and written in %v; resident %s", len(devices),
		time.Since(began).Round(time.Millisecond), resident())
	if len(devices) != n {
		t.Fatalf("%d devices for %d volumes", len(devices), n)
	}
	w.stopData()
	began = time.Now()
	w.startData()
	t.Logf("taken up by a new data role in %v", time.Since(began).Round(time.Millisecond))
	for i := range n {
		a := w.attached(name(i))
		checkDevice(t, a.Status.Device, 0, bytes.Repeat([]byte{byte(i)}, 8192))
		w.remove(a)
	}
	for i := range n {
		gone(w, attachment(name(i)), &api.AttachmentList{})
		w.remove(volume(name(i), 0))
	}
	for i := range n {
		gone(w, volume(name(i), 0), &api.VolumeList{})
	}
	w.nothingLeft()
}

func resident() string {
	raw, _ := os.ReadFile("/proc/self/status")
	_, rest, _ := strings.Cut(string(raw), "VmRSS:")
	line, _, _ := strings.Cut(rest, "\n")
	return strings.TrimSpace(line)
}
