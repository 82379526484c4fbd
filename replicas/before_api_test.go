package replicas

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"drover.io/drover/replicas/device"
)

// TestResumeIsRepeatedBeforeTheAPIAnswers: a device whose disk does not exist when the data process starts is resumed
// once the disk is back, while the API is away.
func TestResumeIsRepeatedBeforeTheAPIAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.make("v1", 16*mib)
	w.create(attachment("v1"))
	f, err := os.OpenFile(w.attached("v1").Status.Device, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w.stopData()
	disk := filepath.Join(w.dir, "disk")
	if err := os.Rename(disk, disk+".away"); err != nil {
		t.Fatal(err)
	}
	if w.host, err = device.Open(w.ctx, filepath.Join(w.dir, "run")); err != nil {
		t.Fatal(err)
	}
	if w.data, err = NewData(DataOptions{Node: testNode, Host: w.host, Log: w.log}); err != nil {
		t.Fatal(err)
	}
	w.lost = true
	w.resumes(w.data)
	w.lost = false
	if err := os.Rename(disk+".away", disk); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	wrote := make(chan error, 1)
	go func() {
		_, err := f.WriteAt(data, mib)
		wrote <- err
	}()
	select {
	case err = <-wrote:
	case <-w.ctx.Done():
		err = w.ctx.Err()
	}
	w.loops()
	if err != nil {
		t.Fatal(err)
	}
	checkDevice(t, f.Name(), mib, data)
}
