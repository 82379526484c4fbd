package sanity_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"drover.io/drover/block/suite"
)

// metadata is a stream of either kind.
type metadata interface {
	GetBlockMetadata() []*csi.BlockMetadata
	GetVolumeCapacityBytes() int64
	GetBlockMetadataType() csi.BlockMetadataType
}

// blocks reads a stream into its set of blocks of 4 KiB, and checks the rules of every stream.
func blocks[M metadata](t *testing.T, size int64, most int, recv func() (M, error)) map[int64]bool {
	t.Helper()
	set, at := map[int64]bool{}, int64(0)
	for {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return set
		}
		must(t, err)
		if m.GetVolumeCapacityBytes() != size || m.GetBlockMetadataType() != csi.BlockMetadataType_VARIABLE_LENGTH ||
			len(m.GetBlockMetadata()) > most {
			t.Fatalf("message %+v", m)
		}
		for _, b := range m.GetBlockMetadata() {
			if b.ByteOffset < at || b.SizeBytes <= 0 || b.ByteOffset%4096 != 0 || b.ByteOffset+b.SizeBytes > size {
				t.Fatalf("%d+%d after %d", b.ByteOffset, b.SizeBytes, at)
			}
			at = b.ByteOffset + b.SizeBytes
			for o := b.ByteOffset; o < at; o += 4096 {
				set[o/4096] = true
			}
		}
	}
}

// snapshotMetadata compares the service's answers about random snapshots with the bytes of the snapshots.
func snapshotMetadata(t *testing.T, w *world) {
	const size = 96 * mib
	client := csi.NewSnapshotMetadataClient(w.conn)
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	a, err := w.create("meta", size, blockCap())
	must(t, err)
	must(t, a.up())
	f, err := os.OpenFile(a.target, os.O_RDWR|syscall.O_DIRECT, 0)
	must(t, err)
	content, written := make([]byte, size), map[int64]bool{}
	var ids []string
	var held []map[int64]bool // blocks that hold data
	var models [][]byte
	for i := range 5 {
		for range 60 {
			off := rng.Int64N(size/4096) * 4096
			n := min(4096*(1+rng.Int64N(64)), size-off)
			b := aligned(int(n))
			if rng.IntN(4) == 0 { // discard
				must(t, syscallFallocate(f, off, n))
			} else {
				for k := range b {
					b[k] = byte(rng.Uint32()) | 1
				}
				_, err := f.WriteAt(b, off)
				must(t, err)
			}
			copy(content[off:], b)
			for o := off; o < off+n; o += 4096 {
				written[o/4096] = b[0] != 0
			}
		}
		id, err := w.snap(a.id, "meta-"+string(rune('a'+i)))
		must(t, err)
		now := map[int64]bool{}
		for k, is := range written {
			if is {
				now[k] = true
			}
		}
		ids, held, models = append(ids, id), append(held, now), append(models, bytes.Clone(content))
	}
	same := func(what string, got, want map[int64]bool) {
		t.Helper()
		for k := range want {
			if !got[k] {
				t.Fatalf("%s: block %d is not told of", what, k)
			}
		}
		for k := range got {
			if !want[k] {
				t.Fatalf("%s: block %d is told of", what, k)
			}
		}
	}
	for i, id := range ids {
		s, err := client.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: id, MaxResults: 7})
		must(t, err)
		same("allocated "+id, blocks(t, size, 7, s.Recv), held[i])
		for j, base := range ids {
			want := map[int64]bool{}
			for k := int64(0); k < size/4096; k++ {
				if !bytes.Equal(models[i][k*4096:][:4096], models[j][k*4096:][:4096]) {
					want[k] = true
				}
			}
			d, err := client.GetMetadataDelta(t.Context(),
				&csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: id})
			must(t, err)
			same(base+" to "+id, blocks(t, size, 1024, d.Recv), want)
			from := rng.Int64N(size/4096) * 4096
			d, err = client.GetMetadataDelta(t.Context(),
				&csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: id, StartingOffset: from})
			must(t, err)
			for k := range want {
				if k < from/4096 {
					delete(want, k)
				}
			}
			same(base+" to "+id+", later", blocks(t, size, 1024, d.Recv), want)
		}
	}
	code := func(want codes.Code, req *csi.GetMetadataAllocatedRequest) {
		t.Helper()
		s, err := client.GetMetadataAllocated(t.Context(), req)
		must(t, err)
		_, err = s.Recv()
		wantCode(t, err, want)
	}
	code(codes.InvalidArgument, &csi.GetMetadataAllocatedRequest{})
	code(codes.NotFound, &csi.GetMetadataAllocatedRequest{SnapshotId: "snap://meta/none"})
	code(codes.OutOfRange, &csi.GetMetadataAllocatedRequest{SnapshotId: ids[0], StartingOffset: size})
	must(t, f.Close())
	w.unsnap(ids...)
	do(t, a.down, a.remove)
}

// syscallFallocate punches a hole into a block device: the discarded range reads as zeros.
func syscallFallocate(f *os.File, off, n int64) error {
	const keepSize, punchHole = 1, 2
	return syscall.Fallocate(int(f.Fd()), keepSize|punchHole, off, n)
}
