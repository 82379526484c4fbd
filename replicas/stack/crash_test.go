package stack

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/file/lossy"
	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/stack/format"
)

// power is a disk which can lose power, with the loop of its process.
type power struct {
	*uring.Loop
	fs     *lossy.FS
	root   string
	window int64 // of merges
}

func newPower(t testing.TB, loop *uring.Loop, root string) *power {
	t.Helper()
	f, err := lossy.New(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &power{loop, f, root, 5 << 20} // small layers have two windows
}

// ramDir is a folder in memory if /dev/shm has room. The lossy back end alone decides which data is durable.
func ramDir(t testing.TB) string {
	t.Helper()
	const shm = "/dev/shm"
	var st unix.Statfs_t
	if err := unix.Statfs(shm, &st); err != nil || st.Type != unix.TMPFS_MAGIC || int64(st.Bavail)*st.Bsize < 512<<20 {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "drover-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// freshPower formats a new disk.
func freshPower(t testing.TB, loop *uring.Loop) *power {
	t.Helper()
	p := newPower(t, loop, ramDir(t))
	if err := initDisk(p.fs, p.root); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *power) disk(t testing.TB) *Disk {
	t.Helper()
	d, err := openOn(p.fs, p.root)
	if err != nil {
		t.Fatal(err)
	}
	d.window, d.piece = p.window, 1
	return d
}

// crash is the disk after a loss of power.
func (p *power) crash(t testing.TB, rng *rand.Rand) *power {
	t.Helper()
	into := filepath.Join(ramDir(t), "disk")
	if err := p.fs.Crash(rng, into); err != nil {
		t.Fatal(err)
	}
	after := newPower(t, p.Loop, into)
	after.window = p.window
	return after
}

// power is the ring of the process, too: changes of data count as steps of the disk, and the disk is notified of syncs.

func (p *power) refuse(op *uring.Op) { p.Post(func() { op.Done(op, -int32(unix.EIO)) }) }

func (p *power) Write(op *uring.Op, fd int, buf []byte, off int64) {
	if p.fs.Step() != nil {
		p.refuse(op)
		return
	}
	p.Loop.Write(op, fd, buf, off)
}

func (p *power) Fallocate(op *uring.Op, fd int, mode uint32, off, n int64) {
	if p.fs.Step() != nil {
		p.refuse(op)
		return
	}
	p.Loop.Fallocate(op, fd, mode, off, n)
}

func (p *power) Fdatasync(op *uring.Op, fd int) {
	if p.fs.Synced(fd) != nil {
		p.refuse(op)
		return
	}
	p.Post(func() { op.Done(op, 0) })
}

// expect has the values which every sector of a volume may have. A single number fills a block.
type expect map[int64][]uint64

const perBlock = blockSize / 512

// add allows the value v for the blocks [b, b+n) from now on.
func (e expect) add(b, n int64, v uint64) {
	for i := b * perBlock; i < (b+n)*perBlock; i++ {
		if len(e[i]) == 0 {
			e[i] = []uint64{0}
		}
		e[i] = append(e[i], v)
	}
}

func (e expect) put(b int64, v uint64) {
	for i := b * perBlock; i < (b+1)*perBlock; i++ {
		e[i] = []uint64{v}
	}
}

// durable leaves every sector its last value only.
func (e expect) durable() {
	for b, vs := range e {
		e[b] = vs[len(vs)-1:]
	}
}

func fill(b []byte, v uint64) {
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], v)
	}
}

func (e expect) check(t testing.TB, d *Disk, on ring, uid string) {
	t.Helper()
	r, err := d.openReplica(context.Background(), uid, on)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	many := block.AlignedBuffer(1 << 20)
	told := map[int64]bool{} // the MiBs with expected values
	for s := range e {
		told[s*512>>20] = true
	}
	for b := int64(0); b < r.meta.Size>>blockBits; b++ {
		if b%256 == 0 {
			n := min(1<<20, r.meta.Size-b<<blockBits)
			mustIssue(t, on, r, block.OpRead, b<<blockBits, n, many[:n])
			if !told[b/256] && format.IsZero(many[:n]) {
				b += 255
				continue
			}
		}
		buf := many[b%256<<blockBits:][:blockSize]
		for s := range perBlock {
			may := e[b*perBlock+s]
			if len(may) == 0 {
				may = []uint64{0}
			}
			sector := buf[s*512:][:512]
			v := binary.LittleEndian.Uint64(sector)
			for i := 0; i < len(sector); i += 8 {
				if binary.LittleEndian.Uint64(sector[i:]) != v || !slices.Contains(may, v) {
					t.Fatalf("block %d, sector %d: %#x, may be %#x", b, s, v, may)
				}
			}
			e[b*perBlock+s] = []uint64{v} // the value after recovery stays
		}
	}
}

