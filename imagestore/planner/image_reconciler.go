package planner

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
)

// Condition types of a BackingImage besides Ready.
const (
	ConditionInUse    = "InUse"   // of a deletion: True while volumes use the image, False while copies are removed
	ConditionEviction = "Evicted" // False while a copy is on a disk under eviction; else absent
)

// replicasByLayer is the index of Replicas by every layer below them.
const replicasByLayer = "imagestore.layers"

const settingUnused = "backing-image-cleanup-wait-interval" // minutes

type imageReconciler struct {
	client.Client
	live   client.Reader // without the cache
	events recorder.EventRecorder
	log    *slog.Logger
}

// Setup adds the reconcilers of the planner to a manager whose cache has the indexes of api/watch.
func Setup(mgr ctrl.Manager, log *slog.Logger) error {
	r := &imageReconciler{Client: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder("drover-images"),
		log: log.With("loop", "images")}
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &api.Replica{}, replicasByLayer,
		func(o client.Object) []string { return layerKeys(o.(*api.Replica).Spec.Layers) }); err != nil {
		return err
	}
	nodes := &nodeWatch{Client: r.Client, seen: map[string]string{}, wake: make(chan event.GenericEvent, 1)}
	if err := ctrl.NewControllerManagedBy(mgr).Named("image-nodes").For(&api.Node{}).
		WithOptions(controller.Options{NewQueue: backlog.New}).Complete(nodes); err != nil {
		return err
	}
	all := handler.EnqueueRequestsFromMapFunc(r.allImages)
	// An update of a volume or replica never changes a plan, only existence does: there may be thousands of them.
	existence := watch.Updates(func(client.Object, client.Object) bool { return false })
	return ctrl.NewControllerManagedBy(mgr).Named("images").For(&api.BackingImage{}).
		Watches(&api.ImageCopy{}, handler.EnqueueRequestsFromMapFunc(
			func(_ context.Context, o client.Object) []reconcile.Request {
				return imageRequests(o.(*api.ImageCopy).Spec.Image)
			})).
		Watches(&api.Volume{}, handler.EnqueueRequestsFromMapFunc(
			func(_ context.Context, o client.Object) []reconcile.Request {
				return imageRequests(o.(*api.Volume).Spec.BackingImage)
			}), existence).
		Watches(&api.Replica{}, handler.EnqueueRequestsFromMapFunc(r.imageOfReplica), watch.Updates(imageTakenOut)).
		Watches(&api.Snapshot{}, handler.EnqueueRequestsFromMapFunc(imageOfSnapshot)).
		Watches(&api.Setting{}, all, watch.Named(settingUnused)).
		WatchesRawSource(source.Channel(nodes.wake, all)).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, NewQueue: backlog.New}).
		Complete(r)
}

// imageTakenOut reports whether a replica stands on its image no more.
func imageTakenOut(old, now client.Object) bool {
	return old.GetLabels()[api.LabelImage] != now.GetLabels()[api.LabelImage]
}

// imageRequests asks for a reconcile of the named image, if there is a name.
func imageRequests(name string) []reconcile.Request {
	if name == "" {
		return nil
	}
	return watch.Requests(name)
}

func layerKeys(uids []api.UID) []string {
	out := make([]string, len(uids))
	for i, u := range uids {
		out[i] = string(u)
	}
	return out
}

// allImages requests every image, after a change that matters to every plan.
func (r *imageReconciler) allImages(ctx context.Context, _ client.Object) []reconcile.Request {
	var list api.BackingImageList
	if err := r.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		r.log.Error("images not listed", "error", err)
	}
	var all []reconcile.Request
	for i := range list.Items {
		all = append(all, watch.Request(list.Items[i].Name))
	}
	return all
}

// imageOfReplica requests the image below a replica.
func (r *imageReconciler) imageOfReplica(ctx context.Context, o client.Object) []reconcile.Request {
	rep := o.(*api.Replica)
	if len(rep.Spec.Layers) == 0 {
		return nil
	}
	if name := rep.Labels[api.LabelImage]; name != "" {
		if img, err := watch.FindImage(ctx, r.Client, name); err == nil && img != nil {
			name = img.Name
		}
		return imageRequests(name)
	}
	var vol api.Volume
	if err := r.Get(ctx, client.ObjectKey{Name: rep.Spec.Volume}, &vol); err != nil {
		return nil // the event of the volume requests the image
	}
	return imageRequests(vol.Spec.BackingImage)
}

