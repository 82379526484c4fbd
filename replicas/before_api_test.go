package replicas

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/device"
)

// dataWithoutAPI is a data role before SetupData.
func dataWithoutAPI(t *testing.T) *Data {
	t.Helper()
	run := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- device.RunHolder(ctx, filepath.Join(run, "hold.sock")) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var host *device.Host
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C { // until the holder listens
		var err error
		if host, err = device.Open(ctx, run); err == nil {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal(err)
		}
	}
	d, err := NewData(DataOptions{Node: "a", Host: host, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestDropBeforeAPI: an engine that took its device up before the API is there, and has to drop a member, is told to
// ask again. Nothing is noted of a swap that was not asked for: the next process would need the API to begin at all.
func TestDropBeforeAPI(t *testing.T) {
	d := dataWithoutAPI(t)
	b := blob{Volume: "v", VolumeUID: api.NewUID(), Epoch: 3, Now: 3,
		Members: []memberSpec{{Name: "v-1", UID: api.NewUID(), Node: "a"}, {Name: "v-2", UID: api.NewUID(), Node: "b"}}}
	thread, err := d.Threads.Pick()
	if err != nil {
		t.Fatal(err)
	}
	s := d.newSession(b, thread, nil)
	if err := d.dropper(s)(context.Background(), 3, string(b.Members[1].UID)); !api.Is(err, api.Unavailable) {
		t.Errorf("a drop without the API: %v", err)
	}
	if now := s.snapshotBlob(); now.Next != 0 || len(now.Members) != 2 {
		t.Errorf("what is kept with the device: %+v", now)
	}
}

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
