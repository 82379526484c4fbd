package stack

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// written is the number of bytes sent to the device of a mounted file system.
func written(t *testing.T, dir string) int64 {
	t.Helper()
	h, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if err := unix.Syncfs(int(h.Fd())); err != nil {
		t.Fatal(err)
	}
	dev := filepath.Base(strings.TrimSpace(run(t, "findmnt", "-n", "-o", "SOURCE", dir)))
	stat, err := os.ReadFile("/sys/block/" + dev + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	sectors, err := strconv.ParseInt(strings.Fields(string(stat))[6], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return sectors * 512
}

// TestMergeNeedsLittleFreeSpace: a merge of layers larger than the free space needs at most 64 MiB beside the layers,
// and copies nothing if the file system can share blocks.
func TestMergeNeedsLittleFreeSpace(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		mkfs   []string
		shares bool
	}{
		{"ext4", []string{"mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0"}, false},
		{"xfs-reflink-off", []string{"mkfs.xfs", "-q", "-f", "-m", "reflink=0"}, false},
		{"xfs", []string{"mkfs.xfs", "-q", "-f"}, true},
		{"btrfs", []string{"mkfs.btrfs", "-q", "-f", "-m", "single"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			const mib, pieces, room = int64(1) << 20, int64(192), int64(64) << 20
			dir, _ := mounted(t, 600*mib, "", c.mkfs...)
			ctx := context.Background()
			d, err := Add(ctx, dir)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: pieces * mib}
			buf := block.AlignedBuffer(int(mib))
			want := map[int64]uint64{}
			for k, has := range []func(i int64) bool{func(i int64) bool { return i%2 == 0 },
				func(i int64) bool { return i%2 == 1 || i%32 == 0 }} {
				uid := string(api.NewUID())
				w, err := d.Create(ctx, uid, spec.Size)
				if err != nil {
					t.Fatal(err)
				}
				for i := range pieces {
					if !has(i) {
						continue
					}
					want[i] = uint64(k+1)<<32 | uint64(i)
					fill(buf, want[i])
					if _, err := w.WriteAt(buf, i*mib); err != nil {
						t.Fatal(err)
					}
				}
				if _, _, err := w.Seal(ctx); err != nil {
					t.Fatal(err)
				}
				spec.Layers = append(spec.Layers, uid)
			}
			if err := d.CreateReplica(ctx, spec); err != nil {
				t.Fatal(err)
			}
			before := written(t, dir)
			if _, available, _, err := d.Statfs(); err != nil {
				t.Fatal(err)
			} else if !c.shares {
				run(t, "fallocate", "-l", fmt.Sprint(available-room), filepath.Join(dir, "ballast"))
			}
			r, err := d.OpenReplica(ctx, spec.UID, startLoop(t))
			if err != nil {
				t.Fatal(err)
			}
			for {
				more, err := r.Merge(ctx, MergeOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if !more {
					break
				}
			}
			layers := r.Meta().Layers
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if sent := written(t, dir) - before; len(layers) != 1 || c.shares != (sent < pieces*mib/8) {
				t.Fatalf("%d layers; %d MiB were written, of %d", len(layers), sent/mib, pieces)
			}
			if err := d.Verify(ctx, layers[0]); err != nil {
				t.Fatal(err)
			}
			src, err := d.OpenStack(layers, spec.Size)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			for i := range pieces {
				if _, err := src.ReadAt(buf, i*mib); err != nil {
					t.Fatal(err)
				}
				for at := 0; at < len(buf); at += 4096 {
					if is := binary.LittleEndian.Uint64(buf[at:]); is != want[i] {
						t.Fatalf("MiB %d holds %x at %d, not %x", i, is, at, want[i])
					}
				}
			}
		})
	}
}