// Reconcile brings the copies of one image in line with its plan, and writes the status of the image.
func (r *imageReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	img := &api.BackingImage{}
	if err := r.Get(ctx, req.NamespacedName, img); err != nil {
		if apierrors.IsNotFound(err) {
			forgetImageMetrics(req.Name)
			return ctrl.Result{}, r.deleteOrphans(ctx, req.Name)
		}
		return ctrl.Result{}, err
	}
	deleting := !img.DeletionTimestamp.IsZero()
	if deleting && !controllerutil.ContainsFinalizer(img, api.Finalizer) {
		return ctrl.Result{}, nil
	}
	if !deleting && controllerutil.AddFinalizer(img, api.Finalizer) {
		return ctrl.Result{}, ignoreRace(r.Update(ctx, img)) // the event of the update continues
	}
	if _, rebuilt := img.Annotations[api.AnnotationRecovered]; rebuilt && !deleting {
		return ctrl.Result{}, r.adoptRecovered(ctx, img)
	}
	if img.Status.UUID == "" && !deleting && img.Spec.SourceType == api.SourceClone {
		return r.beginClone(ctx, img)
	}
	if !deleting && isBackupOpen(img) {
		return r.chooseBackup(ctx, img)
	}
	if img.Status.UUID == "" && !deleting {
		// Before any byte and any copy: an update of a stale object fails, so there is one UUID for ever (I7).
		img.Status.UUID = api.NewUID()
		if img.Spec.SourceType != api.SourceExport { // an export names existing layers
			img.Status.Layers = []api.UID{api.NewUID()}
		}
		img.Status.State = api.ImagePending
		return ctrl.Result{}, ignoreRace(r.Status().Update(ctx, img))
	}
	if img.Spec.SourceType == api.SourceExport && len(img.Status.Layers) == 0 && !deleting {
		return r.beginExport(ctx, img)
	}
	if deleting || img.Status.State == api.ImageReady {
		if err := r.releaseSnapshot(ctx, img); err != nil {
			return ctrl.Result{}, err
		}
	}
	v, err := r.collectView(ctx, img)
	if err == nil {
		err = r.passOnLayers(ctx, img, v)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	if deleting && len(v.users) == 0 {
		return r.removeImage(ctx, img, v)
	}
	var p copyPlan
	if err := validateImage(img); err != nil {
		p.problem = err.Error()
	} else if p, err = r.applyPlan(ctx, img, v); err != nil {
		return ctrl.Result{}, ignoreRace(err)
	}
	return ctrl.Result{RequeueAfter: p.wait}, r.writeStatus(ctx, img, v, p)
}

// adoptRecovered adopts an image that was rebuilt from disks, with its UUID and its copies. The planner plans further
// copies once these copies are objects.
func (r *imageReconciler) adoptRecovered(ctx context.Context, img *api.BackingImage) error {
	found, err := img.Recovered()
	if err != nil {
		if img.Status.State == api.ImageFailed && img.Status.Message == err.Error() {
			return nil
		}
		img.Status.State, img.Status.Message = api.ImageFailed, err.Error()
		return ignoreRace(r.Status().Update(ctx, img))
	}
	if img.Status.UUID == "" {
		s := &img.Status
		s.UUID, s.Layers, s.State = found.UUID, found.Layers, api.ImagePending
		s.Format, s.VirtualSize, s.Checksum, s.Digest = found.Format, found.VirtualSize, found.Checksum, found.Digest
		return ignoreRace(r.Status().Update(ctx, img)) // the event of the update continues
	}
	if img.Status.UUID == found.UUID {
		for _, c := range found.Copies {
			err := r.Create(ctx, newCopy(img, placement{node: c.Node, disk: c.Disk}))
			if err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
		r.log.Info("image rebuilt from disks", "image", img.Name, "uuid", found.UUID, "copies", len(found.Copies))
	}
	delete(img.Annotations, api.AnnotationRecovered)
	return ignoreRace(r.Update(ctx, img))
}

func validateImage(img *api.BackingImage) error {
	if err := api.ValidateImageName(img.Name); err != nil {
		return err
	}
	return img.Spec.Validate()
}

// ignoreRace drops the error of a lost race: the event of the newer object starts the next reconcile.
func ignoreRace(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// clusterView is the input of the plan for one image.
type clusterView struct {
	copies []api.ImageCopy // of this image, including copies under deletion
	users  []string        // of a deleted image: volumes that use the image
	needed []location      // disks with a replica above the image
	disks  []diskState     // all disks of the cluster
	// sourceLocations are where the layers of a clone are, in copies of the image that it was made of.
	sources []location
	nodes   map[string]bool // node: alive
	// readableOn is the only node that can read the backup of the image on demand; empty: none, or all can alike.
	readableOn string
}

type location struct {
	node string
	disk api.UID
}

func (r *imageReconciler) collectView(ctx context.Context, img *api.BackingImage) (*clusterView, error) {
	v := &clusterView{}
	var copies api.ImageCopyList
	if err := r.List(ctx, &copies, client.MatchingFields{watch.ByImage: img.Name}); err != nil {
		return nil, err
	}
	v.copies = copies.Items
	if img.Spec.SourceType == api.SourceRestore && len(v.copies) == 0 {
		var backups api.BackupList
		if err := r.List(ctx, &backups, client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
		v.readableOn = api.ReadableOn(backups.Items, img.Spec.SourceParameters[api.RestoreBackupURL])
	}
	slices.SortFunc(v.copies, func(a, b api.ImageCopy) int {
		return strings.Compare(string(a.Spec.Disk)+a.Name, string(b.Spec.Disk)+b.Name)
	})
	placed := map[string]bool{}
	if n := len(img.Status.Layers); n > 0 {
		var reps api.ReplicaList
		if err := r.List(ctx, &reps, client.MatchingFields{replicasByLayer: string(img.Status.Layers[n-1])},
			client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
		seen := map[location]bool{}
		for i := range reps.Items {
			spec := &reps.Items[i].Spec
			of := reps.Items[i].Labels[api.LabelImage]
			if (of != "" || img.IsHidden()) && of != api.LabelValue(img.Name) {
				continue // of another image with the same layers, or of no image
			}
			placed[spec.Volume], seen[location{spec.Node, spec.Disk}] = true, true
		}
		v.needed = slices.SortedFunc(maps.Keys(seen), func(a, b location) int {
			return strings.Compare(string(a.disk), string(b.disk))
		})
	}
	if !img.DeletionTimestamp.IsZero() {
		var vols api.VolumeList
		if err := r.List(ctx, &vols, client.MatchingFields{watch.ByImage: img.Name},
			client.UnsafeDisableDeepCopy); err != nil {
			return nil, err
		}
		for i := range vols.Items {
			if vol := &vols.Items[i]; api.HoldsImage(vol, img) {
				placed[vol.Name] = true
			}
		}
		v.users = slices.Sorted(maps.Keys(placed))
	}
	var nodes api.NodeList
	if err := r.List(ctx, &nodes); err != nil {
		return nil, err
	}
	v.disks, v.nodes = disksOfNodes(nodes.Items, time.Now())
	if err := r.moveCopiesWithDisks(ctx, v, nodes.Items); err != nil {
		return nil, err
	}
	var err error
	v.sources, err = r.sourceLocations(ctx, img)
	return v, err
}

// moveCopiesWithDisks assigns copies to the nodes that now hold their disks.
func (r *imageReconciler) moveCopiesWithDisks(ctx context.Context, v *clusterView, nodes []api.Node) error {
	for i := range v.copies {
		c := &v.copies[i]
		to := api.DiskMovedTo(nodes, c.Spec.Disk, c.Spec.Node, time.Now())
		if to == "" {
			continue
		}
		base := c.DeepCopy()
		api.MoveTo(c, &c.Spec.Node, to)
		if err := r.Patch(ctx, c, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("copy %s moves to node %s with its disk: %w", c.Name, to, err)
		}
		r.events.Eventf(c, nil, "Normal", "DiskMoved", "Adopt",
			"disk %s has moved from node %s to node %s: the copy is used there",
			c.Spec.Disk, base.Spec.Node, to)
		r.log.Info("copy moved with its disk", "image", c.Spec.Image, "disk", c.Spec.Disk, "from", base.Spec.Node, "to", to)
	}
	return nil
}

// applyPlan creates, deletes and changes ImageCopies by the plan.
func (r *imageReconciler) applyPlan(ctx context.Context, img *api.BackingImage, v *clusterView) (copyPlan, error) {
	minutes := time.Duration(watch.SettingNumber(ctx, r.Client, settingUnused, r.log)) * time.Minute
	p := planCopies(img, v, planRules{now: time.Now(), unused: minutes})
	for _, c := range p.remove {
		if err := r.deleteCopy(ctx, v, c); err != nil {
			return p, err
		}
	}
	for _, c := range p.create {
		c := newCopy(img, c)
		err := r.Create(ctx, c)
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return p, err
		}
		if err == nil {
			r.log.Info("copy wanted", "image", img.Name, "node", c.Spec.Node, "disk", c.Spec.Disk, "from", c.Spec.From)
		}
	}
	for _, c := range p.redirect {
		if err := r.patchCopy(ctx, c.object, `{"spec":{"from":%q}}`, c.from); err != nil {
			return p, err
		}
	}
	token := img.Annotations[api.AnnotationVerify]
	for i := range v.copies {
		if c := &v.copies[i]; c.Spec.UUID == img.Status.UUID && c.Spec.Verify != token && c.DeletionTimestamp.IsZero() {
			if err := r.patchCopy(ctx, c, `{"spec":{"verify":%q}}`, token); err != nil {
				return p, err
			}
		}
	}
	return p, r.finishCleanups(ctx, img, p)
}

func (r *imageReconciler) patchCopy(ctx context.Context, c *api.ImageCopy, format string, args ...any) error {
	return client.IgnoreNotFound(r.Patch(ctx, c.DeepCopy(),
		client.RawPatch(types.MergePatchType, fmt.Appendf(nil, format, args...))))
}

// finishCleanups removes finished cleanup wishes from the spec: the copy was removed, or has to stay.
func (r *imageReconciler) finishCleanups(ctx context.Context, img *api.BackingImage, p copyPlan) error {
	if len(p.cleaned) == 0 {
		return nil
	}
	base := img.DeepCopy()
	img.Spec.CleanupDisks = slices.DeleteFunc(img.Spec.CleanupDisks, func(d api.UID) bool {
		return slices.Contains(p.cleaned, d)
	})
	if len(img.Spec.CleanupDisks) == 0 {
		img.Spec.CleanupDisks = nil
	}
	return r.Patch(ctx, img, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
}

// deleteCopy deletes a copy. Without a node to do so, deleteCopy removes the finalizer as well.
func (r *imageReconciler) deleteCopy(ctx context.Context, v *clusterView, c *api.ImageCopy) error {
	if c.DeletionTimestamp.IsZero() {
		if err := client.IgnoreNotFound(r.Delete(ctx, c, client.Preconditions{UID: &c.UID})); err != nil {
			return err
		}
		r.log.Info("copy not wanted", "image", c.Spec.Image, "node", c.Spec.Node, "disk", c.Spec.Disk)
	}
	if v.isGone(c.Spec.Node, c.Spec.Disk) {
		c = c.DeepCopy()
		if controllerutil.RemoveFinalizer(c, api.Finalizer) {
			r.log.Warn("disk is gone: its copy is forgotten", "image", c.Spec.Image, "node", c.Spec.Node, "disk", c.Spec.Disk)
			return client.IgnoreNotFound(r.Update(ctx, c))
		}
	}
	return nil
}

func copyName(image, disk api.UID) string {
	return string(image) + "." + string(disk)[:min(8, len(disk))]
}

func newCopy(img *api.BackingImage, w placement) *api.ImageCopy {
	c := &api.ImageCopy{Spec: api.ImageCopySpec{Image: img.Name, UUID: img.Status.UUID, Layers: img.Status.Layers,
		Node: w.node, Disk: w.disk, From: w.from, Verify: img.Annotations[api.AnnotationVerify]}}
	if c.Spec.Export = img.Status.Export; c.Spec.Export == nil && img.Spec.SourceType == api.SourceExport {
		c.Spec.Export = &api.ExportFact{} // rebuilt from a disk
	}
	if c.Spec.Layers == nil {
		c.Spec.Layers = []api.UID{}
	}
	c.Name = copyName(img.Status.UUID, w.disk)
	c.Finalizers = []string{api.Finalizer}
	c.Labels = map[string]string{api.LabelImage: api.LabelValue(img.Name), api.LabelDisk: string(w.disk),
		api.LabelNode: api.LabelValue(w.node)}
	if of := img.Labels[api.LabelHidden]; of != "" {
		c.Labels[api.LabelHidden] = of
	}
	return c
}

// removeImage removes an image without users: first all copies, then the object.
func (r *imageReconciler) removeImage(ctx context.Context, img *api.BackingImage, v *clusterView) (ctrl.Result, error) {
	for i := range v.copies {
		if err := r.deleteCopy(ctx, v, &v.copies[i]); err != nil {
			return ctrl.Result{}, ignoreRace(err)
		}
	}
	if len(v.copies) > 0 {
		return ctrl.Result{}, r.writeStatus(ctx, img, v, copyPlan{})
	}
	// The cache may not know a copy that was made a moment ago. There is one name per disk.
	for _, d := range v.disks {
		err := r.live.Get(ctx, client.ObjectKey{Name: copyName(img.Status.UUID, d.uid)}, &api.ImageCopy{})
		if err == nil {
			return ctrl.Result{RequeueAfter: 100 * time.Millisecond}, nil
		}
		if !apierrors.IsNotFound(err) {
			return ctrl.Result{}, err
		}
	}
	controllerutil.RemoveFinalizer(img, api.Finalizer)
	forgetImageMetrics(img.Name)
	return ctrl.Result{}, ignoreRace(r.Update(ctx, img))
}

// deleteOrphans deletes copies that were created during the deletion of their image.
func (r *imageReconciler) deleteOrphans(ctx context.Context, name string) error {
	var copies api.ImageCopyList
	if err := r.List(ctx, &copies, client.MatchingFields{watch.ByImage: name}); err != nil || len(copies.Items) == 0 {
		return err
	}
	err := r.live.Get(ctx, client.ObjectKey{Name: name}, &api.BackingImage{})
	if !apierrors.IsNotFound(err) {
		return err // the image exists, and its event requests the image
	}
	var nodes api.NodeList
	if err := r.List(ctx, &nodes); err != nil {
		return err
	}
	v := &clusterView{}
	v.disks, v.nodes = disksOfNodes(nodes.Items, time.Now())
	for i := range copies.Items {
		if err := r.deleteCopy(ctx, v, &copies.Items[i]); err != nil {
			return ignoreRace(err)
		}
	}
	return nil
}

// writeStatus writes a changed status and reports transitions.
func (r *imageReconciler) writeStatus(ctx context.Context, img *api.BackingImage, v *clusterView, p copyPlan) error {
	before := img.Status.DeepCopy()
	img.Status = describeImage(img, v, p)
	setImageMetrics(img)
	if equality.Semantic.DeepEqual(*before, img.Status) {
		return nil
	}
	if err := r.Status().Update(ctx, img); err != nil {
		return ignoreRace(err)
	}
	s := &img.Status
	if before.State != s.State {
		switch s.State {
		case api.ImageReady:
			r.events.Eventf(img, nil, corev1.EventTypeNormal, "Ready", "Import", "%s", summarizeImage(s))
		case api.ImageFailed:
			r.events.Eventf(img, nil, corev1.EventTypeWarning, "Failed", "Import", "%s", api.ClipMessage(s.Message))
		}
		r.log.Info("image", "image", img.Name, "state", s.State, "message", s.Message)
	}
	for _, tell := range []struct {
		kind, action string
		status       metav1.ConditionStatus
	}{{ConditionInUse, "Delete", metav1.ConditionTrue}, {ConditionEviction, "Evict", metav1.ConditionFalse},
		{api.ConditionStalled, "Restore", metav1.ConditionTrue}} {
		was, is := meta.FindStatusCondition(before.Conditions, tell.kind), meta.FindStatusCondition(s.Conditions, tell.kind)
		if is != nil && is.Status == tell.status && is.Reason != "Moving" && (was == nil || was.Message != is.Message) {
			r.events.Eventf(img, nil, corev1.EventTypeWarning, is.Reason, tell.action, "%s", is.Message)
		}
	}
	return nil
}
