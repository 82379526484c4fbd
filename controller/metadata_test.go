package controller

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/block/suite"
)

// told is a replica's answer about a snapshot: the changed blocks.
type told struct {
	blocks []bool
	closed *int
}

func (c told) Size() int64 { return int64(len(c.blocks)) * api.BlockSize }

func (c told) Next(off int64) (e block.Extent, err error) {
	from := off / api.BlockSize
	for from < int64(len(c.blocks)) && !c.blocks[from] {
		from++
	}
	if from == int64(len(c.blocks)) {
		return e, io.EOF
	}
	to := from
	for to < int64(len(c.blocks)) && c.blocks[to] {
		to++
	}
	return block.Extent{Off: from * api.BlockSize, Len: (to - from) * api.BlockSize}, nil
}

func (c told) Close() error { *c.closed++; return nil }

// listener takes the messages of a stream.
type listener struct {
	grpc.ServerStream
	ctx  context.Context
	got  []*csi.GetMetadataDeltaResponse
	each func()
}

func (l *listener) Context() context.Context { return l.ctx }

func (l *listener) Send(m *csi.GetMetadataDeltaResponse) error {
	if l.got = append(l.got, m); l.each != nil {
		l.each()
	}
	return nil
}

// TestMetadataOfSeveralReplicas: any reachable member supplies the changed blocks; the controller asks no replica
// outside of the members.
func TestMetadataOfSeveralReplicas(t *testing.T) {
	seed := suite.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	model := make([]bool, 4096)
	for b := 0; b < len(model); {
		n := 1 + rng.IntN(9)
		for is := rng.IntN(2) == 0; n > 0 && b < len(model); n-- {
			model[b] = is
			b++
		}
	}
	make1 := func(o client.Object) {
		must(t, store.Create(t.Context(), o))
		t.Cleanup(func() {
			must(t, client.IgnoreNotFound(store.Delete(context.Background(), o)))
		})
	}
	vol := &api.Volume{Spec: api.VolumeSpec{Size: 16 << 20, NumberOfReplicas: 3}}
	vol.Name = "meta-three"
	make1(vol)
	vol.Status.UID = api.NewUID()
	for _, name := range []string{"meta-three.1", "meta-three.2", "meta-three.3", "meta-three.0-left-out"} {
		r := &api.Replica{Spec: api.ReplicaSpec{UID: api.NewUID(), Volume: vol.Name, VolumeUID: vol.Status.UID,
			Disk: api.NewUID(), Node: "n", Size: 16 << 20}}
		r.Name = name
		make1(r)
		if len(vol.Status.Members) < 3 {
			vol.Status.Members = append(vol.Status.Members, name)
		}
	}
	must(t, store.Status().Update(t.Context(), vol))
	var ids []string
	for _, name := range []string{"meta-three-a", "meta-three-b"} {
		s := &api.Snapshot{Spec: api.SnapshotSpec{Volume: vol.Name, CreateSnapshot: true}}
		s.Name = name
		make1(s)
		s.Status.UID, s.Status.VolumeUID, s.Status.ReadyToUse = api.NewUID(), vol.Status.UID, true
		must(t, store.Status().Update(t.Context(), s))
		ids = append(ids, "snap://"+vol.Name+"/"+name)
	}
	var away map[string]error // by replica; without an error the replica answers
	opened, closed := 0, 0
	m := NewMetadata(door, func(_ context.Context, r *api.Replica, base, target api.UID) (Changes, error) {
		switch {
		case !slices.Contains(vol.Status.Members, r.Name):
			t.Errorf("replica %s is asked, which is no member", r.Name)
		case base == "" || target == "" || base == target:
			t.Errorf("snapshots %q and %q are asked for", base, target)
		}
		if err := away[r.Name]; err != nil {
			return nil, err
		}
		opened++
		return told{model, &closed}, nil
	})
	ask := func(l *listener, from int64, most int32) error {
		l.ctx = t.Context()
		return m.GetMetadataDelta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: ids[0], TargetSnapshotId: ids[1],
			StartingOffset: from, MaxResults: most}, l)
	}
	check := func(from int64, most int32) {
		t.Helper()
		l := &listener{}
		must(t, ask(l, from, most))
		got := make([]bool, len(model))
		for _, r := range l.got {
			if len(r.BlockMetadata) > int(most) || r.VolumeCapacityBytes != 16<<20 {
				t.Fatalf("%d ranges of at most %d, of %d bytes", len(r.BlockMetadata), most, r.VolumeCapacityBytes)
			}
			for _, b := range r.BlockMetadata {
				for o := b.ByteOffset; o < b.ByteOffset+b.SizeBytes; o += api.BlockSize {
					got[o/api.BlockSize] = true
				}
			}
		}
		want := slices.Clone(model)
		clear(want[:from/api.BlockSize])
		if !slices.Equal(got, want) {
			t.Fatalf("from %d, at most %d: it tells of other blocks than there are", from, most)
		}
	}
	lost := api.Errorf(api.Unavailable, "disk is not there")
	lacks := api.Errorf(api.NotFound, "the finished layer does not exist")
	for _, away = range []map[string]error{nil, {"meta-three.1": lost}, {"meta-three.1": lacks},
		{"meta-three.1": lost, "meta-three.2": lacks}, {"meta-three.1": lacks, "meta-three.3": lost}} {
		for _, most := range []int32{1, 7, 1000} {
			check(0, most)
			check(rng.Int64N(int64(len(model)))*api.BlockSize, most)
		}
	}
	for _, why := range []error{lost, lacks} {
		away = map[string]error{"meta-three.1": why, "meta-three.2": lacks, "meta-three.3": lost}
		l := &listener{}
		wantKind(t, ask(l, 0, 7), api.Unavailable, ids[1], "meta-three.2", "finished layer does not exist", "try again")
		if len(l.got) > 0 {
			t.Error("a stream without a replica has messages")
		}
	}
	away = nil
	ctx, cancel := context.WithCancel(t.Context())
	l := &listener{ctx: ctx, each: cancel}
	err := m.GetMetadataDelta(&csi.GetMetadataDeltaRequest{BaseSnapshotId: ids[0], TargetSnapshotId: ids[1], MaxResults: 1}, l)
	if !errors.Is(err, context.Canceled) || len(l.got) != 1 {
		t.Errorf("a stream that is cancelled after a message: %d messages, %v", len(l.got), err)
	}
	if opened == 0 || opened != closed {
		t.Errorf("%d were opened, %d closed", opened, closed)
	}
}
