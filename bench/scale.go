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

// few is the number of images and volumes that single operations are compared with.
const few = 10

// scale times single operations beside a few images and volumes, and beside n of each, on two disks. Every image is a
// file of its own, and every volume stands on one of them.
func (b *bench) scale(ctx context.Context, n int) (err error) {
	dir, err := os.MkdirTemp(b.options.dir, "drover-scale.")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	in, err := start(ctx, b.drover, dir, filepath.Join(dir, "disk2"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.stop()) }()
	s := &crowd{in: in, file: filepath.Join(dir, "tiny.raw"), took: map[string][]float64{}}
	if err := randomFile(s.file, 64<<10, false); err != nil {
		return err
	}
	if err := s.fill(ctx, few); err != nil {
		return err
	}
	before, err := s.measure(ctx, max(b.rounds, 5))
	if err != nil {
		return err
	}
	began := time.Now()
	if err := s.fill(ctx, n); err != nil {
		return err
	}
	b.add("images-many", "fill", float64(n-few)/time.Since(began).Seconds(), "pairs/s", "", 0,
		fmt.Sprintf("until there are %d images and %d volumes", n, n))
	after, err := s.measure(ctx, max(b.rounds, 5))
	if err != nil {
		return err
	}
	for _, op := range s.order {
		b.add("images-many", fmt.Sprintf("%s beside %d", op, n), after[op]*1e3, "ms", fmt.Sprintf("beside %d", few),
			before[op]*1e3, "")
	}
	return nil
}

// crowd is an instance with many images and volumes.
type crowd struct {
	in    *instance
	file  string
	have  int
	order []string
	took  map[string][]float64
}

// fill makes images and volumes until there are n of each.
func (s *crowd) fill(ctx context.Context, n int) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(8)
	for i := s.have; i < n; i++ {
		g.Go(func() error {
			name := fmt.Sprintf("crowd-%d", i)
			if err := s.in.importFile(ctx, name, s.file); err != nil {
				return fmt.Errorf("image %s: %w", name, err)
			}
			return s.volume(ctx, name, name)
		})
	}
	s.have = n
	return g.Wait()
}

func (s *crowd) volume(ctx context.Context, name, image string) error {
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

// measure times each operation some rounds and returns the medians.
func (s *crowd) measure(ctx context.Context, rounds int) (map[string]float64, error) {
	clear(s.took)
	s.order = nil
	for i := range rounds {
		name := fmt.Sprintf("single-%d-%d", s.have, i)
		for _, step := range []struct {
			op string
			do func() error
		}{
			{"image-create", func() error { return s.in.importFile(ctx, name, s.file) }},
			{"volume-create", func() error { return s.volume(ctx, name, name) }},
			{"volume-attach", func() error { return s.attach(ctx, name) }},
			{"volume-detach", func() error { return s.in.detach(ctx, name) }},
			{"volume-get", func() error { return s.in.client.Get(ctx, client.ObjectKey{Name: name}, &api.Volume{}) }},
			{"image-list-page", func() error { return s.in.client.List(ctx, &api.BackingImageList{}, client.Limit(few)) }},
			{"volume-delete", func() error { return s.in.deleteVolume(ctx, name) }},
			{"image-delete", func() error { return s.in.deleteImage(ctx, name) }},
		} {
			began := time.Now()
			if err := step.do(); err != nil {
				return nil, fmt.Errorf("%s: %w", step.op, err)
			}
			if s.took[step.op] == nil {
				s.order = append(s.order, step.op)
			}
			s.took[step.op] = append(s.took[step.op], time.Since(began).Seconds())
		}
	}
	out := map[string]float64{}
	for op, t := range s.took {
		out[op] = median(t)
	}
	return out, nil
}

func (s *crowd) attach(ctx context.Context, name string) error {
	a := &api.Attachment{Spec: api.AttachmentSpec{Volume: name, Node: s.in.node}}
	a.Name, a.Labels = name, map[string]string{api.LabelVolume: name, api.LabelNode: s.in.node}
	if err := s.in.client.Create(ctx, a); err != nil {
		return err
	}
	_, err := await.Until(ctx, s.in.client, name, func(a *api.Attachment) (bool, error) {
		return a.Status.Ready && a.Status.Device != "", nil
	})
	return err
}
