package stack

import (
	"sync"
	"testing"
)

// TestScratchIsBounded: the replicas of a disk hold a bounded amount of memory for reads, however many reads ask. A
// replica without memory gets a little, even if other replicas keep all.
func TestScratchIsBounded(t *testing.T) {
	d := &Disk{}
	one, two, three := &Replica{disk: d}, &Replica{disk: d}, &Replica{disk: d}
	var mu sync.Mutex
	var held, most int
	take := func(r *Replica) (size int, back func()) {
		buf, give := r.Scratch()
		mu.Lock()
		held += len(buf)
		most = max(most, held)
		mu.Unlock()
		return len(buf), func() {
			mu.Lock()
			held -= len(buf)
			mu.Unlock()
			give()
		}
	}
	var kept []func()
	for range scratchCount {
		n, back := take(one)
		if n != scratchSize {
			t.Fatalf("%d bytes while there is room", n)
		}
		kept = append(kept, back)
	}
	n, back := take(two)
	if n != scratchLittle {
		t.Fatalf("%d bytes though others have all", n)
	}
	var all sync.WaitGroup
	for range 50 {
		for _, r := range []*Replica{one, two, three} {
			all.Go(func() {
				_, back := take(r)
				back()
			})
		}
	}
	back()
	for _, back := range kept {
		back()
	}
	all.Wait()
	if limit := scratchCount*scratchSize + 3*scratchLittle; most > limit || held != 0 {
		t.Errorf("%d bytes were held at once, of %d, and %d in the end", most, limit, held)
	}
	if len(d.scratch.has) != 0 || d.scratch.used != 0 {
		t.Errorf("what was given back is counted still: %+v", d.scratch.has)
	}
}
