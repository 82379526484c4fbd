package stack

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/uring"
)

const childEnv = "DROVER_STACK_CHILD"

// child is a process that writes to a replica without end, many writes in flight.
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
		q := &block.Request{Op: block.OpWrite, Len: each, Buf: alignedBuffer(each)}
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
	select {}
}

// TestDeadOwner kills a process in the middle of its writes. The next opener must not be overtaken by what the dead
// process left under way: whatever it writes then stays.
func TestDeadOwner(t *testing.T) {
	ctx := context.Background()
	const size = int64(32) << 20
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	buf, got := alignedBuffer(1<<20), alignedBuffer(1<<20)
	for round := range 6 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), childEnv+"="+d.root+" "+spec.UID)
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
		// Not waited for yet: exactly then its last I/O is under way.
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
