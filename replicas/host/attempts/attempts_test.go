package attempts

import (
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestOneAttemptPerObject(t *testing.T) {
	var l Log[string]
	var began atomic.Int32
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if l.Begin("a", math.MaxInt) {
				began.Add(1)
			}
		})
	}
	all.Wait()
	if began.Load() != 1 || !l.InProgress("a") || l.Ended("a") {
		t.Errorf("%d attempts at once, in progress %v, ended %v", began.Load(), l.InProgress("a"), l.Ended("a"))
	}
	l.End("a", 0)
	if l.InProgress("a") || !l.Ended("a") || l.Ended("b") {
		t.Errorf("in progress %v, ended %v, another %v", l.InProgress("a"), l.Ended("a"), l.Ended("b"))
	}
	if !l.Begin("a", math.MaxInt) || !l.Ended("a") {
		t.Error("no second attempt, or the first is forgotten")
	}
	l.End("a", time.Hour)
	if l.Forget("a"); l.Ended("a") || !l.Begin("a", math.MaxInt) || len(l.next) != 0 {
		t.Error("an attempt that was forgotten delays the next one")
	}
}

func TestAttemptsAreBounded(t *testing.T) {
	var l Log[int]
	if !l.Begin(1, 2) || !l.Begin(2, 2) || l.Begin(3, 2) {
		t.Error("the bound of two is not kept")
	}
	if !l.Begin(3, 3) {
		t.Error("a larger bound admits no attempt")
	}
	l.End(1, 0)
	if l.Begin(4, 2) || !l.Begin(4, 3) {
		t.Error("an end does not make room for one attempt")
	}
}

func TestNoAttemptBeginsDuringThePause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Log[string]
		l.Begin("a", 1)
		l.End("a", time.Minute)
		<-time.After(time.Minute - 1)
		if l.Begin("a", 1) {
			t.Error("an attempt begins during the pause")
		}
		if !l.Begin("b", 1) {
			t.Error("the pause of an object delays another")
		}
		l.End("b", 0)
		<-time.After(1)
		if !l.Begin("a", 1) {
			t.Error("no attempt begins after the pause")
		}
	})
}
