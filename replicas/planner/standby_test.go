package planner

import (
	"context"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/driver/kubeapi/apitest"
)

const (
	storeOfTest    = "file:///store"
	followedOfTest = storeOfTest + "?volume=db"
)

// backupOfTest is the n-th backup of volume db; n grows with the time of the snapshot.
func backupOfTest(n int) *api.Backup {
	name := "b" + string(rune('0'+n))
	b := &api.Backup{ObjectMeta: apitest.Named(name), Spec: api.BackupSpec{Volume: "db"}}
	b.Status.State, b.Status.URL = api.BackupCompleted, api.BackupURL(storeOfTest, name, "db")
	b.Status.SnapshotID = strings.Repeat(name, 32)
	b.Status.SnapshotCreatedAt = time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC).Format(time.RFC3339)
	b.Status.VolumeSize = 64 << 20
	return b
}

func heldOfTest(n int) *api.StandbyBackup {
	b := backupOfTest(n)
	return &api.StandbyBackup{Backup: b.Name, URL: b.Status.URL, SnapshotCreatedAt: b.Status.SnapshotCreatedAt,
		Size: b.Status.VolumeSize, BackingImage: "restore-u-" + b.Status.SnapshotID[:12]}
}

func imageOfTest(state api.ImageState, copies int32) *api.BackingImage {
	return &api.BackingImage{Status: api.BackingImageStatus{State: state, ReadyCopies: copies}}
}

// TestStandbyHoldsAWholeBackup: a standby volume fetches newer backups only, gives the held one up for a whole one only,
// and keeps the held one whatever happens to its backups and its target.
func TestStandbyHoldsAWholeBackup(t *testing.T) {
	ready, single := imageOfTest(api.ImageReady, 2), imageOfTest(api.ImageReady, 1)
	failed, coming := imageOfTest(api.ImageFailed, 0), imageOfTest(api.ImageInProgress, 0)
	view := func(newest int, held, next *api.BackingImage) standbyView {
		view := standbyView{held: held, next: next, copies: 2}
		if newest > 0 {
			view.backups = []*api.Backup{backupOfTest(newest)}
		}
		return view
	}
	for what, c := range map[string]struct {
		held, next int // the backups of the status before; 0: none
		view       standbyView
		activating bool
		wantHeld   int
		wantNext   int
	}{
		"nothing":                        {0, 0, view(0, nil, nil), false, 0, 0},
		"the first backup":               {0, 0, view(1, nil, nil), false, 0, 1},
		"the first backup arrives":       {0, 1, view(1, nil, coming), false, 0, 1},
		"the first backup is there":      {0, 1, view(1, nil, ready), false, 1, 0},
		"nothing new":                    {1, 0, view(1, ready, nil), false, 1, 0},
		"a newer backup":                 {1, 0, view(2, ready, nil), false, 1, 2},
		"a newer backup arrives":         {1, 2, view(2, ready, coming), false, 1, 2},
		"too few copies":                 {1, 2, view(2, ready, single), false, 1, 2},
		"no more copies than before":     {1, 2, view(2, single, single), false, 2, 0},
		"the newer backup is whole":      {1, 2, view(2, ready, ready), false, 2, 0},
		"a third one meanwhile":          {1, 2, view(3, ready, coming), false, 1, 2},
		"a third one after a failure":    {1, 2, view(3, ready, failed), false, 1, 3},
		"a third one, activated":         {1, 2, view(3, ready, coming), true, 1, 3},
		"whole, and a third one":         {1, 2, view(3, ready, ready), false, 2, 3},
		"a failure":                      {1, 2, view(2, ready, failed), false, 1, 2},
		"the last backup is deleted":     {2, 0, view(1, ready, nil), false, 2, 0},
		"all backups are deleted":        {2, 0, view(0, ready, nil), false, 2, 0},
		"deleted while it arrives":       {1, 2, view(0, ready, coming), false, 1, 2},
		"deleted while it arrives, lost": {1, 2, view(1, ready, failed), false, 1, 0},
		"the held image is deleted":      {1, 0, view(1, nil, nil), false, 0, 1},
		"the held copies are being made": {1, 0, view(1, failed, nil), false, 1, 0},
	} {
		v := &api.Volume{Spec: api.VolumeSpec{FromBackup: followedOfTest, Standby: !c.activating}}
		v.Status.UID, v.Status.Standby = "u", &api.StandbyStatus{}
		if c.held > 0 {
			v.Status.Standby.Held = heldOfTest(c.held)
		}
		if c.next > 0 {
			v.Status.Standby.Next = heldOfTest(c.next)
		}
		advanceStandby(v, &c.view)
		for part, b := range map[string]struct {
			got  *api.StandbyBackup
			want int
		}{"holds": {v.Status.Standby.Held, c.wantHeld}, "fetches": {v.Status.Standby.Next, c.wantNext}} {
			if (b.got == nil) != (b.want == 0) || b.got != nil && *b.got != *heldOfTest(b.want) {
				t.Errorf("%s: the volume %s %+v, want backup %d", what, part, b.got, b.want)
			}
		}
	}
}

