package stack

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack/diskfs"
)

func TestLifetimeEndsWithTheBootOrTheMount(t *testing.T) {
	for _, c := range []struct {
		then, now diskfs.Lifetime
		ended     bool
	}{
		{diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/7"}, diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/7"}, false},
		{diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/7"}, diskfs.Lifetime{Boot: "b2", Mount: "xfs/sda1/7"}, true},
		{diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/7"}, diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/8"}, true},
		{diskfs.Lifetime{Boot: "b1", Mount: ""}, diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/8"}, false}, // recorded by an older version
		{diskfs.Lifetime{Boot: "b1", Mount: "xfs/sda1/7"}, diskfs.Lifetime{Boot: "b1", Mount: ""}, false}, // a container without sysfs
	} {
		if got := c.then.Ended(c.now); got != c.ended {
			t.Errorf("%+v in %+v: ended %v", c.then, c.now, got)
		}
	}
}

// TestMountIdentityChangesWithEachMount: a mount of a file system keeps the same identity, and no earlier mount had the
// same.
func TestMountIdentityChangesWithEachMount(t *testing.T) {
	for _, mkfs := range [][]string{
		{"mkfs.ext4", "-q", "-b", "4096"}, {"mkfs.xfs", "-q"}, {"mkfs.btrfs", "-q", "-f"},
	} {
		t.Run(mkfs[0], func(t *testing.T) {
			dir, remount := mounted(t, 512<<20, "", mkfs...)
			seen := map[string]bool{}
			for range 3 {
				first, err := diskfs.MountIdentity("/sys", dir)
				if err != nil || first == "" {
					t.Fatalf("identity %q, %v", first, err)
				}
				if again, err := diskfs.MountIdentity("/sys", dir); err != nil || again != first {
					t.Errorf("identity of one mount: %q, then %q, %v", first, again, err)
				}
				if seen[first] {
					t.Errorf("identity %q was that of an earlier mount", first)
				}
				seen[first] = true
				remount()
			}
		})
	}
	if none, err := diskfs.MountIdentity(t.TempDir(), t.TempDir()); err != nil || none != "" {
		t.Errorf("without sysfs: %q, %v", none, err)
	}
}

// TestAdoptAfterTheFileSystemWasMountedAgain: a file system which was shut down and mounted again lost acknowledged
// writes, although the node did not restart. The replica refuses an adoption with other members, and accepts an
// adoption as the only member.
func TestAdoptAfterTheFileSystemWasMountedAgain(t *testing.T) {
	dir, remount := mounted(t, 512<<20, ",commit=60", "mkfs.ext4", "-q", "-b", "4096")
	ctx := context.Background()
	d, err := Add(ctx, filepath.Join(dir, "disk"))
	if err != nil {
		t.Fatal(err)
	}
	uid := string(api.NewUID())
	spec := Spec{UID: uid, Volume: "v", VolumeUID: string(api.NewUID()), Size: 64 << 20}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	loop := startLoop(t)
	r, err := d.OpenReplica(ctx, uid, loop)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Adopt(ctx, 1, 1, []string{uid, "other"}); err != nil {
		t.Fatal(err)
	}
	mustIssue(t, loop, r, block.OpWrite, 0, blockSize, block.AlignedBuffer(int(blockSize))) // acknowledged, not flushed
	shutDown(t, dir)
	_ = r.Close() // fails, as the last flush of a failed disk does
	_ = d.Close()
	remount()
	if d, err = Open(filepath.Join(dir, "disk")); err != nil {
		t.Fatal(err)
	}
	if r, err = d.OpenReplica(ctx, uid, loop); err != nil {
		t.Fatal(err)
	}
	if restarted, err := r.Restarted(); err != nil || !restarted {
		t.Errorf("restarted: %v, %v", restarted, err)
	}
	if err := r.Adopt(ctx, 2, 1, []string{uid, "other"}); !errors.Is(err, ErrRestarted) {
		t.Errorf("adopted as one of several members: %v", err)
	}
	if err := r.Adopt(ctx, 3, 1, []string{uid}); err != nil {
		t.Errorf("adopted as the only member: %v", err)
	}
	if err := errors.Join(r.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}

// shutDown stops an ext4 file system as an I/O error does. The kernel writes nothing more to the device.
func shutDown(t *testing.T, dir string) {
	t.Helper()
	const goingDown, noLogFlush = 0x8004587d, 2 // EXT4_IOC_SHUTDOWN, linux/ext4.h
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	how := uint32(noLogFlush)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), goingDown, uintptr(unsafe.Pointer(&how))); errno != 0 {
		t.Fatal(errno)
	}
}
