package engine

import (
	"context"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// tracked is a mirror that calls track in Track: Join has by then made the mirror as long as the volume.
type tracked struct {
	mirror
	track func() error
}

func (m *tracked) Track(context.Context, bool) error { return m.track() }

// TestExpandWhileAReplicaJoins: a volume grows while a replica joins, before and after the replica gets all writes. In
// the end the replica is as long as the other members.
func TestExpandWhileAReplicaJoins(t *testing.T) {
	for _, early := range []bool{true, false} {
		r := newRig(t, 2, func(c *Config) {
			for i, m := range c.Members {
				m.Member.(*memory).auto = true
				c.Members[i].Member = mirror{memory: m.Member.(*memory)}
			}
			c.Add = func(context.Context, int64, string) error { return nil }
		})
		grow := func() error { return r.e.Expand(t.Context(), 2*testSize) }
		late := &memory{t: t, data: make([]byte, testSize), auto: true}
		m := &tracked{mirror{late, make(chan struct{})}, func() error { return nil }}
		if early {
			m.track = grow
		}
		joined := make(chan error, 1)
		go func() {
			_, err := r.e.Join(t.Context(), Named{Name: "late", Member: m}, JoinOptions{})
			joined <- err
		}()
		select {
		case <-m.digests: // the replica gets all writes from now on
		case err := <-joined:
			t.Fatal(err)
		}
		if !early {
			if err := grow(); err != nil {
				t.Fatal(err)
			}
		}
		is(t, r.start(block.OpWrite, 2*testSize-4096, fill(4096, 7), 0), nil)
		for going := true; going; {
			select {
			case <-m.digests:
			case err := <-joined:
				if going = false; err != nil {
					t.Fatal(err)
				}
			}
		}
		r.m = append(r.m, late)
		for i, m := range r.m {
			if len(m.data) != 2*testSize || m.data[2*testSize-1] != 7 {
				t.Fatalf("early %v: member %d has %d bytes", early, i, len(m.data))
			}
		}
		r.close()
	}
}

// lengthy is a member that records its size.
type lengthy struct {
	*memory
	size *int64
}

func (m lengthy) Expand(_ context.Context, size int64) error {
	*m.size = size
	return nil
}

// TestExpandWhileAMemberIsDropped: a member with a proposed drop may serve again if the other members fail. A volume
// does not grow without the member before the drop.
func TestExpandWhileAMemberIsDropped(t *testing.T) {
	var sizes [2]int64
	r := newRig(t, 2, func(c *Config) {
		for i, m := range c.Members {
			m.Member.(*memory).auto = true
			c.Members[i].Member = lengthy{m.Member.(*memory), &sizes[i]}
		}
	})
	r.e.Suspect("b", errAway)
	if name := within(t, "drop that is asked for", r.drops); name != "b" { // the answer is to come
		t.Fatal(name)
	}
	if err := r.e.Expand(t.Context(), 2*testSize); !api.Is(err, api.Busy) && sizes[1] != 2*testSize {
		t.Errorf("it grew without b: %v, %v", sizes, err)
	}
	if size, err := r.e.volumeSize(t.Context()); err != nil || size != testSize {
		t.Errorf("the volume has %d bytes, %v", size, err)
	}
	r.settle <- nil
	within(t, "word of a drop", r.dropped)
	for range 1000 {
		err := r.e.Expand(t.Context(), 2*testSize)
		if err == nil {
			break
		}
		if !api.Is(err, api.Busy) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	if size, err := r.e.volumeSize(t.Context()); err != nil || size != 2*testSize {
		t.Errorf("without b the volume has %d bytes, %v", size, err)
	}
}