// TestActivationChoosesTheNewestBackup: an activation takes the newest backup of a store that answers as soon as it is
// readable, and the held one of a store that does not answer in time, or at the user's wish. It never takes a part of a
// backup from a store that is away while a whole one is held.
func TestActivationChoosesTheNewestBackup(t *testing.T) {
	readable := imageOfTest(api.ImageInProgress, 0)
	readable.Status.Readable = true
	coming, failed := imageOfTest(api.ImageInProgress, 0), imageOfTest(api.ImageFailed, 0)
	held := imageOfTest(api.ImageReady, 1)
	ready := imageOfTest(api.ImageReady, 1)
	gone, full := obstacle{api.ReasonTargetMissing, "x"}, func(int64) error { return api.Errorf(api.Full, "no disk") }
	away := standbyView{held: held, next: readable, away: gone}
	damaged := []*api.Backup{backupOfTest(2)}
	damaged[0].Status.Damaged = true
	for what, c := range map[string]struct {
		held, next          int
		view                standbyView
		now, answered, late bool
		want                int
	}{
		"a damaged one, whole on the disk":  {1, 2, standbyView{held: held, next: ready, backups: damaged}, false, true, false, 2},
		"a damaged one":                     {1, 2, standbyView{held: held, next: readable, backups: damaged}, false, true, false, 0},
		"a damaged one, for long":           {1, 2, standbyView{held: held, next: readable, backups: damaged}, false, true, true, 1},
		"one without room":                  {1, 2, standbyView{held: held, next: readable, room: full}, false, true, false, 0},
		"a newer one without room":          {1, 0, standbyView{held: held, unfit: gone}, false, true, false, 0},
		"a newer one without room for long": {1, 0, standbyView{held: held, unfit: gone}, false, true, true, 1},
		"one without room, for long":        {1, 2, standbyView{held: held, next: readable, room: full}, false, true, true, 1},
		"no answer yet":                     {1, 0, standbyView{held: held}, false, false, false, 0},
		"no answer, and a readable one":     {1, 2, standbyView{held: held, next: readable}, false, false, false, 0},
		"no answer in time":                 {1, 2, standbyView{held: held, next: readable}, false, false, true, 1},
		"no answer in time, nothing held":   {0, 1, standbyView{next: readable}, false, false, true, 1},
		"nothing held, nothing readable":    {0, 1, standbyView{next: coming}, false, false, true, 0},
		"nothing at all":                    {0, 0, standbyView{}, true, true, true, 0},
		"the held one is the newest":        {1, 0, standbyView{held: held}, false, true, false, 1},
		"a newer one":                       {1, 2, standbyView{held: held, next: coming}, false, true, false, 0},
		"a newer one of a slow store":       {1, 2, standbyView{held: held, next: coming}, false, true, true, 0},
		"a newer one, readable":             {1, 2, standbyView{held: held, next: readable}, false, true, false, 2},
		"a newer one that fails":            {1, 2, standbyView{held: held, next: failed}, false, true, false, 0},
		"a newer one that fails for long":   {1, 2, standbyView{held: held, next: failed}, false, true, true, 1},
		"the target is away":                {1, 2, away, false, true, false, 0},
		"the target is away for long":       {1, 2, away, false, true, true, 1},
		"now":                               {1, 2, standbyView{held: held, next: readable}, true, false, false, 1},
		"now, with nothing held":            {0, 1, standbyView{next: readable, away: gone}, true, false, false, 1},
		"the target is away, and no newer":  {1, 0, standbyView{held: held, away: gone}, false, true, false, 0},
		"no newer for long, target is away": {1, 0, standbyView{held: held, away: gone}, false, true, true, 1},
	} {
		v := &api.Volume{Status: api.VolumeStatus{Standby: &api.StandbyStatus{}}}
		if c.held > 0 {
			v.Status.Standby.Held = heldOfTest(c.held)
		}
		if c.next > 0 {
			v.Status.Standby.Next = heldOfTest(c.next)
		}
		if c.view.answered, c.view.late = c.answered, c.late; c.now {
			v.Annotations = map[string]string{api.AnnotationActivateNow: ""}
		}
		c.view.judgeNext(v)
		got, waits := chooseActivated(v, &c.view)
		if (got == nil) != (c.want == 0) || got != nil && *got != *heldOfTest(c.want) || (got == nil) != (waits != "") {
			t.Errorf("%s: %+v (%s), want backup %d", what, got, waits, c.want)
		}
	}
}

