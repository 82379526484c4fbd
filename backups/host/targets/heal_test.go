package targets

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/driver/kubeapi/apitest"
)

type healFunc func(ctx context.Context, r *repo.Repository, snapshots []blob.ID, o repo.WriterOptions) (int64, error)

// healWorld has a damaged target, and a node with a disk that is not the target's owner.
type healWorld struct {
	*world
	*healReconciler
}

func newHealWorld(t *testing.T, heal healFunc) *healWorld {
	t.Helper()
	w := newWorld(t)
	s := newShelf(t, api.PublishedPassword)
	id := s.save(10_000, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "")
	apitest.EditStatus(w.Server, &api.BackupTarget{ObjectMeta: apitest.Named("default")}, func(t *api.BackupTarget) {
		at := metav1.NewMicroTime(w.clock.now())
		t.Status.RepositoryID, t.Status.OwnerID, t.Status.Available = s.r.ID(), "node-1", true
		t.Status.Verification = &api.VerificationFact{DamageFoundAt: &at, DamagedBlobs: 9}
	})
	apitest.EditStatus(w.Server, w.makeBackup("b", "default", id), func(b *api.Backup) { b.Status.Damaged = true })
	node := &api.Node{ObjectMeta: apitest.Named("node-2")}
	w.Create(node)
	apitest.EditStatus(w.Server, node, func(n *api.Node) {
		n.Status.Disks = []api.DiskStatus{{Path: "/disk", UID: uid(5), Ready: true}} // with no replica of the volume
	})
	r := newReconciler(w.Manager(nil), "node-2", Options{Log: slog.New(slog.DiscardHandler), Cache: t.TempDir(),
		Now: w.clock.now, OpenStore: w.hooks.open, Heal: heal})
	h := &healReconciler{Client: w.Client, node: "node-2", opts: r.opts, repositories: r.repositories,
		jobs: newJobSet(), events: r.events, log: r.opts.Log, heals: map[string]*nodeHeal{}}
	ctx, cancel := context.WithCancel(w.Ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = h.jobs.Start(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return &healWorld{w, h}
}

// look reconciles the target.
func (w *healWorld) look() ctrl.Result {
	w.T.Helper()
	result, err := w.Reconcile(w.Ctx, watch.Request("default"))
	must(w.T, err)
	return result
}

// endHeal waits for the heal in progress, and reconciles the target.
func (w *healWorld) endHeal() ctrl.Result {
	w.T.Helper()
	job := w.heals["default"].job
	if job == nil {
		w.T.Fatal("no heal is in progress")
	}
	<-job.ended
	return w.look()
}

// TestFailedHealPauses: a node that cannot heal pauses, and longer after each failure, although the target changes
// meanwhile.
func TestFailedHealPauses(t *testing.T) {
	var heals atomic.Int32
	w := newHealWorld(t, func(context.Context, *repo.Repository, []blob.ID, repo.WriterOptions) (int64, error) {
		heals.Add(1)
		return 0, errors.New("the disk does not answer")
	})
	w.look()
	for n, pause := range []time.Duration{time.Minute, 2 * time.Minute, 4 * time.Minute} {
		if got := w.endHeal().RequeueAfter; got != pause {
			t.Errorf("pause %v after %d failures, want %v", got, n+1, pause)
		}
		w.clock.advance(pause - time.Second)
		if got := w.look().RequeueAfter; got != time.Second || int(heals.Load()) != n+1 {
			t.Errorf("%d heals; a second is left of the pause, and Reconcile says %v", heals.Load(), got)
		}
		w.clock.advance(time.Second)
		w.look()
	}
	w.heals["default"].failures = 1000
	if got := w.endHeal().RequeueAfter; got != longestPause {
		t.Errorf("the longest pause is %v", got)
	}
}

// TestLateCountsOfAHealStay: the owner learns of all blobs that a node has written again, whatever becomes of the target
// during the heal, and if the heal ends with an error. Another look for damage asks for another heal.
func TestLateCountsOfAHealStay(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*api.BackupTarget)
		err    error
		again  bool
	}{
		"another look": {func(t *api.BackupTarget) {
			later := metav1.NewMicroTime(t.Status.Verification.DamageFoundAt.Add(time.Second))
			t.Status.Verification.DamageFoundAt = &later
		}, nil, true},
		"the store was away": {func(t *api.BackupTarget) { t.Status.Available = false }, nil, false},
		"another owner":      {func(t *api.BackupTarget) { t.Status.OwnerID = "node-2" }, nil, false},
		"no damage is left":  {func(t *api.BackupTarget) { t.Status.Verification.DamageFoundAt = nil }, nil, false},
		"a disk failed":      {func(t *api.BackupTarget) {}, errors.New("the disk does not answer"), false},
	} {
		t.Run(name, func(t *testing.T) {
			gate := make(chan struct{})
			w := newHealWorld(t, func(context.Context, *repo.Repository, []blob.ID, repo.WriterOptions) (int64, error) {
				<-gate
				return 2, c.err
			})
			w.look()
			target := &api.BackupTarget{ObjectMeta: apitest.Named("default")}
			apitest.EditStatus(w.Server, target, c.change)
			w.look()
			close(gate)
			w.endHeal()
			must(t, w.Client.Get(w.Ctx, client.ObjectKeyFromObject(target), target))
			if v := target.Status.Verification; v.HealedBlobs != 2 || v.UncheckedBlobs != 2 {
				t.Errorf("%d blobs count as healed, %d of them as unchecked", v.HealedBlobs, v.UncheckedBlobs)
			}
			if again := w.heals["default"].job != nil; again != c.again {
				t.Errorf("another heal: %v", again)
			}
		})
	}
}

