package replicas

import (
	"context"
	"log/slog"
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
	thread, err := d.threads.Pick()
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
