package attach

import (
	"context"
	"path/filepath"
	"slices"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// TestResumeLeavesOutMissingMembers: a process that resumes a device adopts no member that the device record calls
// missing, even if the process can open the member by now. The process records as missing each member that did not
// open.
func TestResumeLeavesOutMissingMembers(t *testing.T) {
	as := attachmentsWithoutAPI(t)
	ctx := context.Background()
	disk, err := stack.Add(ctx, filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	volume := api.NewUID()
	b := blob{Volume: "v", VolumeUID: volume, Epoch: 3, Now: 3}
	for _, name := range []string{"v-1", "v-2", "v-3"} {
		uid := api.NewUID()
		b.Members = append(b.Members, memberSpec{Name: name, UID: uid, Node: "a", Disk: api.UID(disk.UID()), Path: disk.Path()})
		if name == "v-3" {
			break // the third replica has no files
		}
		if err := disk.CreateReplica(ctx, stack.Spec{UID: string(uid), Volume: "v", VolumeUID: string(volume), Size: 1 << 20}); err != nil {
			t.Fatal(err)
		}
	}
	b.Members[1].Missing = true
	if err := disk.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := as.openSession(ctx, b, 1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{string(b.Members[1].UID), string(b.Members[2].UID)}
	if got := s.engine.Missing(); !slices.Equal(got, want) {
		t.Errorf("missing: %v, want %v", got, want)
	}
	for i, m := range s.snapshotBlob().Members {
		if m.Missing != (i > 0) {
			t.Errorf("what is kept with the device about %s: missing %v", m.Name, m.Missing)
		}
	}
	opened, err := as.Disks.Open(ctx, b.Members[0].Path, b.Members[0].Disk, false)
	if err != nil {
		t.Fatal(err)
	}
	for i, epoch := range []int64{3, 0} {
		if m, err := opened.Stack(string(b.Members[i].UID)); err != nil || m.Epoch != epoch {
			t.Errorf("replica %s adopted epoch %d, %v", b.Members[i].Name, m.Epoch, err)
		}
	}
	s.engine.Hurry()
	if err := s.engine.Close(); err != nil {
		t.Error(err)
	}
	as.Threads.PutBack(s.loop)
}
