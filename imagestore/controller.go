// Package imagestore keeps backing images: which exist, on which disks their copies are, and how they get there.
//
// The controller role (SetupController) plans: it gives an image its UUID and layer UID before any byte is written,
// chooses disks, asks for copies by ImageCopy objects and mirrors what became of them into BackingImage.status, of
// which it is the only writer. The node role (SetupNode) makes the ImageCopy objects of its node true and is the only
// writer of their status. What is on a disk is named by UIDs: an image of a name used before never meets leftovers.
//
// Goroutines: the reconcilers are controller-runtime's; transfers run in goroutines owned by movers, a Runnable of the
// manager that waits for them. A transfer never writes to the API; it wakes its ImageCopy's reconciler, at most twice a
// second, which does.
package imagestore

import (
	"context"
	"fmt"
	"log/slog"
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
)

// Condition type of a BackingImage besides Ready.
const ConditionInUse = "InUse" // True while a deletion waits for volumes

// Names of the indexes of this room in the manager's cache.
const (
	copiesByImage    = "imagestore.copies"
	volumesByImage   = "imagestore.volumes"
	replicasByVolume = "imagestore.replicas"
)

type images struct {
	client.Client
	live   client.Reader // past the cache
	events recorder.EventRecorder
	log    *slog.Logger
}

// SetupController adds the loops of the controller role to a manager.
func SetupController(mgr ctrl.Manager, log *slog.Logger) error {
	r := &images{Client: mgr.GetClient(), live: mgr.GetAPIReader(), events: mgr.GetEventRecorder("drover-images"),
		log: log.With("loop", "images")}
	index := mgr.GetFieldIndexer()
	for _, i := range []struct {
		obj   client.Object
		name  string
		value func(client.Object) string
	}{
		{&api.ImageCopy{}, copiesByImage, func(o client.Object) string { return o.(*api.ImageCopy).Spec.Image }},
		{&api.Volume{}, volumesByImage, func(o client.Object) string { return o.(*api.Volume).Spec.BackingImage }},
		{&api.Replica{}, replicasByVolume, func(o client.Object) string { return o.(*api.Replica).Spec.Volume }},
	} {
		if err := index.IndexField(context.Background(), i.obj, i.name, func(o client.Object) []string {
			if v := i.value(o); v != "" {
				return []string{v}
			}
			return nil
		}); err != nil {
			return err
		}
	}
	nodes := &nodeWatch{Client: r.Client, seen: map[string]string{}, wake: make(chan event.GenericEvent, 1)}
	if err := ctrl.NewControllerManagedBy(mgr).Named("image-nodes").For(&api.Node{}).Complete(nodes); err != nil {
		return err
	}
	byName := func(name string) []reconcile.Request {
		if name == "" {
			return nil
		}
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: name}}}
	}
	return ctrl.NewControllerManagedBy(mgr).Named("images").For(&api.BackingImage{}).
		Watches(&api.ImageCopy{}, handler.EnqueueRequestsFromMapFunc(
			func(_ context.Context, o client.Object) []reconcile.Request {
				return byName(o.(*api.ImageCopy).Spec.Image)
			})).
		Watches(&api.Volume{}, handler.EnqueueRequestsFromMapFunc(
			func(_ context.Context, o client.Object) []reconcile.Request {
				return byName(o.(*api.Volume).Spec.BackingImage)
			})).
		Watches(&api.Replica{}, handler.EnqueueRequestsFromMapFunc(
			func(ctx context.Context, o client.Object) []reconcile.Request {
				var vol api.Volume
				if err := r.Get(ctx, client.ObjectKey{Name: o.(*api.Replica).Spec.Volume}, &vol); err != nil {
					return nil // the volume's own event comes
				}
				return byName(vol.Spec.BackingImage)
			})).
		WatchesRawSource(source.Channel(nodes.wake, handler.EnqueueRequestsFromMapFunc(
			func(ctx context.Context, _ client.Object) []reconcile.Request {
				var list api.BackingImageList
				if err := r.List(ctx, &list); err != nil {
					r.log.Error("images not listed", "error", err)
				}
				var out []reconcile.Request
				for i := range list.Items {
					out = append(out, byName(list.Items[i].Name)...)
				}
				return out
			}))).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4}).
		Complete(r)
}

