package stack

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
	"drover.io/drover/replicas/stack/format"
)

// syncOnce is an open file whose next sync fails. Later syncs find nothing, as in the kernel.
type syncOnce struct {
	file.Handle
	err error
}

func (h *syncOnce) Datasync() error {
	err := h.err
	h.err = nil
	return errors.Join(err, h.Handle.Datasync())
}

// TestSyncErrorIsNotLost: the kernel reports the loss of written data to an open file only once. Whichever call gets
// the report, the replica takes no more writes, acknowledges no flush, and has no clean end.
func TestSyncErrorIsNotLost(t *testing.T) {
	ctx := context.Background()
	for name, hears := range map[string]func(*Replica) error{
		"cut": func(r *Replica) error {
			_, err := r.PrepareCut(ctx, Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID())})
			return err
		},
		"expand": func(r *Replica) error { return r.Expand(ctx, 6*format.IntentsRegion) },
	} {
		t.Run(name, func(t *testing.T) {
			d, l := newDisk(t), startLoop(t)
			uid := newMirror(t, d)
			r, err := d.OpenReplica(ctx, uid, l)
			if err != nil {
				t.Fatal(err)
			}
			adopt(t, r, 1, 7, uid)
			mustIssue(t, l, r, block.OpWrite, 0, blockSize, block.AlignedBuffer(int(blockSize)))
			r.head = &syncOnce{r.head, unix.EIO}
			if err := hears(r); !errors.Is(err, ErrFailed) || !errors.Is(err, unix.EIO) {
				t.Errorf("the error: %v", err)
			}
			if err := r.Failed(); !errors.Is(err, ErrFailed) {
				t.Errorf("the replica: %v", err)
			}
			for what, op := range map[string]block.Op{"flush": block.OpFlush, "write": block.OpWrite} {
				n := int64(0)
				var b []byte
				if op == block.OpWrite {
					n, b = blockSize, block.AlignedBuffer(int(blockSize))
				}
				if err := issue(l, r, op, 0, n, b, false); err == nil {
					t.Errorf("a %s was acknowledged", what)
				}
			}
			_ = r.Close()
			if m, err := d.Stack(uid); err != nil || !m.Dirty {
				t.Errorf("it has had a clean end: %v", err)
			}
		})
	}
}
