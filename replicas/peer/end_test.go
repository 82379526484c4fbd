package peer

import (
	"testing"
	"time"

	"drover.io/drover/api"
)

// holding are frames after which a session keeps requests or calls waiting until the replica's cut ends.
var holding = []struct {
	name  string
	calls []string
	write bool
}{
	{"a write beside a hold", []string{"hold\n{}"}, true},
	{"digests beside a hold", []string{"hold\n{}", "digests\n" + `{"Off":0,"N":4096}`}, false},
	{"a note beside a prepared cut", []string{"prepare-cut\n" + `{"layer":"` + string(api.NewUID()) + `"}`, "note\n{}"}, false},
}

// pause lets other goroutines continue.
func pause(d time.Duration) {
	t := time.NewTimer(d)
	<-t.C
}

// hold has a client adopt a session and send such frames.
func (f *far) hold(t *testing.T, calls []string, write bool) *greedy {
	t.Helper()
	g := dialGreedy(t, f)
	g.say(header{kind: kindHello}, hello{Version: Version, MinVersion: minVersion, Node: "greedy"})
	g.next()
	g.say(header{kind: kindOpen, session: 1, id: 1}, openRequest{f.uid, f.volume})
	g.next()
	g.say(header{kind: kindAdopt, session: 1, id: 2}, adoption{1, 1, []string{f.uid}})
	g.next()
	for i, call := range calls {
		if err := writeControl(g.nc, header{kind: kindCall, session: 1, id: uint64(3 + i)}, []byte(call)); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			g.next()
		}
	}
	if write {
		if err := writeControl(g.nc, header{kind: kindWrite, session: 1, id: 9, n: 4096}, make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
	}
	pause(200 * time.Millisecond)
	return g
}

// TestServerEndsBesideACut: the server ends while an engine is in the middle of a cut, with waiting I/O and calls.
func TestServerEndsBesideACut(t *testing.T) {
	for _, c := range holding {
		t.Run(c.name, func(t *testing.T) {
			f := newFar(t, testSize, nil)
			f.hold(t, c.calls, c.write)
			s, ended := f.s, make(chan struct{})
			go func() { s.Close(); close(ended) }()
			late := time.NewTimer(time.Minute)
			defer late.Stop()
			select {
			case <-ended:
			case <-late.C:
				t.Error("the server does not end")
				_ = s.Release(f.uid)
				<-ended
			}
		})
	}
}

// TestReplicaIsClosedAfterACut: an engine disappears in the middle of a cut. The server closes the replica after the
// linger.
func TestReplicaIsClosedAfterACut(t *testing.T) {
	for _, c := range holding {
		t.Run(c.name, func(t *testing.T) {
			f := newFar(t, testSize, nil)
			_ = f.hold(t, c.calls, c.write).nc.Close()
			for began := time.Now(); f.s.Serves(f.uid); pause(10 * time.Millisecond) {
				if time.Since(began) > time.Minute {
					t.Error("the replica stays open")
					_ = f.s.Release(f.uid)
				}
			}
		})
	}
}
