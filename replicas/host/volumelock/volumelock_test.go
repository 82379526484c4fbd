package volumelock

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestLockSoon: who has a volume's lock for long is not waited for, and one that gives way is given time for that.
func TestLockSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := New()
		soon := func() (bool, time.Duration) {
			began := time.Now()
			unlock, ok := d.LockSoon("v")
			if ok {
				unlock()
			}
			return ok, time.Since(began)
		}
		unlock := d.Lock("v")
		time.AfterFunc(time.Second, unlock)
		if ok, took := soon(); !ok || took != time.Second {
			t.Errorf("one that has it for a moment: %v after %v", ok, took)
		}
		unlock = d.Lock("v")
		for _, want := range []time.Duration{stallTimeout, 0, 0} { // not once for each
			if ok, took := soon(); ok || took != want {
				t.Errorf("one that has it for long: %v after %v, want %v", ok, took, want)
			}
		}
		unlock()
		if ok, took := soon(); !ok || took > 0 {
			t.Errorf("when it is free: %v after %v", ok, took)
		}
		ctx, unlock, ok := d.LockYielding(context.Background(), "v")
		if !ok {
			t.Fatal("it is free")
		}
		time.Sleep(time.Hour) // while nobody wants it
		context.AfterFunc(ctx, func() { time.AfterFunc(yieldTimeout/2, unlock) })
		if ok, took := soon(); !ok || took != yieldTimeout/2 {
			t.Errorf("one that gives way: %v after %v", ok, took)
		}
		_, unlock, _ = d.LockYielding(context.Background(), "v")
		if ok, took := soon(); ok || took != yieldTimeout {
			t.Errorf("one that does not come to give way: %v after %v", ok, took)
		}
		unlock()
		if len(d.all) > 0 {
			t.Errorf("locks of nobody: %v", d.all)
		}
	})
}
