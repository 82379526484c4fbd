package engine

import "testing"

// Memory that a disk which hangs may still use outlives the pool.
func TestPoolOutlived(t *testing.T) {
	p, err := NewPool()
	if err != nil {
		t.Fatal(err)
	}
	b := &p.reads
	n := len(b.free) - 1
	lent := b.free[n]
	b.free = append(b.free[:n], aligned(bounceSize)) // another one in its place
	p.Close()
	clear(lent) // a fault, if it is not there
	if len(b.all) != 1 || len(p.writes.all) != 0 {
		t.Errorf("%d and %d buffers are mapped", len(b.all), len(p.writes.all))
	}
	b.put(lent)
	if len(b.all) != 0 {
		t.Error("it stays mapped")
	}
}
