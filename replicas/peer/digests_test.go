package peer

import (
	"bytes"
	"crypto/sha256"
	"sync"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// TestDigestsOfManyAtOnce: waiting digests of a held replica do not delay the digests of another replica of the disk.
func TestDigestsOfManyAtOnce(t *testing.T) {
	disk, err := stack.Add(t.Context(), t.TempDir()+"/disk")
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	loop := startLoop(t)
	open := func() *Backend {
		uid := string(api.NewUID())
		if err := disk.CreateReplica(t.Context(), stack.Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()),
			Size: testSize}); err != nil {
			t.Fatal(err)
		}
		r, err := disk.OpenReplica(t.Context(), uid, loop)
		if err != nil {
			t.Fatal(err)
		}
		return NewBackend(r, loop)
	}
	held, other := open(), open()
	if err := held.Hold(t.Context()); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			if _, err := held.Digests(t.Context(), 0, 1<<20); err != nil {
				t.Error(err)
			}
		})
	}
	want := bytes.Repeat(zeroDigest[:], testSize>>12)
	for range 8 {
		all.Go(func() {
			if got, err := other.Digests(t.Context(), 0, testSize); err != nil || !bytes.Equal(got, want) {
				t.Errorf("digests of nothing: %v", err)
			}
			if got, err := other.Digests(t.Context(), testSize-3<<12, 3<<12); err != nil || !bytes.Equal(got, want[:3*16]) {
				t.Errorf("digests of the end: %v", err)
			}
		})
	}
	if got, err := other.Digests(t.Context(), 0, testSize); err != nil || !bytes.Equal(got, want) {
		t.Errorf("digests of nothing: %v", err)
	}
	held.Release()
	all.Wait()
	for _, b := range []*Backend{held, other} {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestDigestsSayTheSame: digests match reads, for missing blocks, for zeros over content, and for content.
func TestDigestsSayTheSame(t *testing.T) {
	disk, err := stack.Add(t.Context(), t.TempDir()+"/disk")
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	loop, uid := startLoop(t), string(api.NewUID())
	if err := disk.CreateReplica(t.Context(), stack.Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()),
		Size: testSize}); err != nil {
		t.Fatal(err)
	}
	r, err := disk.OpenReplica(t.Context(), uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	b := NewBackend(r, loop)
	defer b.Close()
	if err := b.Adopt(t.Context(), 1, 1, []string{uid}); err != nil {
		t.Fatal(err)
	}
	issue := func(op block.Op, off int64, buf []byte) {
		t.Helper()
		q := &block.Request{Op: op, Off: off, Len: int64(len(buf)), Buf: buf}
		if err := Do(t.Context(), loop, b, q); err != nil {
			t.Fatal(err)
		}
	}
	some := block.AlignedBuffer(64 << 10)
	for i := range some {
		some[i] = byte(i>>12 + 1)
	}
	compare := func() {
		t.Helper()
		all := block.AlignedBuffer(testSize)
		issue(block.OpRead, 0, all)
		var want []byte
		for i := 0; i < len(all); i += block.Size {
			sum := sha256.Sum256(all[i:][:block.Size])
			want = append(want, sum[:digestSize]...)
		}
		if got, err := b.Digests(t.Context(), 0, testSize); err != nil || !bytes.Equal(got, want) {
			t.Errorf("digests are not those of what is there: %v", err)
		}
	}
	compare()
	issue(block.OpWrite, 3<<12, some)
	compare()
	if err := b.Seal(t.Context(), stack.Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())}); err != nil {
		t.Fatal(err)
	}
	issue(block.OpZero, 5<<12, some[:8<<12])
	compare()
	issue(block.OpDiscard, 0, some)
	compare()
}
