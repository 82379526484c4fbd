package peer

import (
	"testing"

	"drover.io/drover/block"
	"drover.io/drover/replicas/engine"
)

// BenchmarkRemoteBlock reads 4 KiB of a replica behind a connection, as an engine does: 16 at a time.
func BenchmarkRemoteBlock(b *testing.B) {
	const depth = 16
	f := newFar(b, testSize, nil)
	loop := startLoop(b)
	m := newWatch(b).Member(member(b, newDialer(b, f.at), f, loop, nil), engine.WatchOptions{Loop: loop, Replica: f.uid})
	if err := m.Adopt(b.Context(), 1, 1, []string{f.uid}); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	left, done := b.N, make(chan struct{})
	b.ResetTimer()
	loop.Post(func() {
		under := 0
		for i := range min(depth, b.N) {
			r := &block.Request{Op: block.OpRead, Off: int64(i) * block.Size, Len: block.Size, Buf: block.AlignedBuffer(block.Size)}
			r.Done = func(r *block.Request) {
				if r.Err != nil {
					b.Error(r.Err)
				}
				if left > 0 {
					left--
					m.Submit(r)
				} else if under--; under == 0 {
					close(done)
				}
			}
			under, left = under+1, left-1
			m.Submit(r)
		}
	})
	within(b, "answer to the last read", done)
	b.StopTimer()
	if err := m.Close(); err != nil {
		b.Fatal(err)
	}
}
