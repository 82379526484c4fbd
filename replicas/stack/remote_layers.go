package stack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack/layer"
)

// A replica may name layers that its disk does not have yet. Sources supply such a layer chunk by chunk
// (layer.Hydration), until a copy is finished on the disk and Replica.Localize changes to the copy. A source is another
// disk of the machine or another machine. A layer of another disk needs no preparation: the first open begins the
// hydration.

// Remote returns the layers that the replica reads from sources.
func (r *Replica) Remote() (layers []RemoteLayer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.layers {
		if l.Hydration == nil || slices.ContainsFunc(layers, func(o RemoteLayer) bool { return o.UID == l.Rec.UID }) {
			continue
		}
		one := l.Hydration.Rec.Remote()
		if p := l.Hydration.Failed.Load(); p != nil {
			one.Why = *p
		}
		layers = append(layers, one)
	}
	return layers
}

// Hydrates reports whether the replica reads layers from sources, or has a replaced layer open.
func (r *Replica) Hydrates() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.replaced) > 0 || slices.ContainsFunc(r.layers, func(l *layer.Layer) bool { return l.Hydration != nil })
}

// OnLost calls fn, on the loop's thread, when reads begin or cease to wait for a source, and at once if they wait.
// The caller is not the loop's thread.
func (r *Replica) OnLost(fn func(lost bool)) {
	_ = r.onLoop(func() { // else the loop has ended, and nothing reads
		r.onLost = fn
		if r.sourceFails {
			fn(true)
		}
	})
}

// hydratingLayers returns the layers that the replica reads from sources. The disk may have a copy by now.
func (r *Replica) hydratingLayers() (map[string]bool, error) {
	layers := map[string]bool{}
	err := r.onLoop(func() {
		for _, l := range r.layers {
			if l.Hydration != nil {
				layers[l.Rec.UID] = true
			}
		}
	})
	return layers, err
}

// Localize switches the replica to the finished copies of hydrated layers. I/O continues; in the end Localize waits for
// I/O on the replaced layers.
func (r *Replica) Localize(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metaMu.Lock()
	closed := r.closed
	r.metaMu.Unlock()
	if closed {
		return r.nameError(errClosed)
	}
	old := r.replaced // layers that an earlier call could not close
	r.replaced = nil
	for i, l := range r.layers {
		if l.Hydration == nil {
			continue
		}
		own, err := r.disk.OpenLayerAs(l.Rec.UID, r.disk.Direct, true)
		if api.Is(err, api.NotFound) {
			continue
		}
		// A layer that was frozen when hydration began has no digest; the copy was compared with the later digest.
		if err == nil && (l.Rec.Root != "" && own.Rec.Root != l.Rec.Root || own.Rec.Size != l.Rec.Size) {
			err = errors.Join(api.Errorf(api.Corrupt, "layer %s differs from the layer of its "+
				"source", l.Rec.UID), own.Close())
		}
		if err != nil {
			return r.nameError(errors.Join(err, r.closeReplaced(ctx, old)))
		}
		// Neither the worker nor the loop uses the list meanwhile.
		r.work.do(func() {
			err = r.onLoop(func() {
				r.layers[i], r.fds[i+1] = own, int(own.Data.Fd())
				r.hydrates = slices.ContainsFunc(r.layers, func(l *layer.Layer) bool { return l.Hydration != nil })
				r.reportSource()
				r.fetchEnded() // reads that were set aside need no fetch any more
			})
		})
		if err != nil {
			return r.nameError(errors.Join(err, own.Close(), r.closeReplaced(ctx, old)))
		}
		old = append(old, l)
		slog.Info("layer is on the replica's own disk now", "replica", r.meta.UID, "volume", r.meta.Volume, "layer",
			l.Rec.UID)
	}
	return r.nameError(r.closeReplaced(ctx, old))
}

// closeReplaced closes replaced layers without I/O in progress.
func (r *Replica) closeReplaced(ctx context.Context, old []*layer.Layer) error {
	if len(old) == 0 {
		return nil
	}
	release, err := r.holdSoon(ctx)
	if err != nil {
		r.replaced = append(r.replaced, old...)
		return fmt.Errorf("layers that copies have replaced stay open for now: %w", err)
	}
	defer release()
	var errs []error
	for _, l := range old {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