// standbyWorld is a planner with a standby volume on an API server.
type standbyWorld struct {
	*apitest.Server
	p *volumeReconciler
}

func newStandbyWorld(t *testing.T) *standbyWorld {
	s := apitest.Start(t)
	createVolume(s, "other") // with a node and a disk
	cached := interceptor.NewClient(s.Client, interceptor.Funcs{List: func(ctx context.Context, c client.WithWatch,
		list client.ObjectList, o ...client.ListOption) error {
		var asked client.ListOptions
		asked.ApplyOptions(o)
		switch list := list.(type) {
		case *api.ReplicaList:
			if err := c.List(ctx, list); err != nil {
				return err
			}
			list.Items = list.OfVolume("dr")
			return nil
		case *api.ImageCopyList:
			return nil
		}
		return c.List(ctx, list, &client.ListOptions{LabelSelector: asked.LabelSelector}) // the API has no indexes
	}})
	w := &standbyWorld{s, &volumeReconciler{client: cached, reader: s.Client, events: events.NewFakeRecorder(100),
		log: s.Log, assumed: map[string]assumedReplica{}, waiting: map[string]bool{}, silent: map[string]bool{},
		clones: map[string]map[string]bool{}}}
	target := &api.BackupTarget{ObjectMeta: apitest.Named("default")}
	target.Spec.BackupTargetURL = storeOfTest
	s.Create(target)
	v := apitest.Volume("dr", 16<<20)
	v.Spec.FromBackup, v.Spec.Standby, v.Spec.NumberOfReplicas = followedOfTest, true, 1
	s.Create(v)
	return w
}

func (w *standbyWorld) backup(n int, size int64) {
	w.T.Helper()
	of := backupOfTest(n)
	b := &api.Backup{ObjectMeta: apitest.Named(of.Name), Spec: of.Spec}
	w.Create(b)
	apitest.EditStatus(w.Server, b, func(b *api.Backup) { b.Status, b.Status.VolumeSize = of.Status, size })
}

