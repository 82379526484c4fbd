package peer

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
)

// refusing is a replica that refuses every session.
type refusing struct {
	*Backend
	slow bool // the answer comes after the engine has left
}

func (r *refusing) AdoptFor(ctx context.Context, _ string, _, _ int64, _ []string) error {
	if r.slow {
		time.Sleep(500 * time.Millisecond)
	}
	return api.Errorf(api.Unavailable, "the disk is busy")
}

// TestRefusedSessionIsEnded: a replica is opened for an engine and does not adopt the session. The engine continues
// without the replica. The server closes the replica, although the connection lives: other volumes use it.
func TestRefusedSessionIsEnded(t *testing.T) {
	for name, slow := range map[string]bool{"refused": false, "given up": true} {
		t.Run(name, func(t *testing.T) {
			f := newFar(t, testSize, func(o *ServerOptions) {
				open := o.Open
				o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
					r, loop, err := open(ctx, uid, volume)
					if err != nil {
						return nil, nil, err
					}
					return &refusing{r.(*Backend), slow}, loop, nil
				}
			})
			m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if !slow {
				ctx = t.Context()
			}
			if err := m.Adopt(ctx, 1, 1, []string{f.uid}); !api.Is(err, api.Unavailable) {
				t.Fatal(err)
			}
			_ = m.Close()
			for began := time.Now(); f.s.Serves(f.uid); time.Sleep(10 * time.Millisecond) {
				if time.Since(began) > 20*time.Second {
					t.Fatal("the replica stays open, and no engine uses it")
				}
			}
		})
	}
}

// TestSessionThatOpensLateIsEnded: the engine gives a probe up while the server opens the replica. The server closes
// the replica after the open.
func TestSessionThatOpensLateIsEnded(t *testing.T) {
	goOn, opened := make(chan struct{}), make(chan struct{})
	f := newFar(t, testSize, func(o *ServerOptions) {
		open := o.Open
		o.Open = func(ctx context.Context, uid, volume string) (Replica, Loop, error) {
			<-goOn
			defer close(opened)
			return open(ctx, uid, volume)
		}
	})
	m := member(t, newDialer(t, f.at), f, startLoop(t), nil)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, _, err := m.Probe(ctx); !api.Is(err, api.Unavailable) {
		t.Fatal(err)
	}
	_ = m.Close()
	time.Sleep(100 * time.Millisecond) // the server has read the end by now
	close(goOn)
	within(t, "open", opened)
	time.Sleep(100 * time.Millisecond)
	for began := time.Now(); f.s.Serves(f.uid); time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 20*time.Second {
			t.Fatal("the replica stays open, and no engine uses it")
		}
	}
}
