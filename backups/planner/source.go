package planner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// findSource finds the snapshot and the replica of a backup, or takes the snapshot. An error that is not retryable says
// why the backup can never be made. reader reads the target, the volume and the snapshot.
func (r *backupReconciler) findSource(ctx context.Context, reader client.Reader, b *api.Backup) (*api.ExportFact,
	error) {
	if err := validateNames([2]string{"volume", b.Spec.Volume}, [2]string{"snapshot", b.Spec.SnapshotName},
		[2]string{"backup target", b.Target()}); err != nil {
		return nil, err
	}
	v := &api.Volume{}
	if err := reader.Get(ctx, client.ObjectKey{Name: b.Spec.Volume}, v); apierrors.IsNotFound(err) {
		return nil, api.Errorf(api.NotFound, "volume %s does not exist", b.Spec.Volume)
	} else if err != nil {
		return nil, err
	}
	if err := v.RefuseStandby(); err != nil {
		return nil, err
	}
	if err := checkTarget(ctx, reader, b.Target()); err != nil {
		return nil, err
	}
	if v.Status.UID == "" || len(v.Status.Members) == 0 {
		return nil, api.Errorf(api.Unavailable, "volume %s is not ready: it is %s; the backup waits", v.Name,
			cmp.Or(v.Status.State, "new"))
	}
	snap, err := r.findSnapshot(ctx, reader, b, v)
	if err != nil {
		return nil, err
	}
	// The cache may have the snapshot already, and a member that was dropped for it still. Such a replica may have a
	// snapshot of the same UID and of another instant, and its backup would be the base of the next ones.
	if err := r.live.Get(ctx, client.ObjectKeyFromObject(v), v); err != nil {
		return nil, err
	}
	replicas, nodes, err := r.listReplicas(ctx, v.Name)
	if err != nil {
		return nil, err
	}
	unfinished, err := r.countUnfinished(ctx)
	if err != nil {
		return nil, err
	}
	rep, err := chooseSource(sourceView{volume: v, snapshot: snap, replicas: replicas, nodes: nodes,
		unfinished: unfinished, now: time.Now()})
	if err != nil {
		return nil, err
	}
	return &api.ExportFact{Volume: v.Name, VolumeUID: v.Status.UID, Snapshot: snap.Name, SnapshotUID: snap.Status.UID,
		Replica: rep.Spec.UID, Node: rep.Spec.Node, Disk: rep.Spec.Disk, CreationTime: snap.Status.CreationTime}, nil
}

// validateNames refuses names that no object can have, with which the API server answers requests with other errors
// than NotFound.
func validateNames(kindsAndNames ...[2]string) error {
	for _, n := range kindsAndNames {
		if n[1] != "" && len(validation.IsDNS1123Subdomain(n[1])) > 0 {
			return api.Errorf(api.Invalid, "%s %q does not exist: no object can have this name; make another backup", n[0], n[1])
		}
	}
	return nil
}

// validateTarget refuses a name that no BackupTarget can have.
func validateTarget(name string) error {
	if !api.CanNameTarget(name) {
		return api.Errorf(api.Invalid, "backup target %.80q does not exist: no target can have this name; correct the "+
			"parameter %s of the volume, and make another backup", name, api.ParameterBackupTarget)
	}
	return nil
}

// checkTarget explains why a backup waits for its target.
func checkTarget(ctx context.Context, reader client.Reader, name string) error {
	t := &api.BackupTarget{}
	err := reader.Get(ctx, client.ObjectKey{Name: name}, t)
	switch {
	case apierrors.IsNotFound(err):
		return api.Errorf(api.Unavailable, "backup target %s does not exist: the backup waits until the target is created",
			name)
	case err != nil:
		return err
	case t.DeletionTimestamp != nil:
		return api.Errorf(api.Unavailable, "backup target %s is being deleted", name)
	case t.Status.Format == api.FormatLonghorn:
		return api.Errorf(api.Invalid, "backup target %s: %s", name, t.ExplainReadOnly())
	case t.Spec.ReadOnly:
		return api.Errorf(api.Unavailable, "backup target %s is read-only: the backup waits until readOnly is false", name)
	case !t.Status.Available:
		return api.Errorf(api.Unavailable, "backup target %s is unavailable: %s", name,
			cmp.Or(t.Status.Message, "no node has looked at the target yet"))
	}
	return nil
}