// Reconcile makes one image's copies what they should be, and its status what they are.
func (r *images) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	img := &api.BackingImage{}
	if err := r.Get(ctx, req.NamespacedName, img); err != nil {
		if apierrors.IsNotFound(err) {
			forgetImageMetrics(req.Name)
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, err
	}
	deleting := !img.DeletionTimestamp.IsZero()
	if deleting && !controllerutil.ContainsFinalizer(img, api.Finalizer) {
		return ctrl.Result{}, nil
	}
	if !deleting && controllerutil.AddFinalizer(img, api.Finalizer) {
		return ctrl.Result{}, again(r.Update(ctx, img)) // its event brings us back
	}
	if _, rebuilt := img.Annotations[api.AnnotationRecovered]; rebuilt && !deleting {
		return ctrl.Result{}, r.takeOver(ctx, img)
	}
	if img.Status.UUID == "" && !deleting {
		// Before any byte and any copy: an update of a stale object fails, so there is one UUID for ever (I7).
		img.Status.UUID = api.NewUID()
		img.Status.Layers = []api.UID{api.NewUID()}
		img.Status.State = api.ImagePending
		return ctrl.Result{}, again(r.Status().Update(ctx, img))
	}
	v, err := r.look(ctx, img)
	if err != nil {
		return ctrl.Result{}, err
	}
	if deleting && len(v.users) == 0 {
		return r.remove(ctx, img, v)
	}
	var problem string
	if err := validate(img); err != nil {
		problem = err.Error()
	} else if problem, err = r.settle(ctx, img, v); err != nil {
		return ctrl.Result{}, again(err)
	}
	return ctrl.Result{}, r.mirror(ctx, img, v, problem)
}

// takeOver begins the life of an image that was rebuilt from disks: with its UUID, and with the copies that are there.
// No other copy is planned before those are objects.
func (r *images) takeOver(ctx context.Context, img *api.BackingImage) error {
	found, err := img.Recovered()
	if err != nil {
		if img.Status.State == api.ImageFailed && img.Status.Message == err.Error() {
			return nil
		}
		img.Status.State, img.Status.Message = api.ImageFailed, err.Error()
		return again(r.Status().Update(ctx, img))
	}
	if img.Status.UUID == "" {
		s := &img.Status
		s.UUID, s.Layers, s.State = found.UUID, found.Layers, api.ImagePending
		s.Format, s.VirtualSize, s.Checksum, s.Digest = found.Format, found.VirtualSize, found.Checksum, found.Digest
		return again(r.Status().Update(ctx, img)) // its event brings us back
	}
	if img.Status.UUID == found.UUID {
		for _, c := range found.Copies {
			err := r.Create(ctx, newCopy(img, wanted{node: c.Node, disk: c.Disk}))
			if err != nil && !apierrors.IsAlreadyExists(err) {
				return err
			}
		}
		r.log.Info("image rebuilt from disks", "image", img.Name, "uuid", found.UUID, "copies", len(found.Copies))
	}
	delete(img.Annotations, api.AnnotationRecovered)
	return again(r.Update(ctx, img))
}

func validate(img *api.BackingImage) error {
	if err := api.ValidateImageName(img.Name); err != nil {
		return err
	}
	return img.Spec.Validate()
}

