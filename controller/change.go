package controller

import (
	"context"
	"reflect"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/api/meta"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// editVolume edits a volume's spec; edit returns false where nothing is to be done.
func (s *Server) editVolume(ctx context.Context, id string, edit func(*api.Volume) (bool, error)) (*api.Volume, error) {
	if _, err := s.readVolume(ctx, id); err != nil {
		return nil, err
	}
	vol, err := await.Edit(ctx, s.client, id, func(v *api.Volume) (bool, error) {
		if v.DeletionTimestamp != nil {
			return false, api.Errorf(api.InUse, "volume %s is being deleted", id)
		}
		return edit(v)
	})
	if err != nil {
		return nil, api.Explain(err, "change volume %.80s", id)
	}
	return vol, nil
}

// ControllerExpandVolume grows the volume and waits until every replica, and the device of an attached volume, has
// the size.
func (s *Server) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (
	*csi.ControllerExpandVolumeResponse, error) {
	ctx, cancel := await.Bound(ctx, waitDefault)
	defer cancel()
	if req.GetVolumeId() == "" || req.GetCapacityRange() == nil {
		return nil, api.Errorf(api.Invalid, "expanding needs a volume and a capacity range")
	}
	required, limit, err := checkCapacityRange(req.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	if c := req.GetVolumeCapability(); c != nil {
		if err := checkCapability(c); err != nil {
			return nil, err
		}
	}
	vol, err := s.editVolume(ctx, req.GetVolumeId(), func(v *api.Volume) (bool, error) {
		if limit > 0 && v.Spec.Size > limit {
			return false, api.Errorf(api.OutOfRange, "the volume has %d bytes, over the limit of %d, and cannot shrink",
				v.Spec.Size, limit)
		}
		if required <= v.Spec.Size {
			return false, nil
		}
		if err := v.RefuseStandby(); err != nil { // it grows with its backups
			return false, err
		}
		n := api.RoundSize(required)
		if limit > 0 && n > limit {
			return false, api.Errorf(api.OutOfRange, "the next size is %d bytes, over the limit of %d", n, limit)
		}
		if err := s.mayGrow(ctx, v.Name, n); err != nil {
			return false, err
		}
		v.Spec.Size = n
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	want, msg := vol.Spec.Size, ""
	vol, err = await.Until(ctx, s.client, vol.Name, func(v *api.Volume) (bool, error) {
		if c := meta.FindStatusCondition(v.Status.Conditions, api.ConditionExpanded); c != nil && c.Status == "False" {
			if c.Reason == "NoRoom" && c.ObservedGeneration >= v.Generation {
				return false, api.Errorf(api.Full, "no room: %s", c.Message)
			}
			msg = " (" + c.Message + ")"
		}
		return v.Status.Size >= want, nil
	})
	if err != nil {
		return nil, api.Explain(err, "expand volume %s to %d bytes%s", req.GetVolumeId(), want, msg)
	}
	return &csi.ControllerExpandVolumeResponse{
		CapacityBytes: vol.Status.Size,
		// A block device grows by itself; a file system is told on the node.
		NodeExpansionRequired: req.GetVolumeCapability().GetBlock() == nil,
	}, nil
}

// mayGrow refuses a size that the planner would have to hold back: a wish cannot be taken back, and the caller may
// want to ask for less.
func (s *Server) mayGrow(ctx context.Context, volume string, size int64) error {
	reps, nodes := &api.ReplicaList{}, &api.NodeList{}
	if err := s.client.List(ctx, reps); err != nil {
		return api.Explain(err, "list replicas")
	}
	if err := s.client.List(ctx, nodes); err != nil {
		return api.Explain(err, "list nodes")
	}
	over, err := s.readNumber(ctx, "storage-over-provisioning-percentage")
	if err != nil {
		return err
	}
	promised := map[api.UID]int64{}
	for _, r := range reps.Items {
		promised[r.Spec.Disk] += r.Spec.Size
	}
	for _, r := range reps.Items {
		if r.Spec.Volume != volume || r.DeletionTimestamp != nil {
			continue
		}
		promised[r.Spec.Disk] += max(size-r.Spec.Size, 0)
		for i := range nodes.Items {
			n := &nodes.Items[i]
			for _, d := range n.Status.Disks {
				if d.UID != r.Spec.Disk || n.Name != r.Spec.Node {
					continue
				}
				limit := d.Capacity
				if spec := diskSpec(n, d.Path); spec != nil {
					limit -= spec.ReservedBytes
				}
				if limit = max(limit, 0) / 100 * over; promised[d.UID] > limit {
					return api.Errorf(api.Full, "no room for %d bytes: disk %s of node %s would promise %d bytes to volumes, and "+
						"its limit is %d (setting storage-over-provisioning-percentage); the volume keeps its size",
						size, d.Path, n.Name, promised[d.UID], limit)
				}
			}
		}
	}
	return nil
}

// ControllerModifyVolume changes the given keys, all or none, and touches no other.
func (s *Server) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (
	*csi.ControllerModifyVolumeResponse, error) {
	if _, err := s.readVolume(ctx, req.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := new(wish).parseMutable(req.GetMutableParameters()); err != nil {
		return nil, api.Explain(err, "modify volume %s", req.GetVolumeId())
	}
	_, err := s.editVolume(ctx, req.GetVolumeId(), func(v *api.Volume) (bool, error) {
		w := &wish{spec: *v.Spec.DeepCopy()}
		if err := w.parseMutable(req.GetMutableParameters()); err != nil {
			return false, err
		}
		if err := strictLocal(&w.spec); err != nil {
			return false, err
		}
		if w.spec.DataLocality != v.Spec.DataLocality {
			if err := s.mayBeStrict(ctx, v, &w.spec); err != nil {
				return false, err
			}
		}
		same := reflect.DeepEqual(w.spec, v.Spec)
		v.Spec = w.spec
		return !same, nil
	})
	if err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, nil
}