// findSnapshot finds the snapshot of a backup, which must be ready, or takes the backup's own snapshot.
func (r *backupReconciler) findSnapshot(ctx context.Context, reader client.Reader, b *api.Backup,
	v *api.Volume) (*api.Snapshot, error) {
	own := b.Spec.SnapshotName == ""
	name := cmp.Or(b.Spec.SnapshotName, b.OwnSnapshotName())
	s := &api.Snapshot{}
	err := reader.Get(ctx, client.ObjectKey{Name: name}, s)
	switch {
	case apierrors.IsNotFound(err) && own && v.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "volume %s is being deleted: no snapshot can be taken; only a snapshot that "+
			"exists can be backed up", v.Name)
	case apierrors.IsNotFound(err) && own:
		return nil, r.takeSnapshot(ctx, b, v)
	case apierrors.IsNotFound(err):
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s does not exist", name, v.Name)
	case err != nil:
		return nil, err
	case s.Spec.Volume != v.Name:
		return nil, api.Errorf(api.Invalid, "snapshot %s is of volume %s, not of volume %s", name, s.Spec.Volume, v.Name)
	case s.DeletionTimestamp != nil && own:
		return nil, api.Errorf(api.Unavailable, "snapshot %s is being deleted: the backup takes another snapshot afterwards",
			name)
	case s.DeletionTimestamp != nil:
		return nil, api.Errorf(api.NotFound, "snapshot %s of volume %s is being deleted", name, v.Name)
	case s.Status.VolumeUID != "" && s.Status.VolumeUID != v.Status.UID:
		return nil, api.Errorf(api.NotFound, "snapshot %s is of an earlier volume %s, which does not exist any more", name,
			v.Name)
	case !s.Status.ReadyToUse:
		return nil, api.Errorf(api.Unavailable, "snapshot %s of volume %s is not ready: %s", name, v.Name,
			r.explainUnready(ctx, s, v))
	}
	return s, nil
}

// takeSnapshot creates the backup's own snapshot. The error says that the backup waits for the snapshot.
func (r *backupReconciler) takeSnapshot(ctx context.Context, b *api.Backup, v *api.Volume) error {
	s := api.NewSnapshot(v, b.OwnSnapshotName())
	s.Spec.Labels = map[string]string{api.LabelClone: "backup", api.LabelBackup: b.Name}
	if err := r.Create(ctx, s); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("snapshot %s: %w", s.Name, err)
	}
	return api.Errorf(api.Unavailable, "snapshot %s of volume %s is not ready: the snapshot is being taken", s.Name,
		v.Name)
}

// explainUnready says why a snapshot is not ready.
func (r *backupReconciler) explainUnready(ctx context.Context, s *api.Snapshot, v *api.Volume) string {
	if at := v.Status.AttachedNode; at != "" {
		n := &api.Node{}
		err := r.Get(ctx, client.ObjectKey{Name: at}, n)
		if apierrors.IsNotFound(err) || err == nil && r.silentIn(n, time.Now()) <= 0 {
			return fmt.Sprintf("volume %s is attached to node %s, which gives no sign of life", v.Name, at)
		}
	}
	return cmp.Or(s.Status.Error, "the snapshot is being taken")
}

// listReplicas lists the replicas of a volume, and all nodes. The caller does not change them.
func (r *backupReconciler) listReplicas(ctx context.Context, volume string) ([]api.Replica, []api.Node, error) {
	var replicas api.ReplicaList
	var nodes api.NodeList
	err := errors.Join(
		r.List(ctx, &replicas, client.MatchingFields{watch.ByVolume: volume}, client.UnsafeDisableDeepCopy),
		r.List(ctx, &nodes, client.UnsafeDisableDeepCopy))
	return replicas.Items, nodes.Items, err
}

// countUnfinished counts the backups of volumes and images that each node makes, or has to make.
func (r *backupReconciler) countUnfinished(ctx context.Context) (map[string]int, error) {
	var volumes api.BackupList
	var images api.BackupBackingImageList
	err := errors.Join(r.List(ctx, &volumes, client.UnsafeDisableDeepCopy),
		r.List(ctx, &images, client.UnsafeDisableDeepCopy))
	count := map[string]int{}
	for i := range volumes.Items {
		addUnfinished(count, &volumes.Items[i])
	}
	for i := range images.Items {
		addUnfinished(count, &images.Items[i])
	}
	return count, err
}

func addUnfinished(count map[string]int, b api.StoredBackup) {
	if node, _ := b.SourceDisk(); node != "" && !b.Ended() {
		count[node]++
	}
}

// sourceView is the input of the choice of a replica.
type sourceView struct {
	volume     *api.Volume
	snapshot   *api.Snapshot
	replicas   []api.Replica // of the volume
	nodes      []api.Node
	unfinished map[string]int // backups by node
	now        time.Time
}