// conflicts refuses the first mark of a Backup, and demands that the marks come before the time of the damage.
type conflicts struct {
	client.Client
	testing.TB
	live    client.Reader
	refused atomic.Bool
}

type conflictStatus struct {
	client.SubResourceWriter
	*conflicts
}

func (c *conflicts) Status() client.SubResourceWriter { return conflictStatus{c.Client.Status(), c} }

func (s conflictStatus) Update(ctx context.Context, o client.Object, opts ...client.SubResourceUpdateOption) error {
	switch o := o.(type) {
	case *api.Backup:
		if o.Status.Damaged && s.refused.CompareAndSwap(false, true) {
			return apierrors.NewConflict(schema.GroupResource{Resource: "backups"}, o.Name, errors.New("changed"))
		}
	case *api.BackupTarget:
		b := &api.Backup{}
		if v := o.Status.Verification; v == nil || v.DamageFoundAt == nil {
			break
		}
		if err := s.live.Get(ctx, client.ObjectKey{Name: "b"}, b); err != nil || !b.Status.Damaged {
			s.Errorf("the target is damaged, and its Backup has no mark; %v", err)
		}
	}
	return s.SubResourceWriter.Update(ctx, o, opts...)
}

// TestMarksComeBeforeHeals: other nodes heal the backups with a mark, when the target says that damage was found. A mark
// that a conflict delays, delays the target. A mark that comes later asks for further heals.
func TestMarksComeBeforeHeals(t *testing.T) {
	t.Parallel()
	var c *conflicts
	w := startWorld(t, func(r *targetReconciler) {
		c = &conflicts{Client: r.Client, TB: t, live: r.live}
		r.Client = c
	}, "node-1")
	s := newShelf(t, api.PublishedPassword)
	s.save(60_000, factsOf("b").Tags()...)
	w.addTarget("default", s.url(), "")
	w.awaitReason("default", api.ReasonAvailable, "")
	w.awaitBackup("b", "found", func(b *api.Backup) bool { return b.Status.SnapshotID != "" })
	s.damageData(nil)
	found := w.verify("default").Status.Verification.DamageFoundAt
	if found == nil || !c.refused.Load() {
		t.Fatalf("damage was found at %v; a mark was refused: %v", found, c.refused.Load())
	}
	w.clock.advance(time.Second)
	apitest.EditStatus(w.Server, w.backups()["b"], func(b *api.Backup) { b.Status.Damaged = false })
	w.wake("default")
	w.awaitTarget("default", "found again", func(t *api.BackupTarget) bool {
		return t.Status.Verification.DamageFoundAt.After(found.Time)
	})
}
