package controller

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Changes are ranges of a snapshot, ascending and apart from each other.
type Changes interface {
	// Size of the snapshot in bytes.
	Size() int64
	// Next is the first range at or after off; none: io.EOF.
	Next(off int64) (block.Extent, error)
	io.Closer
}

// OpenChanges finds, in a replica, the ranges of a snapshot that a base snapshot lacks; without a base, all ranges.
type OpenChanges func(ctx context.Context, r *api.Replica, base, target api.UID) (Changes, error)

// Metadata answers the SnapshotMetadata RPCs from the maps of the layers, exactly, in blocks of 4 KiB.
type Metadata struct {
	csi.UnimplementedSnapshotMetadataServer
	server *Server
	open   OpenChanges
}

// NewMetadata makes the service.
func NewMetadata(s *Server, open OpenChanges) *Metadata { return &Metadata{server: s, open: open} }

const (
	metadataResults = 1024
	metadataMost    = 16384 // in one message
)

// GetMetadataAllocated streams the ranges of a snapshot that hold data.
func (m *Metadata) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest,
	out csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	return m.streamChanges(out.Context(), "", req.GetSnapshotId(), req.GetStartingOffset(), req.GetMaxResults(),
		func(size int64, list []*csi.BlockMetadata) error {
			return out.Send(&csi.GetMetadataAllocatedResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH,
				VolumeCapacityBytes: size, BlockMetadata: list})
		})
}

// GetMetadataDelta streams the ranges in which a snapshot differs from another snapshot of the same volume.
func (m *Metadata) GetMetadataDelta(req *csi.GetMetadataDeltaRequest,
	out csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	if req.GetBaseSnapshotId() == "" {
		return api.Errorf(api.Invalid, "the request names no base snapshot")
	}
	return m.streamChanges(out.Context(), req.GetBaseSnapshotId(), req.GetTargetSnapshotId(), req.GetStartingOffset(),
		req.GetMaxResults(), func(size int64, list []*csi.BlockMetadata) error {
			return out.Send(&csi.GetMetadataDeltaResponse{BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH,
				VolumeCapacityBytes: size, BlockMetadata: list})
		})
}

func (m *Metadata) streamChanges(ctx context.Context, base, target string, from int64, results int32,
	send func(size int64, list []*csi.BlockMetadata) error) error {
	switch {
	case target == "":
		return api.Errorf(api.Invalid, "the request names no snapshot")
	case results < 0:
		return api.Errorf(api.Invalid, "max_results is %d", results)
	case from < 0:
		return api.Errorf(api.OutOfRange, "starting_offset is %d", from)
	}
	most := metadataResults
	if results > 0 {
		most = min(int(results), metadataMost)
	}
	changes, err := m.openChanges(ctx, base, target)
	if err != nil {
		return err
	}
	defer changes.Close()
	if from >= changes.Size() {
		return api.Errorf(api.OutOfRange, "starting_offset %d is not in the %d bytes of snapshot %s", from, changes.Size(),
			target)
	}
	var list []*csi.BlockMetadata
	for off := from; ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		e, err := changes.Next(off)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return api.Explain(err, "maps of snapshot %s", target)
		}
		list = append(list, &csi.BlockMetadata{ByteOffset: e.Off, SizeBytes: e.Len})
		if off = e.End(); len(list) == most {
			if err := send(changes.Size(), list); err != nil {
				return err
			}
			list = nil
		}
	}
	if len(list) > 0 {
		return send(changes.Size(), list)
	}
	return nil
}

// openChanges opens the maps on a disk that has the snapshots.
func (m *Metadata) openChanges(ctx context.Context, base, target string) (Changes, error) {
	get := func(id string) (*api.Snapshot, error) {
		if id == "" {
			return &api.Snapshot{}, nil
		}
		snap, err := m.server.readSnapshot(ctx, id)
		if err == nil && !snap.Status.ReadyToUse {
			err = api.Errorf(api.Unavailable, "snapshot %s is not ready: %s", id, snap.Status.Error)
		}
		return snap, err
	}
	is, err := get(target)
	if err != nil {
		return nil, err
	}
	was, err := get(base)
	if err != nil {
		return nil, err
	}
	if base != "" && was.Spec.Volume != is.Spec.Volume {
		return nil, api.Errorf(api.Invalid, "snapshots %s and %s are of two volumes", base, target)
	}
	members, err := m.findReplicasWith(ctx, is)
	if err != nil {
		return nil, err
	}
	var why []error
	for i := range members {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		c, err := m.open(ctx, &members[i], was.Status.UID, is.Status.UID)
		if err == nil {
			return c, nil
		}
		why = append(why, fmt.Errorf("replica %s: %w", members[i].Name, err))
	}
	if len(why) == 0 {
		why = []error{errors.New("the volume has no replica")}
	}
	return nil, api.Errorf(api.Unavailable, "snapshot %s: no replica of its volume can tell of its blocks now, "+
		"try again: %w", target, errors.Join(why...))
}

// findReplicasWith returns the replicas that hold the content of a snapshot's volume.
func (m *Metadata) findReplicasWith(ctx context.Context, s *api.Snapshot) ([]api.Replica, error) {
	var vol api.Volume
	if err := m.server.client.Get(ctx, client.ObjectKey{Name: s.Spec.Volume}, &vol); err != nil {
		return nil, api.Explain(err, "read volume %s", s.Spec.Volume)
	}
	var list api.ReplicaList
	if err := m.server.client.List(ctx, &list); err != nil {
		return nil, api.Explain(err, "list the replicas of volume %s", s.Spec.Volume)
	}
	return list.Holders(&vol, s), nil
}