// chooseSource chooses the replica that a backup is made from: a holder of the snapshot on a ready disk of a node with
// a recent heartbeat. A whole replica comes before a replica that lacks layers or is damaged, a node without the
// volume's device before the node with the device, a node with fewer unfinished backups before a node with more.
func chooseSource(view sourceView) (*api.Replica, error) {
	silent := func(n *api.Node) bool { return view.now.Sub(n.Status.Heartbeat.Time) >= n.SilentAfter() }
	var usable []*api.Replica
	var why []string
	holders := holdersOf(view.volume, view.snapshot.Status.VolumeUID, view.replicas)
	for i := range holders {
		rep := &holders[i]
		hindrance := explainDisk(rep.Spec.Node, rep.Spec.Disk, view.nodes, silent)
		switch {
		case rep.DeletionTimestamp != nil:
			hindrance = "the replica is being deleted"
		case rep.Status.Mode != api.ReplicaCurrent:
			hindrance = fmt.Sprintf("the replica is %s", cmp.Or(rep.Status.Mode, "new"))
		}
		if hindrance == "" {
			usable = append(usable, rep)
		} else {
			why = append(why, fmt.Sprintf("replica %s: %s", rep.Name, hindrance))
		}
	}
	if len(usable) == 0 {
		slices.Sort(why)
		return nil, api.Errorf(api.Unavailable, "volume %s has no replica that a backup can be made from now: %s",
			view.volume.Name, cmp.Or(strings.Join(why, "; "), "no replica is a member"))
	}
	return slices.MinFunc(usable, func(a, b *api.Replica) int {
		return cmp.Or(cmp.Compare(rankReplica(a, view.volume), rankReplica(b, view.volume)),
			cmp.Compare(view.unfinished[a.Spec.Node], view.unfinished[b.Spec.Node]), strings.Compare(a.Name, b.Name))
	}), nil
}

// rankReplica is smaller for a better source.
func rankReplica(rep *api.Replica, v *api.Volume) (rank int) {
	if rep.Status.Fetching != "" || rep.Status.BeyondRepair || len(rep.Status.Damage) > 0 {
		rank += 2
	}
	if rep.Spec.Node == v.Status.AttachedNode {
		rank++
	}
	return rank
}

// explainLoss says why the node of a backup cannot make the backup any more; empty: it can. v is empty if the volume
// does not exist.
func explainLoss(source *api.ExportFact, v *api.Volume, replicas []api.Replica, nodes []api.Node,
	silent func(*api.Node) bool) string {
	if why := explainDisk(source.Node, source.Disk, nodes, silent); why != "" {
		return why
	}
	holders := holdersOf(v, source.VolumeUID, replicas)
	i := slices.IndexFunc(holders, func(rep api.Replica) bool { return rep.Spec.UID == source.Replica })
	switch {
	case i < 0:
		return fmt.Sprintf("volume %s has no member %s any more", source.Volume, source.Replica)
	case holders[i].Spec.Node != source.Node || holders[i].Spec.Disk != source.Disk:
		return fmt.Sprintf("replica %s is on disk %s of node %s now", holders[i].Name, holders[i].Spec.Disk,
			holders[i].Spec.Node)
	}
	return ""
}

// holdersOf returns the replicas with the snapshots of a volume.
func holdersOf(v *api.Volume, volumeUID api.UID, replicas []api.Replica) []api.Replica {
	list := api.ReplicaList{Items: slices.Clone(replicas)}
	return list.Holders(v, &api.Snapshot{Status: api.SnapshotStatus{VolumeUID: volumeUID}})
}

// explainDisk says why a disk of a node cannot be read; empty: it can.
func explainDisk(node string, disk api.UID, nodes []api.Node, silent func(*api.Node) bool) string {
	n := findNode(nodes, node)
	if n == nil {
		return fmt.Sprintf("node %s does not exist", node)
	}
	if silent(n) {
		return fmt.Sprintf("node %s gives no sign of life", node)
	}
	i := slices.IndexFunc(n.Status.Disks, func(d api.DiskStatus) bool { return d.UID == disk })
	if i < 0 {
		return fmt.Sprintf("node %s has no disk %s", node, disk)
	}
	if d := &n.Status.Disks[i]; !d.Ready {
		return fmt.Sprintf("disk %s of node %s is not ready: %s", d.Path, node, d.Message)
	}
	return ""
}

func findNode(nodes []api.Node, name string) *api.Node {
	i := slices.IndexFunc(nodes, func(n api.Node) bool { return n.Name == name })
	if i < 0 {
		return nil
	}
	return &nodes[i]
}
