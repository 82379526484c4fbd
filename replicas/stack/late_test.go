package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block"
	"drover.io/drover/block/suite"
	"drover.io/drover/replicas/stack/layer"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/diskfs"
)

// stopInCut stops a child, which cuts again and again, between the commit of a cut and the end of the writes to the old
// head. The result is the layer.
func stopInCut(ctx context.Context, t *testing.T, d *Disk, uid string, pid int) (layerUID string) {
	t.Helper()
	// beingCut is the newest layer, if the layer has the lock of a head.
	beingCut := func() string {
		m, err := d.Stack(uid)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Layers) == 0 {
			return ""
		}
		newest := m.Layers[len(m.Layers)-1]
		h, err := d.FS.Open(d.Join(layer.Dir, newest, layer.DataFile), os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		err = diskfs.Flock(h, unix.LOCK_SH|unix.LOCK_NB)
		if cerr := h.Close(); cerr != nil {
			t.Fatal(cerr)
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return ""
		}
		return newest
	}
	for ctx.Err() == nil {
		if beingCut() == "" {
			continue
		}
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		var ws syscall.WaitStatus
		if _, err := syscall.Wait4(pid, &ws, syscall.WUNTRACED, nil); err != nil || !ws.Stopped() {
			t.Fatalf("the child does not stop: %v, %v", ws, err)
		}
		if layerUID := beingCut(); layerUID != "" {
			return layerUID
		}
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	t.Fatal("the child is never in a cut")
	return ""
}

// stolen returns a process's open files of a name, with the open state of the process, as I/O in progress holds the
// files.
func stolen(t *testing.T, pid int, name string) (files []*os.File) {
	t.Helper()
	want, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	of, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(of)
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		n, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		if is, err := os.Stat(filepath.Join(dir, e.Name())); err != nil || !os.SameFile(is, want) {
			continue
		}
		fd, err := unix.PidfdGetfd(of, n, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	return files
}

// TestLateWriteOfADeadCutter: a process is killed in a cut, and a write to the layer ends long after the kill. The test
// stands for the disk I/O in progress and holds the dead process's open file. Before the write ends, no process can
// open the replica or finish the layer.
func TestLateWriteOfADeadCutter(t *testing.T) {
	suite.Slow(t)
	ctx := context.Background()
	d, loop := newDisk(t), startLoop(t)
	spec := Spec{UID: string(api.NewUID()), Volume: "cuts", VolumeUID: string(api.NewUID()), Size: 32 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"="+d.Root+" "+spec.UID)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // if the test ended early
		_ = cmd.Wait()
	})
	soon, stop := context.WithTimeout(ctx, 5*time.Minute)
	defer stop()
	layerUID := stopInCut(soon, t, d, spec.UID, cmd.Process.Pid)
	data := d.Join(layer.Dir, layerUID, layer.DataFile)
	files := stolen(t, cmd.Process.Pid, filepath.Join(d.Root, layer.Dir, layerUID, layer.DataFile))
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if len(files) == 0 {
		t.Fatal("the child does not have the layer open")
	}
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if r, err := d.OpenReplica(short, spec.UID, loop); err == nil {
		t.Fatalf("the replica is open while a write to its layer %s is under way: %v", layerUID, r.Close())
	}
	if err := d.Finish(short, layerUID); err == nil {
		t.Fatal("the layer is finished while a write to it is under way")
	}
	type result struct {
		r   *Replica
		err error
	}
	opened := make(chan result, 1)
	go func() {
		r, err := d.OpenReplica(ctx, spec.UID, loop)
		for end := time.Now().Add(time.Minute); api.Is(err, api.Busy) && time.Now().Before(end); {
			r, err = d.OpenReplica(ctx, spec.UID, loop)
		}
		opened <- result{r, err}
	}()
	late := block.AlignedBuffer(256 << 10)
	fill(late, 0xbbbb)
	if _, err := files[0].WriteAt(late, 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-opened:
		t.Fatal("the replica was opened before the last write had ended")
	default:
	}
	for _, f := range files {
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	got := <-opened
	if got.err != nil {
		t.Fatal(got.err)
	}
	uids, err := d.Unfinished()
	if err != nil || len(uids) == 0 {
		t.Fatalf("unfinished %v, %v", uids, err)
	}
	for _, uid := range uids {
		if err := errors.Join(d.Finish(ctx, uid), d.Verify(ctx, uid)); err != nil {
			t.Fatal(err)
		}
	}
	h, err := d.FS.Open(data, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	have := make([]byte, len(late))
	if _, err := h.ReadAt(have, 0); err != nil || !bytes.Equal(have, late) {
		t.Fatalf("the layer lacks the last write: %v", err)
	}
	if err := got.r.Close(); err != nil {
		t.Fatal(err)
	}
}
