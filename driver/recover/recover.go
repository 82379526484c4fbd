// Package recover recreates objects from disks. Each disk describes its images, volumes and replicas. When the API
// server's state is lost, is an old copy, or never included a disk, the package creates the objects again, with names
// and UIDs.
//
// Invariants: the package only reads the disks, and deletes no object. The package writes specs, and the annotation
// from which the controller begins a status, so every status keeps its one writer. One exception needs an explicit
// request: raising a volume's epoch, by compare-and-swap like an engine. The package reports contradictions between two
// sources and changes nothing there.
//
//	disk:   image.json ──> BackingImage + recovered{uuid, layers, copies} ──controller──> status, ImageCopies
//	        stack.json ──> Replica spec ──data role finds it on its disk──> mode current
//	                  └──> Volume + recovered{uid, epoch, members} ──controller──> status
//
// The package has no goroutines.
package recover

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli"
)

// settleTime bounds the wait until the reconcilers use the created objects: seconds, but more on a busy machine.
const settleTime = 3 * time.Minute

// step is a finding and the action on the finding.
type step struct {
	cli.Finding
	do   func(context.Context) error
	done string                      // replaces Action after success
	wait func(context.Context) error // until the reconcilers use the object
}

type job struct {
	client  client.WithWatch
	options cli.RecoverOptions
	steps   []*step
	paths   []string // of the disks to read
	nodes   []api.Node
	disks   []*disk
	images  map[string]*api.BackingImage // by name
	volumes map[string]*api.Volume
	copies  map[string]*api.ImageCopy
	reps    map[string]*api.Replica
	atts    map[string]*api.Attachment
}

// Run compares disks with objects and, with Apply, creates the missing objects. Run implements cli.Recoverer.
func Run(ctx context.Context, c client.WithWatch, o cli.RecoverOptions) ([]cli.Finding, error) {
	j := &job{client: c, options: o}
	for _, name := range o.DeadNodes {
		if err := cli.ConfirmDead(ctx, c, name); err != nil {
			return nil, err
		}
	}
	if err := j.readObjects(ctx); err != nil {
		return nil, err
	}
	err := j.readDisks()
	if err == nil {
		j.planImages()
		j.planVolumes()
		j.planLost()
		if o.Apply {
			err = j.applyPlan(ctx)
		}
	}
	out := make([]cli.Finding, len(j.steps))
	for i, s := range j.steps {
		out[i] = s.Finding
	}
	return out, err
}

func (j *job) addStep(s step) *step {
	j.steps = append(j.steps, &s)
	return &s
}

// applyPlan carries out the plan in order: images, then replicas before their volumes.
func (j *job) applyPlan(ctx context.Context) error {
	var errs []error
	for _, s := range j.steps {
		if s.do == nil {
			continue
		}
		if err := s.do(ctx); err != nil {
			err = api.Explain(err, "%s of %s %s", s.Action, s.Kind, s.Name)
			s.Note, s.wait = err.Error(), nil
			errs = append(errs, err)
			continue
		}
		s.Action = s.done
	}
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	for _, s := range j.steps {
		if s.wait == nil || j.options.NoWait {
			continue
		}
		if err := s.wait(ctx); err != nil {
			err = fmt.Errorf("%s %s was created, and is not in use yet: is a controller running? %w", s.Kind, s.Name, err)
			s.Note = err.Error()
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (j *job) awaitVolume(name string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := await.Until(ctx, j.client, name, func(v *api.Volume) (bool, error) {
			if v.Status.State == api.VolumeCreating || v.Status.State == "" {
				return false, nil
			}
			return v.Status.Robustness == api.RobustHealthy || v.Status.Robustness == api.RobustDegraded, nil
		})
		return api.Explain(err, "volume %s", name)
	}
}

func (j *job) awaitImage(name string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := await.Until(ctx, j.client, name, func(i *api.BackingImage) (bool, error) {
			return i.Status.State == api.ImageReady, nil
		})
		return api.Explain(err, "image %s", name)
	}
}

// readObjects reads the objects for the comparison.
func (j *job) readObjects(ctx context.Context) error {
	var nodes api.NodeList
	var images api.BackingImageList
	var volumes api.VolumeList
	var copies api.ImageCopyList
	var reps api.ReplicaList
	var atts api.AttachmentList
	for _, l := range []client.ObjectList{&nodes, &images, &volumes, &copies, &reps, &atts} {
		if err := j.client.List(ctx, l); err != nil {
			return api.Explain(err, "read the objects of the API")
		}
	}
	j.nodes = nodes.Items
	j.images, j.volumes = byName[api.BackingImage](images.Items), byName[api.Volume](volumes.Items)
	j.copies, j.reps = byName[api.ImageCopy](copies.Items), byName[api.Replica](reps.Items)
	j.atts = byName[api.Attachment](atts.Items)
	return nil
}

func byName[T any, P interface {
	*T
	client.Object
}](items []T) map[string]*T {
	out := make(map[string]*T, len(items))
	for i := range items {
		out[P(&items[i]).GetName()] = &items[i]
	}
	return out
}

// createObject creates an object. An object of the same name, created since the comparison, is an error.
func (j *job) createObject(obj client.Object) func(context.Context) error {
	return func(ctx context.Context) error {
		err := j.client.Create(ctx, obj)
		if apierrors.IsAlreadyExists(err) {
			return api.Errorf(api.Exists, "the object was created by another client meanwhile; run the command again")
		}
		return err
	}
}

// recordNode records the node that has the object's disk now.
func (j *job) recordNode(obj client.Object, set func()) func(context.Context) error {
	return func(ctx context.Context) error {
		base := obj.DeepCopyObject().(client.Object)
		set()
		return j.client.Patch(ctx, obj, client.MergeFromWithOptions(base, client.MergeFromWithOptimisticLock{}))
	}
}
