package sanity_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// snapshotWords: CSI's answers about snapshots are the same for every caller and every call, and refusals have the
// right codes.
func snapshotWords(t *testing.T, w *world) {
	a, err := w.create("words", 64*mib, blockCap())
	must(t, err)
	b, err := w.create("words-b", 64*mib, blockCap())
	must(t, err)
	ask := func(name, of string, parameters ...string) (*csi.Snapshot, error) {
		req := &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of, Parameters: map[string]string{}}
		for i := 0; i < len(parameters); i += 2 {
			req.Parameters[parameters[i]] = parameters[i+1]
		}
		ctx, cancel := timeout(t)
		defer cancel()
		res, err := w.controller.CreateSnapshot(ctx, req)
		return res.GetSnapshot(), err
	}
	first, err := ask("words-1", a.id, "type", "snap")
	must(t, err)
	image, err := ask("words-image", a.id, "type", "bi")
	must(t, err)
	for _, one := range []struct {
		is   *csi.Snapshot
		name string
		kind string
	}{{first, "words-1", "snap"}, {image, "words-image", "bi"}} {
		if !one.is.ReadyToUse || one.is.CreationTime == nil || one.is.SizeBytes != 64*mib || one.is.SourceVolumeId != a.id {
			t.Errorf("%+v", one.is)
		}
		again, err := ask(one.name, a.id, "type", one.kind)
		must(t, err)
		if !proto.Equal(again, one.is) {
			t.Errorf("again: %+v, not %+v", again, one.is)
		}
		ctx, cancel := timeout(t)
		got, err := w.controller.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: one.is.SnapshotId})
		must(t, err)
		list, err := w.controller.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: one.is.SnapshotId})
		must(t, err)
		cancel()
		if !proto.Equal(got.Snapshot, one.is) || len(list.Entries) != 1 || !proto.Equal(list.Entries[0].Snapshot, one.is) {
			t.Errorf("%+v and %+v, not %+v", got.Snapshot, list.Entries, one.is)
		}
		if _, err := ask(one.name, b.id, "type", one.kind); status.Code(err) != codes.AlreadyExists {
			t.Errorf("%s of another volume: %v", one.name, err)
		}
	}
	for _, c := range []struct {
		name, of string
		with     []string
		want     codes.Code
	}{
		{"", a.id, nil, codes.InvalidArgument}, {"words-2", "", nil, codes.InvalidArgument},
		{"words-2", "none", nil, codes.NotFound}, {"words-2", a.id, []string{"type", "tape"}, codes.InvalidArgument},
		{"words-2", a.id, []string{"type", "bak"}, codes.Unavailable}, // without a backup target
		{"words-2", a.id, []string{"colour", "red"}, codes.InvalidArgument},
		{"words-2", a.id, []string{"exportType", "raw"}, codes.InvalidArgument},
		{"words-2", a.id, []string{"type", "bi", "exportType", "vmdk"}, codes.InvalidArgument},
	} {
		if _, err := ask(c.name, c.of, c.with...); status.Code(err) != c.want {
			t.Errorf("%+v: %v", c, err)
		}
	}
	w.unsnap("nonsense", "snap://", "snap://a", "snap://a/b/c", "snap://none/none", "snap://"+b.id+"/words-1", "bak://a/b",
		"bi://backing?", "bi://backing?backingImage=none", "group://none")
	ctx, cancel := timeout(t)
	defer cancel()
	_, err = w.controller.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("no id: %v", err)
	}
	for _, id := range []string{"nonsense", "snap://" + b.id + "/words-1", "bi://backing?backingImage=none"} {
		if _, err := w.controller.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id}); status.Code(err) != codes.NotFound {
			t.Errorf("%s: %v", id, err)
		}
		if _, err := w.from("snap://none/none", "words-c", 0, blockCap()); status.Code(err) != codes.NotFound {
			t.Errorf("restore of nothing: %v", err)
		}
	}
	if _, err := w.from(first.SnapshotId, "words-small", 32*mib, blockCap()); status.Code(err) != codes.OutOfRange {
		t.Errorf("smaller than the snapshot: %v", err)
	}
	// Snapshots outlive their volume.
	do(t, a.remove)
	list, err := w.controller.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: first.SnapshotId})
	must(t, err)
	if len(list.Entries) != 1 || !proto.Equal(list.Entries[0].Snapshot, first) {
		t.Errorf("without its volume: %+v", list.Entries)
	}
	for i, s := range []*csi.Snapshot{first, image} {
		c, err := w.from(s.SnapshotId, []string{"words-c", "words-d"}[i], 128*mib, blockCap())
		must(t, err)
		do(t, c.remove)
	}
	w.unsnap(first.SnapshotId, image.SnapshotId, first.SnapshotId, image.SnapshotId)
	do(t, b.remove)
}
