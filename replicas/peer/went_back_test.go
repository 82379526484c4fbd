package peer

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// TestMemberThatWentBackInTimeIsRebuilt puts the files of a member back to the state before a snapshot, like a restored
// or lying disk. The next engine must not delete the reported snapshot from the other member, nor copy from the old
// member. The engine drops the old member, and the rebuild copies every old region, although no intent names the
// regions.
func TestMemberThatWentBackInTimeIsRebuilt(t *testing.T) {
	ctx := context.Background()
	const size = int64(64) << 20
	for _, firstIsOld := range []bool{false, true} {
		c := newCluster(t, size, 2, false)
		model := make([]byte, size)
		write := func(off int64, b byte) {
			t.Helper()
			buf := block.AlignedBuffer(1 << 20)
			for i := range buf {
				buf[i] = b
			}
			copy(model[off:], buf)
			if err := Do(ctx, c.loop, c.e, &block.Request{Op: block.OpWrite, Off: off, Len: 1 << 20, Buf: buf}); err != nil {
				t.Fatal(err)
			}
		}
		attach := func() {
			t.Helper()
			if err := c.attach(); err != nil {
				t.Fatal(err)
			}
		}
		detach := func() {
			t.Helper()
			if err := c.e.Close(); err != nil {
				t.Fatal(err)
			}
			for _, f := range c.far {
				if err := f.s.Release(f.uid); err != nil {
					t.Fatal(err)
				}
			}
		}
		old, good := c.far[1], c.far[0]
		if firstIsOld {
			old, good = good, old
		}
		attach()
		write(0, 1)
		detach()
		folder, kept := filepath.Join(old.disk.Path(), "replicas", old.uid), filepath.Join(t.TempDir(), "kept")
		if out, err := exec.Command("cp", "-a", folder, kept).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		attach()
		write(32<<20, 2)
		detach() // and no intent names this write any more
		attach()
		s := stack.Snapshot{UID: string(api.NewUID()), Name: "s", Created: time.Now().UTC()}
		if err := c.e.Cut(ctx, s); err != nil {
			t.Fatal(err)
		}
		write(48<<20, 3)
		epoch, _ := c.rec.state()
		c.e.SetWhole(epoch, false) // the last write's intent stays, as after an unclean end
		detach()
		if err := os.RemoveAll(folder); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(kept, folder); err != nil {
			t.Fatal(err)
		}
		c.reported = func(_ context.Context, k stack.Snapshot) (bool, error) { return k.Same(s), nil }
		attach()
		for end := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Millisecond) {
			if _, members := c.rec.state(); !slices.Contains(members, old.uid) {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the member that went back in time is not dropped")
			}
		}
		if st, err := c.e.Snapshots(ctx); err == nil && !slices.ContainsFunc(st.Snapshots, s.Same) || err != nil &&
			!api.Is(err, api.Busy) {
			t.Errorf("a snapshot that was reported is gone: %v, %v", st.Snapshots, err)
		}
		p, err := c.back(old.uid)
		for api.Is(err, api.Unavailable) { // the end of the former session ended the new session, too
			p, err = c.back(old.uid)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("rebuilt: %+v", p)
		if _, members := c.rec.state(); len(members) != 2 {
			t.Errorf("members %v", members)
		}
		detach()
		for _, f := range []*far{old, good} {
			m, err := f.disk.Stack(f.uid)
			if err != nil || !slices.ContainsFunc(m.Snapshots, s.Same) {
				t.Errorf("replica %s has snapshots %v, %v", f.uid, m.Snapshots, err)
			}
		}
		c.equal(model)
	}
}