func (w *standbyWorld) volume() *api.Volume {
	w.T.Helper()
	v := &api.Volume{}
	if err := w.Client.Get(w.Ctx, client.ObjectKey{Name: "dr"}, v); err != nil {
		w.T.Fatal(err)
	}
	return v
}

// reconcile reconciles the volume until nothing changes.
func (w *standbyWorld) reconcile() *api.Volume {
	w.T.Helper()
	for last := ""; ; {
		if _, err := w.p.Reconcile(w.Ctx, watch.Request("dr")); err != nil {
			w.T.Fatal(err)
		}
		v := w.volume()
		if v.ResourceVersion == last {
			return v
		}
		last = v.ResourceVersion
	}
}

// image plays the room imagestore: it gives a hidden image a state, and content of 64 MiB.
func (w *standbyWorld) image(name string, state api.ImageState) *api.BackingImage {
	w.T.Helper()
	return w.sizedImage(name, state, 64<<20)
}

func (w *standbyWorld) sizedImage(name string, state api.ImageState, size int64) *api.BackingImage {
	w.T.Helper()
	img := &api.BackingImage{ObjectMeta: apitest.Named(name)}
	apitest.EditStatus(w.Server, img, func(i *api.BackingImage) {
		i.Status.State, i.Status.UUID, i.Status.Layers = state, "u-"+api.UID(name), []api.UID{"l-" + api.UID(name)}
		i.Status.Readable, i.Status.VirtualSize = state == api.ImageInProgress, size
		if i.Status.ReadyCopies = 0; state == api.ImageReady {
			i.Status.ReadyCopies = 1
			i.Status.Copies = []api.ImageCopySummary{{Node: "n1", State: state}}
		}
	})
	return img
}

// isDeleted reports whether the deletion of a hidden image has begun.
func (w *standbyWorld) isDeleted(name string) bool {
	w.T.Helper()
	img := &api.BackingImage{}
	err := w.Client.Get(w.Ctx, client.ObjectKey{Name: name}, img)
	return client.IgnoreNotFound(err) == nil && (err != nil || img.DeletionTimestamp != nil)
}

