package budget

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"golang.org/x/sync/errgroup"
)

// TestReservationsNeverExceedAPart: works of several sizes, one larger than its part, take turns in two parts. All end,
// and the counts of each part and of the budget stay within the sizes.
func TestReservationsNeverExceedAPart(t *testing.T) {
	b := New(100)
	parts := []*Part{b.NewPart(60), b.NewPart(60)} // the second one has what is left
	if parts[1].Size() != 40 {
		t.Fatalf("the second part has %d bytes", parts[1].Size())
	}
	var held [2]atomic.Int64
	var group errgroup.Group
	for i := range 200 {
		n, p := int64(i%7)*10+1, i%2
		if i == 50 {
			n = 1000
		}
		group.Go(func() error {
			release, err := parts[p].Reserve(t.Context(), n)
			if err != nil {
				return err
			}
			if sum := held[p].Add(min(n, parts[p].Size())); sum > parts[p].Size() {
				t.Errorf("%d bytes of a part of %d", sum, parts[p].Size())
			}
			held[p].Add(-min(n, parts[p].Size()))
			release()
			release() // does nothing
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if now, most := b.Reserved(); now != 0 || most > 100 || most < 60 {
		t.Errorf("%d bytes are reserved, and at most %d", now, most)
	}
}

// TestLargeReservationIsNotOvertaken: a small reservation waits behind a large one that came first; the end of the
// context of the large one lets the small one go.
func TestLargeReservationIsNotOvertaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(10).NewPart(10)
		release, err := p.Reserve(t.Context(), 5)
		if err != nil {
			t.Fatal(err)
		}
		gone := errors.New("not wanted any more")
		ctx, cancel := context.WithCancelCause(t.Context())
		var large, small atomic.Pointer[error]
		go func() {
			_, err := p.Reserve(ctx, 10)
			large.Store(&err)
		}()
		synctest.Wait()
		go func() {
			release, err := p.Reserve(t.Context(), 1)
			small.Store(&err)
			if err == nil {
				release()
			}
		}()
		synctest.Wait()
		if large.Load() != nil || small.Load() != nil {
			t.Fatal("a reservation overtook")
		}
		cancel(gone)
		synctest.Wait()
		if err := large.Load(); err == nil || !errors.Is(*err, gone) {
			t.Errorf("the large reservation: %v", err)
		}
		if err := small.Load(); err == nil || *err != nil {
			t.Errorf("the small reservation: %v", err)
		}
		release()
	})
}
