package replica

import (
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// Disk is the open disk of a uid, at the path that the node role wrote into the Node. Disk lists the replicas of a disk
// at the first call.
func (rs *Replicas) Disk(ctx context.Context, uid api.UID) (*stack.Disk, error) {
	var n api.Node
	if err := rs.Client.Get(ctx, client.ObjectKey{Name: rs.Name}, &n); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.Unavailable, "node %s does not exist", rs.Name)
	} else if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(n.Status.Disks, func(s api.DiskStatus) bool { return s.UID == uid })
	if i < 0 {
		return nil, api.Errorf(api.Unavailable, "disk %s is not on node %s", uid, rs.Name)
	}
	if st := n.Status.Disks[i]; !st.Ready {
		return nil, api.Errorf(api.Unavailable, "disk %s is not ready: %s", st.Path, st.Message)
	}
	path := n.Status.Disks[i].Path
	disk, err := rs.Disks.Get(uid)
	if err != nil || disk.Path() != path { // the disk is unknown, or mounted elsewhere now
		if disk, err = rs.Disks.Open(ctx, path, uid, false); err != nil {
			return nil, err
		}
		rs.Disks.ForgetOtherPaths(disk)
	}
	rs.mu.Lock()
	fresh := !rs.listed[uid]
	rs.mu.Unlock()
	if err := rs.listReplicas(disk); err != nil || !fresh {
		return disk, err
	}
	if err := rs.dropStalePins(ctx, disk); err != nil {
		rs.Log.Warn("pins of a disk cannot be looked at", "disk", disk.Path(), "err", err)
	}
	return disk, nil
}

// listReplicas notes the replicas of a disk once; this process makes all later ones.
func (rs *Replicas) listReplicas(disk *stack.Disk) error {
	uid := api.UID(disk.UID())
	rs.mu.Lock()
	done := rs.listed[uid]
	rs.mu.Unlock()
	if done {
		return nil
	}
	have, err := disk.Replicas()
	if err != nil {
		rs.Log.Error("some replicas cannot be read", "disk", disk.Path(), "err", err)
	}
	var found []api.UID
	rs.mu.Lock()
	for _, m := range have {
		rs.exist[api.UID(m.UID)] = true
		if len(m.Snapshots) > 0 {
			found = append(found, api.UID(m.UID))
		}
	}
	rs.listed[uid] = true
	rs.mu.Unlock()
	for _, uid := range found {
		rs.snapshots.Found(uid)
	}
	for _, m := range have { // a former process may have left layers to merge
		if m.Merge != nil || len(m.Layers) > 1 || len(m.Branches) > 1 {
			rs.merges.Due(disk, m.UID, m.Volume)
		}
	}
	rs.merges.Wake(disk)
	return nil
}

// onDisk reports whether a replica is known to exist on its disk.
func (rs *Replicas) onDisk(uid api.UID) bool {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	return rs.exist[uid]
}

// holds reports whether a replica exists on its disk.
func (rs *Replicas) holds(disk *stack.Disk, uid api.UID) (bool, error) {
	if rs.onDisk(uid) {
		return true, nil
	}
	there, err := disk.Holds(string(uid))
	if there {
		rs.setOnDisk(uid, true)
	}
	return there, err
}

func (rs *Replicas) setOnDisk(uid api.UID, is bool) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	if is {
		rs.exist[uid] = true
	} else {
		delete(rs.exist, uid)
		delete(rs.doubts, uid)
		delete(rs.complete, uid)
	}
}