// TestStandbyFollowsAndIsActivated: a standby volume fetches the backups of a volume one after the other, grows with
// them, and keeps the last one when the backups and the target are deleted. An activated volume never becomes a standby
// volume again. The activation asks the target, takes a newer backup as soon as it is readable, and begins on its
// image; the former image is deleted only then.
func TestStandbyFollowsAndIsActivated(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	v := w.reconcile()
	if s := v.Status; s.State != api.VolumeStandby || !s.IsStandby ||
		!strings.Contains(s.Message, "has no backup of volume db") {
		t.Fatalf("without a backup the volume is %s: %s", s.State, s.Message)
	}
	w.backup(1, 32<<20)
	v = w.reconcile()
	first := v.NextImage()
	img := w.sizedImage(first, api.ImageInProgress, 32<<20)
	if v.Spec.Size != 16<<20 || img.Spec.MinNumberOfCopies != 1 || img.Annotations[api.AnnotationPrefer] != "n1" ||
		img.Spec.SourceParameters[api.RestoreBackupURL] != backupOfTest(1).Status.URL || img.Labels[api.LabelHidden] != "dr" {
		t.Errorf("the volume of %d bytes fetches %+v %+v", v.Spec.Size, img.ObjectMeta, img.Spec)
	}
	w.sizedImage(first, api.ImageReady, 32<<20)
	if v = w.reconcile(); v.Status.LastBackup != "b1" || v.RestoreImage() != first || v.NextImage() != "" ||
		v.Spec.Size != 32<<20 {
		t.Fatalf("the volume holds %q", v.Status.LastBackup)
	}
	w.backup(2, 64<<20) // the followed volume was expanded
	v = w.reconcile()
	second := v.NextImage()
	w.image(second, api.ImageInProgress)
	if v = w.reconcile(); v.Status.LastBackup != "b1" || v.Spec.Size != 32<<20 || w.isDeleted(first) {
		t.Errorf("while backup 2 arrives, the volume holds %q", v.Status.LastBackup)
	}
	w.image(second, api.ImageReady)
	if v = w.reconcile(); v.Status.LastBackup != "b2" || v.Status.Size != 64<<20 || v.Spec.Size != 64<<20 ||
		!w.isDeleted(first) {
		t.Errorf("the volume holds %q, and the image of before is deleted: %v", v.Status.LastBackup, w.isDeleted(first))
	}

	for _, o := range []client.Object{&api.Backup{ObjectMeta: apitest.Named("b2")},
		&api.Backup{ObjectMeta: apitest.Named("b1")}, &api.BackupTarget{ObjectMeta: apitest.Named("default")}} {
		if err := w.Client.Delete(w.Ctx, o); err != nil {
			t.Fatal(err)
		}
		if v = w.reconcile(); v.Status.LastBackup != "b2" || v.RestoreImage() != second || w.isDeleted(second) {
			t.Errorf("after the deletion of %T %s the volume holds %q", o, o.GetName(), v.Status.LastBackup)
		}
	}
	if c := v.Status.Conditions; !strings.Contains(v.Status.Message, "no backup target has the store") ||
		!strings.Contains(v.Status.Message, "holds backup b2") || len(c) == 0 {
		t.Errorf("without a target: %s", v.Status.Message)
	}

	target := &api.BackupTarget{ObjectMeta: apitest.Named("again")}
	target.Spec.BackupTargetURL = storeOfTest
	w.Create(target)
	apitest.Edit(w.Server, v, func(v *api.Volume) { v.Spec.Standby = false })
	again := w.volume()
	again.Spec.Standby = true
	if err := w.Client.Update(w.Ctx, again); err == nil || !strings.Contains(err.Error(), "cannot become a standby") {
		t.Errorf("a volume becomes a standby volume again: %v", err)
	}
	v = w.reconcile()
	if err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(target), target); err != nil ||
		target.Spec.SyncRequestedAt == nil || !v.Status.IsStandby ||
		!strings.Contains(v.Status.Message, "waits for the list of the store") {
		t.Fatalf("the activation asks the target: %v, %v: %s", target.Spec.SyncRequestedAt, err, v.Status.Message)
	}
	w.backup(3, 64<<20)
	apitest.EditStatus(w.Server, target, func(b *api.BackupTarget) { b.Status.SyncedRequest = b.Spec.SyncRequestedAt })
	v = w.reconcile()
	third := v.NextImage()
	if !strings.Contains(v.Status.Message, "waits for backup b3") || w.isDeleted(second) {
		t.Errorf("the activation of a volume with an older backup: %s", v.Status.Message)
	}
	w.image(third, api.ImageInProgress) // readable
	if v = w.reconcile(); v.Status.IsStandby || v.RestoreImage() != third || v.Status.LastBackup != "b3" ||
		v.Status.RestoreStatus.Backup != "b3" || w.isDeleted(second) || w.isDeleted(third) {
		t.Errorf("activated: %+v", v.Status)
	}
	whole := v.DeepCopy()
	whole.Status.RestoreStatus.State = api.CloneCompleted
	if err := (&standbyPlanner{w.p}).deleteFormerImages(w.Ctx, whole); err != nil || !w.isDeleted(second) ||
		w.isDeleted(third) {
		t.Errorf("with all data the volume keeps the former image: %v", err)
	}
	var reps api.ReplicaList
	if err := w.Client.List(w.Ctx, &reps); err != nil {
		t.Fatal(err)
	}
	mine := reps.OfVolume("dr")
	if len(mine) != 1 || mine[0].Labels[api.LabelImage] != third || mine[0].Spec.Size != 64<<20 {
		t.Errorf("the activated volume has the replicas %+v", mine)
	}
}

