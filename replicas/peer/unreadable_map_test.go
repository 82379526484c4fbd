package peer

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/stack"
)

// TestUnreadableMapDropsItsMember: a member cannot read a page of a layer's map, which is not in the index's memory.
// The engine drops the member, like a member with a failing disk, after a read and after a write. The guest sees no
// error.
func TestUnreadableMapDropsItsMember(t *testing.T) {
	for _, op := range []block.Op{block.OpRead, block.OpWrite} {
		ctx, loop := context.Background(), startLoop(t)
		dropped := make(chan string, 2)
		cfg := engine.Config{Loop: loop, Size: 64 << 20, Epoch: 2, Incarnation: 1,
			Drop: func(_ context.Context, _ int64, name string) error { dropped <- name; return nil }}
		buf := block.AlignedBuffer(block.Size)
		buf[0] = 7
		for i, name := range []string{"a", "b"} {
			d, err := stack.Add(ctx, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			spec := stack.Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: cfg.Size}
			if err := d.CreateReplica(ctx, spec); err != nil {
				t.Fatal(err)
			}
			r, err := d.OpenReplica(ctx, spec.UID, loop)
			if err != nil {
				t.Fatal(err)
			}
			s := stack.Snapshot{UID: string(api.NewUID()), Name: "s", Layer: string(api.NewUID()), Created: time.Now()}
			for _, step := range []func() error{
				func() error { return r.Adopt(ctx, 1, 1, []string{name}) },
				func() error {
					return Do(ctx, loop, r, &block.Request{Op: block.OpWrite, Off: 8192, Len: block.Size, Buf: buf})
				},
				func() error { return r.Cut(ctx, s) },
				r.Close,
				func() error { return d.FinishNow(ctx, s.Layer) },
			} {
				if err := step(); err != nil {
					t.Fatal(err)
				}
			}
			if r, err = d.OpenReplica(ctx, spec.UID, loop); err != nil {
				t.Fatal(err)
			}
			cfg.Members = append(cfg.Members, engine.Named{Name: name, Local: i == 0, Member: NewBackend(r, loop)})
			if i > 0 {
				continue
			}
			file := filepath.Join(d.Path(), "layers", s.Layer, "map")
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			content[binary.LittleEndian.Uint64(content[64+8:])] ^= 1 // in the page of the first entry of the table
			if err := os.WriteFile(file, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		e, err := engine.Open(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if op == block.OpRead {
			clear(buf)
		}
		if err := Do(ctx, loop, e, &block.Request{Op: op, Off: 8192, Len: block.Size, Buf: buf}); err != nil || buf[0] != 7 {
			t.Errorf("op %d: %d, %v", op, buf[0], err)
		}
		if name := within(t, "drop", dropped); name != "a" {
			t.Errorf("op %d dropped %s", op, name)
		}
		if err := Do(ctx, loop, e, &block.Request{Op: block.OpRead, Off: 8192, Len: block.Size, Buf: buf}); err != nil {
			t.Errorf("after the drop: %v", err)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}
