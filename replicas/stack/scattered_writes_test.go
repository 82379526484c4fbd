package stack

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// TestScatter: the open replica and the next replica read scattered writes as written, and no other part of the buffer.
// A cut includes scattered writes.
func TestScatter(t *testing.T) {
	suite.Slow(t)
	ctx, loop := context.Background(), startLoop(t)
	d := newDisk(t)
	const size = 16 << 20
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	r, err := d.OpenReplica(ctx, spec.UID, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{spec.UID}); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(3, 4))
	model := make([]byte, size)
	scatter := func(off int64, spans ...block.Span) error {
		buf := block.AlignedBuffer(1 << 20)
		randomBytes(rng, buf)
		q := &block.Request{Op: block.OpWrite, Off: off, Len: int64(len(buf)), Buf: buf, Spans: spans}
		done := make(chan error, 1)
		q.Done = func(q *block.Request) { done <- q.Err }
		loop.Post(func() { r.Submit(q) })
		err := <-done
		for _, s := range spans {
			if err == nil {
				copy(model[off+s.Off:], buf[s.Off:][:s.Len])
			}
		}
		return err
	}
	check := func() {
		t.Helper()
		for _, n := range []int64{size, 1 << 20, 12 << 10} {
			buf := block.AlignedBuffer(int(n))
			for off := int64(0); off+n <= size; off += n {
				mustIssue(t, loop, r, block.OpRead, off, n, buf)
				if !bytes.Equal(buf, model[off:][:n]) {
					t.Fatalf("not what was written at %d+%d", off, n)
				}
			}
		}
	}
	every := func(step int64) (list []block.Span) {
		for at := int64(0); at < 1<<20; at += step * blockSize {
			list = append(list, block.Span{Off: at, Len: blockSize})
		}
		return list
	}
	for i, step := range []int64{2, 3, 20, 1} {
		if err := scatter(int64(i)<<20, every(step)...); err != nil {
			t.Fatal(err)
		}
	}
	check()
	buf := block.AlignedBuffer(int(blockSize)) // directly over a scattered write
	randomBytes(rng, buf)
	mustIssue(t, loop, r, block.OpWrite, 2*blockSize, blockSize, buf)
	copy(model[2*blockSize:], buf)
	check()
	for _, bad := range [][]block.Span{{{Off: 1, Len: blockSize}}, {{Off: 0, Len: 0}}, {{Off: 0, Len: 2 << 20}},
		{{Off: blockSize, Len: blockSize}, {Off: 0, Len: blockSize}}, {{Off: -blockSize, Len: blockSize}}} {
		if err := scatter(0, bad...); !errors.Is(err, unix.EINVAL) {
			t.Fatalf("%v: %v", bad, err)
		}
	}
	for i := range int64(3 * mostBehind) { // more than the page cache may have at once
		if err := scatter(i%16<<20, every(2+i%3)...); err != nil {
			t.Fatal(err)
		}
	}
	check()
	if n := len(r.now.behind); n != mostBehind {
		t.Fatalf("%d writes are in the page cache", n)
	}
	if err := r.Cut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}); err != nil {
		t.Fatal(err)
	}
	check()
	if err := scatter(512<<10, every(2)...); err != nil {
		t.Fatal(err)
	}
	check()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	check()
}
