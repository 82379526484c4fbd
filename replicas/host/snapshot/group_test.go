package snapshot

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// fakeCut is a cut of a volume whose I/O, or disk, may hang.
type fakeCut struct {
	stirs bool          // requests in progress do not end
	hangs chan struct{} // the disk hangs until hangs is closed; nil: no hang
	held  bool
	done  bool
}

func (c *fakeCut) Hold(ctx context.Context) error {
	if c.held = true; !c.stirs {
		return nil
	}
	<-ctx.Done()
	return api.Errorf(api.Busy, "it is under way: %w", ctx.Err())
}

func (c *fakeCut) Commit(context.Context) error {
	if c.hangs != nil {
		<-c.hangs
	}
	c.done = true
	return nil
}

func (c *fakeCut) LetGo()   { c.held = false }
func (c *fakeCut) Release() { c.held = false }
func (c *fakeCut) Abort()   {}

func groupOf(cuts ...*fakeCut) (parts []*groupPart, all []cutting) {
	for _, c := range cuts {
		parts, all = append(parts, &groupPart{vol: &api.Volume{}}), append(all, c)
	}
	return parts, all
}

// TestGroupBesideIOThatHangs: the other volumes of a group do not wait longer than longestHeld for a volume whose I/O
// hangs, and the group releases all volumes together.
func TestGroupBesideIOThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, c := &fakeCut{}, &fakeCut{stirs: true}, &fakeCut{}
		parts, cuts := groupOf(a, b, c)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		began := time.Now()
		if err := cutTogether(ctx, parts, cuts, func() error { return nil }); !api.Is(err, api.Busy) {
			t.Errorf("the group is cut: %v", err)
		}
		if took := time.Since(began); took > longestHeld {
			t.Errorf("the others were held for %v", took)
		}
		if a.held || b.held || c.held {
			t.Error("a volume is still held")
		}
		if a.done || b.done || c.done {
			t.Error("a volume is cut alone")
		}
		b.stirs = false
		tooLate := errors.New("too late")
		if err := cutTogether(ctx, parts, cuts, func() error { return tooLate }); !errors.Is(err, tooLate) || a.done || a.held {
			t.Errorf("it was to be given up: %v", err)
		}
		if err := cutTogether(ctx, parts, cuts, func() error { return nil }); err != nil || !a.done || !b.done || !c.done {
			t.Errorf("the next try: %v", err)
		}
	})
}

// TestGroupBesideADiskThatHangs: a volume of a group continues once the volume is cut, while the disk of another
// volume hangs.
func TestGroupBesideADiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := &fakeCut{}, &fakeCut{hangs: make(chan struct{})}
		parts, cuts := groupOf(a, b)
		ended := make(chan error, 1)
		go func() { ended <- cutTogether(t.Context(), parts, cuts, func() error { return nil }) }()
		synctest.Wait()
		if !a.done || a.held {
			t.Error("a volume that is cut is held, as another one's disk hangs")
		}
		if !b.held {
			t.Error("a volume is let go of before it is cut")
		}
		close(b.hangs)
		if err := <-ended; err != nil || b.held {
			t.Errorf("when the disk goes on: %v", err)
		}
	})
}

// TestBusyAgain: after a failed try that held I/O, the next try waits.
func TestBusyAgain(t *testing.T) {
	if again := busyAgain(api.Errorf(api.Busy, "volume v: %w", stack.ErrUnderWay)); again < 5*time.Second {
		t.Errorf("I/O is held back again after %v", again)
	}
	if again := busyAgain(api.Errorf(api.Busy, "for a moment")); again > time.Second {
		t.Errorf("what is busy for a moment is tried again after %v", again)
	}
}