// again lets a lost race be run once more without noise: the newer object's event is on its way.
func again(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// view is what the plan for one image is made from.
type view struct {
	copies []api.ImageCopy // of this image, deleting ones included
	users  []string        // volumes that have the image
	needed []need          // disks where a replica of such a volume is
	disks  []place         // every disk there is
	nodes  map[string]bool // node: alive
}

type need struct {
	node string
	disk api.UID
}

func (r *images) look(ctx context.Context, img *api.BackingImage) (*view, error) {
	v := &view{}
	var copies api.ImageCopyList
	if err := r.List(ctx, &copies, client.MatchingFields{copiesByImage: img.Name}); err != nil {
		return nil, err
	}
	v.copies = copies.Items
	slices.SortFunc(v.copies, func(a, b api.ImageCopy) int {
		return strings.Compare(string(a.Spec.Disk)+a.Name, string(b.Spec.Disk)+b.Name)
	})
	var vols api.VolumeList
	if err := r.List(ctx, &vols, client.MatchingFields{volumesByImage: img.Name}); err != nil {
		return nil, err
	}
	for i := range vols.Items {
		name := vols.Items[i].Name
		v.users = append(v.users, name)
		var reps api.ReplicaList
		if err := r.List(ctx, &reps, client.MatchingFields{replicasByVolume: name}); err != nil {
			return nil, err
		}
		for j := range reps.Items {
			n := need{reps.Items[j].Spec.Node, reps.Items[j].Spec.Disk}
			if !slices.Contains(v.needed, n) {
				v.needed = append(v.needed, n)
			}
		}
	}
	slices.Sort(v.users)
	slices.SortFunc(v.needed, func(a, b need) int { return strings.Compare(string(a.disk), string(b.disk)) })
	var nodes api.NodeList
	if err := r.List(ctx, &nodes); err != nil {
		return nil, err
	}
	v.disks, v.nodes = disksOf(nodes.Items, time.Now())
	return v, nil
}

// settle creates and deletes ImageCopy objects. problem says, for people, what it could not do.
func (r *images) settle(ctx context.Context, img *api.BackingImage, v *view) (problem string, err error) {
	p := plan(img, v)
	for _, c := range p.drop {
		if err := r.dropCopy(ctx, v, c); err != nil {
			return "", err
		}
	}
	for _, c := range p.create {
		c := newCopy(img, c)
		err := r.Create(ctx, c)
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return "", err
		}
		if err == nil {
			r.log.Info("copy wanted", "image", img.Name, "node", c.Spec.Node, "disk", c.Spec.Disk, "from", c.Spec.From)
		}
	}
	for _, c := range p.repair {
		if err := r.Patch(ctx, c.object, client.RawPatch(types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"from":%q}}`, c.from))); err != nil {
			return "", err
		}
	}
	return p.problem, nil
}

// dropCopy deletes a copy; where its node or disk is gone for good, nobody is left to take the finalizer off.
func (r *images) dropCopy(ctx context.Context, v *view, c *api.ImageCopy) error {
	if c.DeletionTimestamp.IsZero() {
		if err := client.IgnoreNotFound(r.Delete(ctx, c, client.Preconditions{UID: &c.UID})); err != nil {
			return err
		}
		r.log.Info("copy not wanted", "image", c.Spec.Image, "node", c.Spec.Node, "disk", c.Spec.Disk)
	}
	if v.gone(c.Spec.Node, c.Spec.Disk) {
		c = c.DeepCopy()
		if controllerutil.RemoveFinalizer(c, api.Finalizer) {
			r.log.Warn("disk is gone: its copy is forgotten", "image", c.Spec.Image, "node", c.Spec.Node, "disk", c.Spec.Disk)
			return client.IgnoreNotFound(r.Update(ctx, c))
		}
	}
	return nil
}

func newCopy(img *api.BackingImage, w wanted) *api.ImageCopy {
	c := &api.ImageCopy{Spec: api.ImageCopySpec{Image: img.Name, UUID: img.Status.UUID, Layers: img.Status.Layers,
		Node: w.node, Disk: w.disk, From: w.from}}
	c.Name = string(img.Status.UUID) + "." + string(w.disk)[:min(8, len(w.disk))]
	c.Finalizers = []string{api.Finalizer}
	c.Labels = map[string]string{api.LabelImage: img.Name, api.LabelDisk: string(w.disk)}
	if len(w.node) <= 63 {
		c.Labels[api.LabelNode] = w.node
	}
	return c
}

// remove ends an image that no volume uses: all copies first, then the name.
func (r *images) remove(ctx context.Context, img *api.BackingImage, v *view) (ctrl.Result, error) {
	// The cache may not know a volume that was made a moment ago.
	var vols api.VolumeList
	if err := r.live.List(ctx, &vols); err != nil {
		return ctrl.Result{}, err
	}
	for i := range vols.Items {
		if vols.Items[i].Spec.BackingImage == img.Name {
			v.users = append(v.users, vols.Items[i].Name)
		}
	}
	if len(v.users) > 0 {
		return ctrl.Result{}, r.mirror(ctx, img, v, "")
	}
	for i := range v.copies {
		if err := r.dropCopy(ctx, v, &v.copies[i]); err != nil {
			return ctrl.Result{}, again(err)
		}
	}
	if len(v.copies) > 0 {
		return ctrl.Result{}, r.mirror(ctx, img, v, "")
	}
	// Nor a copy of it.
	var copies api.ImageCopyList
	if err := r.live.List(ctx, &copies, client.MatchingLabels{api.LabelImage: img.Name}); err != nil {
		return ctrl.Result{}, err
	}
	if len(copies.Items) > 0 {
		return ctrl.Result{RequeueAfter: time.Second}, nil
	}
	controllerutil.RemoveFinalizer(img, api.Finalizer)
	forgetImageMetrics(img.Name)
	return ctrl.Result{}, again(r.Update(ctx, img))
}

// mirror writes the status, if it changed, and tells of transitions.
func (r *images) mirror(ctx context.Context, img *api.BackingImage, v *view, problem string) error {
	before := img.Status.DeepCopy()
	img.Status = statusOf(img, v, problem)
	setImageMetrics(img)
	if equality.Semantic.DeepEqual(*before, img.Status) {
		return nil
	}
	if err := r.Status().Update(ctx, img); err != nil {
		return again(err)
	}
	s := &img.Status
	if before.State != s.State {
		switch s.State {
		case api.ImageReady:
			r.events.Eventf(img, nil, corev1.EventTypeNormal, "Ready", "Import", "%s image, %s, SHA-512 %.16s...",
				s.Format, s.VirtualSizeText, s.Checksum)
		case api.ImageFailed:
			r.events.Eventf(img, nil, corev1.EventTypeWarning, "Failed", "Import", "%s", clip(s.Message))
		}
		r.log.Info("image", "image", img.Name, "state", s.State, "message", s.Message)
	}
	was, is := meta.FindStatusCondition(before.Conditions, ConditionInUse), meta.FindStatusCondition(s.Conditions, ConditionInUse)
	if is != nil && is.Status == metav1.ConditionTrue && (was == nil || was.Message != is.Message) {
		r.events.Eventf(img, nil, corev1.EventTypeWarning, "InUse", "Delete", "%s", clip(is.Message))
	}
	return nil
}

// clip keeps a message within what an event may hold.
func clip(s string) string {
	if len(s) > 1000 {
		s = strings.ToValidUTF8(s[:1000], "") + "..."
	}
	return s
}
