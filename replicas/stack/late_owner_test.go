package stack

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// TestLateWriteOfADeadOwner: a process is killed during a write, and the write ends long after the kill. The test
// stands for the disk I/O in progress and holds the dead process's open file. No process can open the replica before
// the write ends, and writes of the next owner stay.
func TestLateWriteOfADeadOwner(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	const size = int64(32) << 20
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
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
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // if the test ended early
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "writing\n" {
		t.Fatalf("the child said %q: %v", line, err)
	}
	m, err := d.Stack(spec.UID)
	if err != nil {
		t.Fatal(err)
	}
	files := stolen(t, cmd.Process.Pid, filepath.Join(d.Root, "replicas", spec.UID, m.Head+dataSuffix))
	if len(files) == 0 {
		t.Fatal("the child does not have the head open")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if r, err := d.OpenReplica(short, spec.UID, loop); err == nil {
		t.Errorf("the replica is open while a write of its dead owner is under way: %v", r.Close())
	} else if !api.Is(err, api.Busy) {
		t.Errorf("open beside a write that is under way: %v", err)
	}
	late := block.AlignedBuffer(1 << 20)
	fill(late, 0xbbbb)
	if _, err := files[0].WriteAt(late, 0); err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	var r *Replica
	for end := time.Now().Add(5 * time.Minute); ; {
		if r, err = d.OpenReplica(ctx, spec.UID, loop); !api.Is(err, api.Busy) || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	buf, got := block.AlignedBuffer(1<<20), block.AlignedBuffer(1<<20)
	fill(buf, 1)
	mustIssue(t, loop, r, block.OpWrite, 0, int64(len(buf)), buf)
	mustIssue(t, loop, r, block.OpRead, 0, int64(len(got)), got)
	if !bytes.Equal(got, buf) {
		t.Error("a write of the dead process overtook the next owner's")
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}
