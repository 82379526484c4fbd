package snapshot

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/replicas/engine"
)

// engineHandle is the engine of a volume for one operation.
type engineHandle struct {
	*engine.Engine
	local api.UID // the member on this node; empty: none
	end   func() error
}

// openEngine gets the engine of a volume. The caller has the volume's lock, and calls end.
func (ss *Snapshots) openEngine(ctx context.Context, v *api.Volume) (*engineHandle, error) {
	e, local, end, err := ss.attachments.Engine(ctx, v)
	if err != nil {
		return nil, err
	}
	return &engineHandle{e, local, end}, nil
}

// readTree returns the snapshots of all members, with their neighbours.
func (h *engineHandle) readTree(ctx context.Context) (*Tree, error) {
	m, err := h.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	return buildTree(m), nil
}