// TestActivationWithoutItsTarget: an activation whose target does not answer takes the held backup after a while, and
// says so; half of a newer backup is deleted. The deletion of a standby volume deletes its images.
func TestActivationWithoutItsTarget(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	w.backup(1, 64<<20)
	first := w.reconcile().NextImage()
	w.image(first, api.ImageReady)
	w.reconcile()
	w.backup(2, 64<<20)
	second := w.reconcile().NextImage()
	w.image(second, api.ImageInProgress)
	target := &api.BackupTarget{ObjectMeta: apitest.Named("default")}
	apitest.EditStatus(w.Server, target, func(b *api.BackupTarget) {
		b.Status.Message = "the server is away"
		b.Status.Conditions = []metav1.Condition{{Type: api.ConditionUnavailable, Status: metav1.ConditionTrue,
			Reason: api.ReasonUnreachable, LastTransitionTime: metav1.Now()}}
	})
	v := w.volume()
	apitest.Edit(w.Server, v, func(v *api.Volume) { v.Spec.Standby = false })
	v = w.reconcile()
	if !v.Status.IsStandby || !strings.Contains(v.Status.Message, "the server is away") ||
		!strings.Contains(v.Status.Message, "--now") {
		t.Errorf("the activation waits: %s", v.Status.Message)
	}
	apitest.EditStatus(w.Server, v, func(v *api.Volume) {
		v.Status.Standby.ActivatingSince = &metav1.Time{Time: time.Now().Add(-2 * activationPatience)}
	})
	if v = w.reconcile(); v.Status.IsStandby || v.RestoreImage() != first || !w.isDeleted(second) || w.isDeleted(first) ||
		!strings.Contains(v.Status.Standby.Message, "without an answer") {
		t.Errorf("activated without the target: %+v", v.Status.Standby)
	}

	dr := apitest.Volume("dr2", 64<<20)
	dr.Spec.FromBackup, dr.Spec.Standby, dr.Finalizers = followedOfTest, true, []string{api.Finalizer}
	w.Create(dr)
	for range 3 {
		if _, err := w.p.Reconcile(w.Ctx, watch.Request("dr2")); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Client.Get(w.Ctx, client.ObjectKeyFromObject(dr), dr); err != nil || dr.NextImage() == "" {
		t.Fatalf("%+v, %v", dr.Status, err)
	}
	if err := w.Client.Delete(w.Ctx, dr); err != nil {
		t.Fatal(err)
	}
	if _, err := w.p.Reconcile(w.Ctx, watch.Request("dr2")); err != nil || !w.isDeleted(dr.NextImage()) {
		t.Errorf("the deleted volume leaves its image: %v", err)
	}
}

// TestRestoreGoesToTheNodeThatKnowsTheDigests: the image of a backup of Longhorn is made on the only node that can read
// the backup on demand, and that of a newer backup on the node with most of its chunks.
func TestRestoreGoesToTheNodeThatKnowsTheDigests(t *testing.T) {
	t.Parallel()
	w := newStandbyWorld(t)
	know := func(n int) string {
		w.backup(n, 32<<20)
		apitest.EditStatus(w.Server, &api.Backup{ObjectMeta: apitest.Named(backupOfTest(n).Name)}, func(b *api.Backup) {
			b.Status.Digests = &api.DigestsFact{Node: "n9", Percent: 100}
		})
		img := &api.BackingImage{}
		if err := w.Client.Get(w.Ctx, client.ObjectKey{Name: w.reconcile().NextImage()}, img); err != nil {
			t.Fatal(err)
		}
		return img.Annotations[api.AnnotationPrefer]
	}
	if node := know(1); node != "n9" {
		t.Errorf("the first backup is restored on node %q", node)
	}
	w.sizedImage(w.volume().NextImage(), api.ImageReady, 32<<20)
	w.reconcile()
	if node := know(2); node != "n1" {
		t.Errorf("the second backup is restored on node %q", node)
	}
}
