package sanity_test

import (
	"context"
	le "encoding/binary"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
)

// order is 32 writers, in a short run 8. Each writer writes a number to a block of volume a, then the same number to
// a block of volume b, and continues with the next number. So at any instant b has the number of a, or the number
// before.
type order struct {
	a, b string // devices
	stop atomic.Bool
	wg   sync.WaitGroup
	errs chan error
	n    atomic.Int64

	files []*os.File
}

const writers = 32

func (o *order) start(t *testing.T) {
	o.errs = make(chan error, writers)
	for _, name := range []string{o.a, o.b} {
		f, err := os.OpenFile(name, os.O_RDWR|syscall.O_DIRECT, 0)
		must(t, err)
		o.files = append(o.files, f)
	}
	n := int64(writers)
	if !suite.All() {
		n /= 4
	}
	for w := range n {
		o.wg.Go(func() {
			buf := aligned(4096)
			pace := time.NewTicker(5 * loadPace())
			defer pace.Stop()
			for n := uint64(1); !o.stop.Load(); n++ {
				le.LittleEndian.PutUint64(buf, n)
				for _, f := range o.files {
					if _, err := f.WriteAt(buf, w*4096); err != nil {
						o.errs <- err
						return
					}
				}
				o.n.Add(1)
				<-pace.C
			}
		})
	}
	t.Cleanup(o.end)
}

func (o *order) end() {
	o.stop.Store(true)
	o.wg.Wait()
	for _, f := range o.files {
		f.Close()
	}
	o.files = nil
}

// numbers reads the last number of each writer.
func (p *pod) numbers() (list [writers]uint64) {
	f, err := os.Open(p.target)
	must(p.w.t, err)
	defer f.Close()
	b := make([]byte, 4096*writers)
	_, err = f.ReadAt(b, 0)
	must(p.w.t, err)
	for i := range list {
		list[i] = le.LittleEndian.Uint64(b[i*4096:])
	}
	return list
}

// groupOrder: a group of snapshots is of one instant, under load, with detached volumes in the group, and also when a
// kill hits the data process during the cut.
func groupOrder(t *testing.T, w *world) {
	var pods []*pod
	for _, name := range []string{"order-a", "order-b", "order-idle"} {
		p, err := w.create(name, 64*mib, blockCap())
		must(t, err)
		pods = append(pods, p)
	}
	do(t, pods[0].up, pods[1].up)
	o := &order{a: pods[0].target, b: pods[1].target}
	o.start(t)
	ids := []string{pods[0].id, pods[1].id, pods[2].id}
	var last *csi.VolumeGroupSnapshot
	rounds := suite.Count(t, "DROVER_ROUNDS", 3, 12)
	for i := range rounds {
		name := fmt.Sprintf("order-%d", i)
		done := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), settle)
			defer cancel()
			res, err := w.groups().CreateVolumeGroupSnapshot(ctx,
				&csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: ids})
			if err == nil {
				last = res.GroupSnapshot
			}
			done <- err
		}()
		if i%2 == 1 {
			if pid := w.child("data"); pid != 0 {
				must(t, syscall.Kill(pid, syscall.SIGKILL))
			}
		}
		must(t, <-done)
		if !last.ReadyToUse || len(last.Snapshots) != 3 || last.CreationTime == nil {
			t.Fatalf("%+v", last)
		}
		var is [2][writers]uint64
		for _, s := range last.Snapshots {
			if s.GroupSnapshotId != last.GroupSnapshotId || s.CreationTime.AsTime() != last.CreationTime.AsTime() {
				t.Errorf("%+v", s)
			}
			if s.SourceVolumeId == pods[2].id {
				continue
			}
			p, err := w.from(s.SnapshotId, fmt.Sprintf("%s-of-%s", name, s.SourceVolumeId), 0, blockCap())
			must(t, err)
			must(t, p.up())
			if s.SourceVolumeId == pods[0].id {
				is[0] = p.numbers()
			} else {
				is[1] = p.numbers()
			}
			do(t, p.down, p.remove)
		}
		for k := range writers {
			if a, b := is[0][k], is[1][k]; a != b && a != b+1 {
				t.Errorf("group %d, writer %d: %d on a, %d on b", i, k, a, b)
			}
		}
		if i == 0 {
			_, err := w.controller.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: last.Snapshots[0].SnapshotId})
			wantCode(t, err, codes.InvalidArgument, "part of snapshot group")
			_, err = w.groups().CreateVolumeGroupSnapshot(t.Context(),
				&csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: ids[:2]})
			wantCode(t, err, codes.AlreadyExists)
			_, err = w.groups().GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{
				GroupSnapshotId: last.GroupSnapshotId, SnapshotIds: []string{"snap://a/b"}})
			wantCode(t, err, codes.InvalidArgument)
		}
		_, err := w.groups().DeleteVolumeGroupSnapshot(t.Context(),
			&csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: last.GroupSnapshotId})
		must(t, err)
		_, err = w.groups().GetVolumeGroupSnapshot(t.Context(),
			&csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: last.GroupSnapshotId})
		wantCode(t, err, codes.NotFound)
	}
	o.end()
	select {
	case err := <-o.errs:
		t.Error(err)
		log, _ := os.ReadFile(w.path("state", "log", "data.log"))
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN") || strings.Contains(line, "resumed") ||
				strings.Contains(line, "panic") {
				t.Log(line)
			}
		}
	default:
	}
	var left api.SnapshotList
	must(t, w.objects.List(t.Context(), &left))
	for _, s := range left.Items {
		if s.Spec.Group != "" {
			t.Errorf("snapshot %s of group %s is left", s.Name, s.Spec.Group)
		}
	}
	w.must("snapshot", "create", "--group", "cli", ids[0], ids[2])
	w.refused(5, "as a whole", "snapshot", "delete", "cli-"+ids[0])
	w.refused(5, "already", "snapshot", "create", "--group", "cli", ids[0])
	w.must("snapshot", "delete", "--group", "cli")
	do(t, pods[0].down, pods[1].down)
	for _, p := range pods {
		do(t, p.remove)
	}
	t.Logf("%d groups under %d pairs of writes, every second with a kill", rounds, o.n.Load())
}

func (w *world) groups() csi.GroupControllerClient { return csi.NewGroupControllerClient(w.conn) }
