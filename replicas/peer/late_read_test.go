package peer

import (
	"context"
	"encoding/json"
	"errors"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// newStuckSnapshot serves a replica with a snapshot on a stuck disk to a client with session 1.
func newStuckSnapshot(t *testing.T) (f *far, g *greedy, d *stuckDisk, b *Backend, uid string) {
	t.Helper()
	d = &stuckDisk{}
	opened := make(chan *Backend, 1)
	f = newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = d.open(func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			r, l, err := open(ctx, uid, volume)
			if err == nil {
				opened <- r.(*Backend)
			}
			return r, l, err
		})
	})
	t.Cleanup(d.resume) // before the end of the server
	s := newSnapshot("s")
	s.Layer = string(api.NewUID())
	raw, err := json.Marshal(sealArgs{s})
	if err != nil {
		t.Fatal(err)
	}
	g = f.hold(t, []string{"seal\n" + string(raw)}, false)
	return f, g, d, <-opened, s.UID
}

// readFrame is a call that reads the first block of a snapshot.
func readFrame(t *testing.T, uid string) string {
	t.Helper()
	raw, err := json.Marshal(snapArgs{uid, 0, block.Size})
	if err != nil {
		t.Fatal(err)
	}
	return "snap-read\n" + string(raw)
}

func (s *seen) isOpen() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.src != nil
}

// TestLateReadLeavesNoSnapshotOpen: the read of a snapshot runs after its engine has ended the snapshot, or after the
// next session has. The replica does not keep the snapshot open, so the replica can merge its layers. In the same
// session the read succeeds: other work of the engine may have ended the snapshot.
func TestLateReadLeavesNoSnapshotOpen(t *testing.T) {
	for name, end := range map[string]func(g *greedy, f *far){
		"by its session": func(g *greedy, f *far) { g.call(10, "snap-end\n{}") },
		"by the next session": func(g *greedy, f *far) {
			g.say(header{kind: kindOpen, session: 2, id: 11}, openRequest{f.uid, f.volume})
			g.next()
			g.say(header{kind: kindAdopt, session: 2, id: 12}, adoption{1, 2, []string{f.uid}})
			g.next()
			if err := writeControl(g.nc, header{kind: kindCall, session: 2, id: 10}, []byte("snap-end\n{}")); err != nil {
				g.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f, g, d, b, uid := newStuckSnapshot(t)
			g.call(8, readFrame(t, uid))
			if err := g.answer(); err != nil || !b.seen.isOpen() {
				t.Fatalf("the read in time: %v", err)
			}
			d.hang("snap-read")
			g.call(9, readFrame(t, uid))
			d.awaitHang("snap-read")
			end(g, f)
			if h, _ := g.next(); h.id != 10 {
				t.Fatalf("the answer to request %d", h.id)
			}
			d.resume()
			if err := g.answer(); (err == nil) != (name == "by its session") {
				t.Errorf("the late read: %v", err)
			}
			if b.seen.isOpen() {
				t.Error("the replica keeps the snapshot open")
			}
		})
	}
}

// TestSnapshotIsNotOpenedAfterItsEnd: a replica opens no snapshot for a call whose context has ended, and none after its
// Close.
func TestSnapshotIsNotOpenedAfterItsEnd(t *testing.T) {
	f, loop := newFar(t, testSize, nil), startLoop(t)
	r, err := f.disk.OpenReplica(t.Context(), f.uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	b := NewBackend(r, loop)
	s := stack.Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}
	if err := errors.Join(b.Adopt(t.Context(), 1, 1, []string{f.uid}), b.Seal(t.Context(), s)); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	read := func(block.Source) error { return nil }
	if err := b.withSnapshot(ended, s.UID, read); !api.Is(err, api.Unavailable) || b.seen.isOpen() {
		t.Errorf("a call whose engine has left: %v", err)
	}
	if err := b.openSnapshot(ended, s.UID); err != nil || b.seen.isOpen() { // after readSnapshot
		t.Errorf("a call whose engine leaves just now: %v", err)
	}
	if err := b.withSnapshot(t.Context(), s.UID, read); err != nil {
		t.Error(err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if err := b.withSnapshot(t.Context(), s.UID, read); !errors.Is(err, errClosed) || b.seen.isOpen() {
		t.Errorf("a call of a closed replica: %v", err)
	}
	if err := b.openSnapshot(t.Context(), s.UID); err != nil || b.seen.isOpen() {
		t.Errorf("a call of a replica that closes just now: %v", err)
	}
}