// checkLayers compares layers with the first expected value of each sector.
func (e expect) checkLayers(t testing.TB, d *Disk, layers []string, size int64) {
	t.Helper()
	src, err := d.OpenStack(layers, size)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	got := make([]byte, size)
	if err := block.Copy(context.Background(), arraySink(got), src, block.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	for s := range size / 512 {
		want := uint64(0)
		if len(e[s]) > 0 {
			want = e[s][0]
		}
		for i := s * 512; i < (s+1)*512; i += 8 {
			if v := binary.LittleEndian.Uint64(got[i:]); v != want {
				t.Fatalf("snapshot, sector %d: %#x instead of %#x", s, v, want)
			}
		}
	}
}

func filledLayer(t testing.TB, d *Disk, size int64, blocks []int64, v uint64, e expect) string {
	t.Helper()
	uid := string(api.NewUID())
	w, err := d.Create(context.Background(), uid, size)
	if err != nil {
		t.Fatal(err)
	}
	buf := block.AlignedBuffer(int(blockSize))
	for _, b := range blocks {
		fill(buf, v+uint64(b))
		if _, err := w.WriteAt(buf, b<<blockBits); err != nil {
			t.Fatal(err)
		}
		e.put(b, v+uint64(b))
	}
	if _, _, err := w.Seal(context.Background()); err != nil {
		t.Fatal(err)
	}
	return uid
}

// TestPowerLossUnderIO cuts the power at random points under random I/O, several times in the life of a replica.
// Durable data and snapshots survive.
func TestPowerLossUnderIO(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	for layers := range 3 {
		for seed := range uint64(8) {
			t.Run(fmt.Sprintf("layers=%d,seed=%d", layers, seed), func(t *testing.T) {
				t.Parallel()
				testPowerLoss(t, startLoop(t), rand.New(rand.NewPCG(seed, uint64(layers))), layers)
			})
		}
	}
}

func testPowerLoss(t *testing.T, loop *uring.Loop, rng *rand.Rand, layers int) {
	const size = int64(64) << blockBits
	ctx := context.Background()
	p := freshPower(t, loop)
	d := p.disk(t)
	e := make(expect)
	spec := Spec{UID: string(api.NewUID()), Volume: "v", VolumeUID: string(api.NewUID()), Size: size}
	for k := range layers {
		var blocks []int64
		for b := range int64(64) {
			if rng.IntN(2) == 0 {
				blocks = append(blocks, b)
			}
		}
		spec.Layers = append(spec.Layers, filledLayer(t, d, size, blocks, uint64(k+1)<<32, e))
	}
	if err := d.CreateReplica(ctx, spec); err != nil {
		t.Fatal(err)
	}
	next := uint64(1) << 40
	buf := block.AlignedBuffer(16 << blockBits)
	type cut struct {
		snapshot string
		want     expect
	}
	var cuts []cut
	for round := range 5 {
		r, err := d.openReplica(ctx, spec.UID, p)
		if err != nil {
			t.Fatal(err)
		}
		p.fs.KillAfter(1 + rng.IntN(60))
		_ = r.Adopt(ctx, int64(round+1), 1, []string{spec.UID})
		for !p.fs.Killed() {
			b := rng.Int64N(64)
			n := 1 + rng.Int64N(min(16, 64-b))
			var err error
			switch rng.IntN(10) {
			case 7:
				s := Snapshot{UID: string(api.NewUID()), Layer: string(api.NewUID())}
				if s.Name = s.UID; rng.IntN(3) == 0 {
					s.Name = "" // a layer without a snapshot may be merged
				}
				if err = r.Cut(ctx, s); err == nil {
					e.durable()
					if s.Name != "" {
						cuts = append(cuts, cut{s.UID, maps.Clone(e)})
					}
				}
			case 8:
				if uids, lerr := d.Unfinished(); lerr == nil && len(uids) > 0 {
					err = d.Finish(ctx, uids[0])
				}
			case 9:
				_, err = r.Merge(ctx, MergeOptions{})
				if api.Is(err, api.Busy) {
					err = nil
				}
			case 0:
				if err = issue(p, r, block.OpFlush, 0, 0, nil, false); err == nil {
					e.durable()
				}
			case 1, 2:
				e.add(b, n, 0)
				op := []block.Op{block.OpDiscard, block.OpZero}[rng.IntN(2)]
				err = issue(p, r, op, b<<blockBits, n<<blockBits, nil, false)
			default:
				v := next
				next++
				if rng.IntN(4) == 0 {
					v = 0
				}
				w := buf[:n<<blockBits]
				fill(w, v)
				e.add(b, n, v)
				fua := rng.IntN(5) == 0
				if err = issue(p, r, block.OpWrite, b<<blockBits, n<<blockBits, w, fua); err == nil && fua {
					e.durable() // the flush behind the write covers all earlier writes
				}
			}
			if err != nil && !p.fs.Killed() {
				t.Fatal(err)
			}
		}
		_ = r.Close() // the dead process makes nothing durable any more
		p = p.crash(t, rng)
		d = p.disk(t)
		m, err := d.readStack(spec.UID)
		if err != nil || m.Epoch > int64(round+1) {
			t.Fatalf("%+v, %v", m, err)
		}
		if rng.IntN(2) == 0 {
			if err := d.Collect(ctx, 0); err != nil {
				t.Fatal(err)
			}
		}
		e.check(t, d, p, spec.UID)
		for _, c := range cuts {
			k := slices.IndexFunc(m.Snapshots, func(s Snapshot) bool { return s.UID == c.snapshot })
			if k < 0 {
				t.Fatalf("snapshot %s, which was taken, is not in %+v", c.snapshot, m.Snapshots)
			}
			chain, err := m.Chain(m.Snapshots[k].Layer)
			if err != nil {
				t.Fatal(err)
			}
			if m.Merge != nil && slices.Contains(chain, m.Merge.Lower) {
				continue // readable after the merge
			}
			c.want.checkLayers(t, d, chain, size)
		}
	}
}
