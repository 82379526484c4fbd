package mover

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestIncrementalBackupTakesFewRequests: a process with an empty cache backs up a volume of 4 GiB that changed at six
// places. The backup sends at most 30 requests to the store, besides the requests that store its packs.
func TestIncrementalBackupTakesFewRequests(t *testing.T) {
	w := newWorld(t)
	v := newDisk(2000 * chunkSize)
	for c := range int64(40) {
		v.fill(uint64(c), c*50)
	}
	first := w.backup(v, options("v"))
	packs := len(w.packs())
	next := v.copy(v.size)
	for c := range int64(6) {
		next.fill(100+uint64(c), 25+c*300)
	}
	p := w.process()
	clear(p.store.counts)
	o := options("v")
	o.Base, o.Changed = &first.Snapshot, changed(rand.New(rand.NewPCG(1, 1)), v, next)
	p.backup(next, o)
	requests, stored := 0, len(w.packs())-packs
	for _, n := range p.store.counts {
		requests += n
	}
	if requests > stored+30 || stored == 0 {
		t.Errorf("%d requests for %d packs: %v", requests, stored, slices.Sorted(maps.Keys(p.store.counts)))
	}
	t.Logf("%d requests for %d packs: %v", requests, stored, p.store.counts)
}
