package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// few is the number of images and volumes of the baseline.
const few = 10

// scale times single operations beside a few images and volumes, and beside n of each, on two disks. Every image has
// its own file, and every volume stands on an image. Two instances take turns.
func (b *bench) scale(ctx context.Context, n int) (err error) {
	var subjects []*crowd
	defer func() {
		for _, s := range subjects {
			err = errors.Join(err, s.in.stop(), os.RemoveAll(s.dir))
		}
	}()
	for _, count := range []int{few, n} {
		s := &crowd{took: map[string][]float64{}}
		if s.dir, err = os.MkdirTemp(b.options.dir, "drover-scale."); err != nil {
			return err
		}
		if s.in, err = startInstance(ctx, b.drover, s.dir, filepath.Join(s.dir, "disk2")); err != nil {
			return errors.Join(err, os.RemoveAll(s.dir))
		}
		subjects = append(subjects, s)
		s.file = filepath.Join(s.dir, "tiny.raw")
		if err := randomFile(s.file, 64<<10, false); err != nil {
			return err
		}
		began := time.Now()
		if err := s.createObjects(ctx, count); err != nil {
			return err
		}
		if count == n {
			b.addFigure("images-many", "fill", float64(n)/time.Since(began).Seconds(), "pairs/s", "", 0,
				fmt.Sprintf("until %d images and %d volumes exist", n, n))
		}
	}
	for i := range max(b.rounds, 9) {
		for _, s := range subjects {
			if err := s.measure(ctx, i); err != nil {
				return err
			}
		}
	}
	before, after := subjects[0], subjects[1]
	for _, op := range after.order {
		b.addFigure("images-many", fmt.Sprintf("%s beside %d", op, n), median(after.took[op])*1e3, "ms",
			fmt.Sprintf("beside %d", few), median(before.took[op])*1e3, "")
	}
	return nil
}

// crowd is an instance with many images and volumes.
type crowd struct {
	in        *instance
	dir, file string
	order     []string
	took      map[string][]float64
}

// createObjects creates n images and volumes.
func (s *crowd) createObjects(ctx context.Context, n int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i := range n {
		g.Go(func() error {
			name := fmt.Sprintf("crowd-%d", i)
			if err := s.in.importFile(ctx, name, s.file); err != nil {
				return fmt.Errorf("image %s: %w", name, err)
			}
			return s.createVolume(ctx, name, name)
		})
	}
	return g.Wait()
}

func (s *crowd) createVolume(ctx context.Context, name, image string) error {
	v := &api.Volume{Spec: api.VolumeSpec{Size: 16 << 20, BackingImage: image}}
	v.Name = name
	if err := s.in.client.Create(ctx, v); err != nil {
		return err
	}
	_, err := await.Until(ctx, s.in.client, name, func(v *api.Volume) (bool, error) {
		return v.Status.State == api.VolumeDetached, nil
	})
	return err
}

// measure times each operation once.
func (s *crowd) measure(ctx context.Context, round int) error {
	name := fmt.Sprintf("single-%d", round)
	for _, step := range []struct {
		op string
		do func() error
	}{
		{"image-create", func() error { return s.in.importFile(ctx, name, s.file) }},
		{"volume-create", func() error { return s.createVolume(ctx, name, name) }},
		{"volume-attach", func() error { return s.attach(ctx, name) }},
		{"volume-detach", func() error { return s.in.detach(ctx, name) }},
		{"volume-get", func() error { return s.in.client.Get(ctx, client.ObjectKey{Name: name}, &api.Volume{}) }},
		{"image-list-page", func() error { return s.in.client.List(ctx, &api.BackingImageList{}, client.Limit(few)) }},
		{"volume-delete", func() error { return s.in.deleteVolume(ctx, name) }},
		{"image-delete", func() error { return s.in.deleteImage(ctx, name) }},
	} {
		began := time.Now()
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.op, err)
		}
		if s.took[step.op] == nil {
			s.order = append(s.order, step.op)
		}
		s.took[step.op] = append(s.took[step.op], time.Since(began).Seconds())
	}
	return nil
}

func (s *crowd) attach(ctx context.Context, name string) error {
	a := &api.Attachment{Spec: api.AttachmentSpec{Volume: name, Node: s.in.node}}
	a.Name, a.Labels = name, map[string]string{api.LabelVolume: api.LabelValue(name),
		api.LabelNode: api.LabelValue(s.in.node)}
	if err := s.in.client.Create(ctx, a); err != nil {
		return err
	}
	_, err := await.Until(ctx, s.in.client, name, func(a *api.Attachment) (bool, error) {
		return a.Status.Ready && a.Status.Device != "", nil
	})
	return err
}
