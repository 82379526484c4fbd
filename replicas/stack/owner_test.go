package stack

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
)

const childEnv = "DROVER_STACK_CHILD"

// child is a process which writes to a replica without end, with many writes in flight. If the volume is called cuts,
// the child cuts the replica again and again.
func child(root, uid string) error {
	d, err := Open(root)
	if err != nil {
		return err
	}
	loop, err := uring.New(256)
	if err != nil {
		return err
	}
	go loop.Run()
	r, err := d.OpenReplica(context.Background(), uid, loop)
	if err != nil {
		return err
	}
	const depth, each = 48, 256 << 10
	first := make(chan struct{}, 1<<16)
	size := r.Meta().Size
	next := int64(0)
	for range depth {
		q := &block.Request{Op: block.OpWrite, Len: each, Buf: block.AlignedBuffer(each)}
		fill(q.Buf, 0xaaaa)
		q.Done = func(q *block.Request) {
			select {
			case first <- struct{}{}:
			default:
			}
			q.Off = next % size
			next += each
			loop.Post(func() { r.Submit(q) })
		}
		loop.Post(func() { q.Done(q) })
	}
	for range depth + 10 {
		<-first
	}
	fmt.Println("writing")
	if r.Meta().Volume != "cuts" {
		select {}
	}
	if err := r.Adopt(context.Background(), r.Meta().Epoch+1, 1, []string{uid}); err != nil {
		return err
	}
	for {
		if err := r.Cut(context.Background(), Snapshot{Layer: string(api.NewUID())}); err != nil {
			return err
		}
	}
}

// TestDeadCutter: a process is killed at any point of cuts and writes. No write in progress reaches a layer after
// another process has opened the replica and relies on the layer. TestLateWriteOfADeadCutter has a late write.
func TestDeadCutter(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "cuts", VolumeUID: string(api.NewUID()), Size: 32 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for range 8 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), childEnv+"="+d.Root+" "+spec.UID)
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		was := 0
		if m, err := d.Stack(spec.UID); err == nil {
			was = len(m.Layers)
		}
		for many := was; many < was+3; {
			select {
			case err := <-ended:
				t.Fatalf("the child ended: %v", err)
			case <-look.C:
			}
			m, err := d.Stack(spec.UID)
			if err != nil {
				t.Fatal(err)
			}
			many = len(m.Layers)
		}
		cmd.Process.Kill()
		var r *Replica
		var err error
		for {
			if r, err = d.OpenReplica(ctx, spec.UID, loop); !api.Is(err, api.Busy) {
				break
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		uids, err := d.Unfinished()
		if err != nil || len(uids) == 0 {
			t.Fatalf("unfinished %v, %v", uids, err)
		}
		for _, uid := range uids {
			if err := d.Finish(ctx, uid); err != nil {
				t.Fatal(err)
			}
		}
		<-ended
		for _, uid := range uids {
			if err := d.Verify(ctx, uid); err != nil {
				t.Fatalf("a write of the dead process came late: %v", err)
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDeadOwner: a process is killed in the middle of writes. No write in progress reaches the disk after the writes of
// the next opener.
func TestDeadOwner(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	ctx := context.Background()
	const size = int64(32) << 20
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	buf, got := block.AlignedBuffer(1<<20), block.AlignedBuffer(1<<20)
	for round := range 6 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), childEnv+"="+d.Root+" "+spec.UID)
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); line != "writing\n" {
			cmd.Process.Kill()
			cmd.Wait()
			t.Fatalf("the child said %q: %v", line, err)
		}
		if _, err := d.OpenReplica(ctx, spec.UID, loop); !api.Is(err, api.Busy) {
			t.Fatalf("open while the owner lives: %v", err)
		}
		cmd.Process.Kill()
		// The test does not wait for the process yet: just then the last I/O is in progress.
		var r *Replica
		for {
			if r, err = d.OpenReplica(ctx, spec.UID, loop); !api.Is(err, api.Busy) {
				break
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		fill(buf, uint64(round+1))
		for off := int64(0); off < size; off += int64(len(buf)) {
			mustIssue(t, loop, r, block.OpWrite, off, int64(len(buf)), buf)
		}
		cmd.Wait()
		for range 3 {
			for off := int64(0); off < size; off += int64(len(buf)) {
				mustIssue(t, loop, r, block.OpRead, off, int64(len(got)), got)
				if !bytes.Equal(got, buf) {
					t.Fatalf("round %d: a write of the dead process came late, near %d", round, off)
				}
			}
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
