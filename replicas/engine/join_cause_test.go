package engine

import (
	"context"
	"strings"
	"syscall"
	"testing"

	"drover.io/drover/block"
)

// TestDropAfterAJoinNamesItsCause: a write to a replica fails while the swap makes the replica a member. The engine drops
// the new member, and says why.
func TestDropAfterAJoinNamesItsCause(t *testing.T) {
	swaps, goOn, why := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	r := newRig(t, 1, func(c *Config) {
		c.Members[0].Member.(*memory).auto = true
		c.Members[0].Member = mirror{memory: c.Members[0].Member.(*memory)}
		c.Track = true
		c.Add = func(context.Context, int64, string) error { close(swaps); <-goOn; return nil }
		c.OnDrop = func(_ string, err error) { why <- err }
		c.Drop = func(context.Context, int64, string) error { return nil }
	})
	late := mirror{memory: &memory{t: t, data: make([]byte, testSize), auto: true}}
	joined := make(chan error, 1)
	go func() {
		_, err := r.e.Join(t.Context(), Named{Name: "late", Member: late}, JoinOptions{})
		joined <- err
	}()
	within(t, "swap", swaps)
	r.l.do(func() { late.fail = func(*block.Request) error { return syscall.EIO } })
	write := r.start(block.OpWrite, 0, fill(4096, 1), 0)
	close(goOn)
	if err := within(t, "join", joined); err != nil {
		t.Fatal(err)
	}
	is(t, write, nil)
	if err := within(t, "drop", why); !strings.Contains(err.Error(), syscall.EIO.Error()) {
		t.Errorf("the cause of the drop: %v", err)
	}
	r.close()
}
