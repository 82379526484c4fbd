package planner

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
)

// Settings of balance.
const (
	settingBalance     = "replica-auto-balance"
	settingBalanceWait = "replica-auto-balance-wait-interval"
	settingPressure    = "replica-auto-balance-disk-pressure-percentage"
	settingCopies      = "concurrent-replica-copies-per-node"
)

// balanceAgain is the delay before a retry of a migration that waits for others.
const balanceAgain = 10 * time.Second

// migration is a replica that moves to another disk.
type migration struct {
	from, to api.UID // disks
	node     string  // of the target
	bytes    int64
}

// migrationLog holds the migrations of all volumes, and the start of each volume's wait for a migration.
type migrationLog struct {
	under map[string]migration // by volume
	since map[string]time.Time // by volume: since when the volume is healthy and has a better place
}

// balanceMode returns the mode of a volume: from the spec, else from the setting.
func (p *volumeReconciler) balanceMode(ctx context.Context, v *api.Volume) string {
	switch m := v.Spec.ReplicaAutoBalance; m {
	case balanceDisabled, balanceLeast, balanceBest:
		return m
	}
	return p.settingText(ctx, settingBalance)
}

// settingText returns a setting, or its default.
func (p *volumeReconciler) settingText(ctx context.Context, name string) string {
	var s api.Setting
	if err := p.client.Get(ctx, client.ObjectKey{Name: name}, &s); err == nil {
		return s.Value
	}
	return api.Settings[name]
}

// balanceReplicas starts at most one migration of a volume, after decision d about its replicas.
func (p *volumeReconciler) balanceReplicas(ctx context.Context, v *api.Volume, s *replicaSet, d *decision,
	att *api.Attachment) error {
	if from, to := s.migrating(); to != nil {
		p.startMigration(v.Name, migration{from.Spec.Disk, to.Spec.Disk, to.Spec.Node, from.Status.Used}, 0)
		setCondition(v, api.ConditionBalanced, false, "Moving", fmt.Sprintf("replica %s on node %s is deleted when "+
			"replica %s on node %s has all data", from.Name, from.Spec.Node, to.Name, to.Spec.Node))
		return nil
	}
	p.endMigration(v.Name)
	mode := p.balanceMode(ctx, v)
	if mode == balanceDisabled || v.Spec.NumberOfReplicas < 2 {
		p.improvableSince(v.Name, false)
		meta.RemoveStatusCondition(&v.Status.Conditions, api.ConditionBalanced)
		return nil
	}
	if !s.isHealthy(d) || att != nil && (att.DeletionTimestamp != nil || !att.Status.Ready) {
		p.improvableSince(v.Name, false)
		return nil
	}
	image, err := p.usableImage(ctx, v)
	if err != nil {
		return ignoreFacts(err)
	}
	t, failed, err := p.viewCluster(ctx, v, baseImage(v, nil, s.mine), s.mine)
	if err != nil {
		return err
	}
	m := findMigration(v, t, balanceRules{mode: mode, stay: s.attached, use: p.percentAfterMigrations(t.nodes),
		limit: p.settingNumber(ctx, settingPressure)})
	switch {
	case *failed != nil:
		return *failed
	case m == nil:
		p.improvableSince(v.Name, false)
		setCondition(v, api.ConditionBalanced, true, "Spread", "no replica has a better place to go to")
		return nil
	}
	what := fmt.Sprintf("replica %s on node %s is to be on disk %s of node %s: %s", m.from.Name, m.from.Spec.Node,
		m.to.path, m.to.node, m.why)
	wait := time.Duration(p.settingNumber(ctx, settingBalanceWait)) * time.Second
	if left := wait - p.improvableSince(v.Name, true); left > 0 {
		setCondition(v, api.ConditionBalanced, false, "Waiting", what+fmt.Sprintf(", once the volume was healthy for %v (%s)",
			wait, settingBalanceWait))
		p.requeueAfter(v.Name, left)
		return nil
	}
	f := migration{m.from.Spec.Disk, m.to.disk, m.to.node, m.from.Status.Used}
	if !p.startMigration(v.Name, f, max(int(p.settingNumber(ctx, settingCopies)), 1)) {
		setCondition(v, api.ConditionBalanced, false, "Waiting", what+", once others have moved ("+settingCopies+")")
		p.requeueAfter(v.Name, balanceAgain)
		return nil
	}
	r, err := p.placeOne(ctx, v, image, nil, s.mine, func(t *clusterView) {
		t.leaving, t.only, t.strict, t.instead = []string{m.from.Name}, m.to.disk, true, m.from.Name
	})
	p.improvableSince(v.Name, false) // after a failure the wait starts again
	if err != nil {
		p.endMigration(v.Name)
		return ignoreFacts(err)
	}
	s.mine = append(s.mine, *r)
	setCondition(v, api.ConditionBalanced, false, "Moving", what)
	p.events.Eventf(v, r, "Normal", "ReplicaMoves", "Balance", "%s", what)
	return nil
}

// ignoreFacts returns nil for an error with a kind: a retry would not change a fact.
func ignoreFacts(err error) error {
	if api.KindOf(err) != api.Other {
		return nil
	}
	return err
}

// migrating returns a replica that another replica replaces, and the other replica.
func (s *replicaSet) migrating() (from, to *api.Replica) {
	for i := range s.mine {
		r := &s.mine[i]
		if r.DeletionTimestamp != nil || !s.takesPlace(r) {
			continue
		}
		k := slices.IndexFunc(s.mine, func(o api.Replica) bool { return o.Name == r.Spec.Instead })
		return &s.mine[k], r
	}
	return nil, nil
}

// isHealthy reports whether a volume has every wanted replica and no change is in progress.
func (s *replicaSet) isHealthy(d *decision) bool {
	v := s.v
	if d.add > 0 || len(d.drop) > 0 || len(d.leaving) > 0 || len(s.mine) != int(v.Spec.NumberOfReplicas) ||
		v.Status.Size < v.Spec.Size || v.Spec.RevertTo != nil && (v.Status.Reverted == nil ||
		v.Status.Reverted.ID != v.Spec.RevertTo.ID || v.Status.Reverted.State == api.CloneInitiated) {
		return false
	}
	for i := range s.mine {
		r := &s.mine[i]
		if r.DeletionTimestamp != nil || r.Spec.Leave || r.Status.Mode != api.ReplicaCurrent || r.Status.Pinned ||
			r.Status.Copy != nil || r.Status.Fetching != "" || s.isDead(r) || s.away(r.Spec.Node) > 0 ||
			!slices.Contains(v.Status.Members, r.Name) {
			return false
		}
	}
	return true
}

// improvableSince records whether a volume has a better place, and returns for how long the volume has had a better
// place.
func (p *volumeReconciler) improvableSince(volume string, is bool) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !is {
		delete(p.migrations.since, volume)
		return 0
	}
	if _, known := p.migrations.since[volume]; !known {
		p.migrations.since[volume] = time.Now()
	}
	return time.Since(p.migrations.since[volume])
}

// startMigration records a migration, unless as many as most already move to the node; 0: the migration has started.
func (p *volumeReconciler) startMigration(volume string, f migration, most int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, o := range p.migrations.under {
		if o.node == f.node {
			n++
		}
	}
	if most > 0 && n >= most {
		return false
	}
	p.migrations.under[volume] = f
	return true
}

// endMigration forgets the migration of a volume.
func (p *volumeReconciler) endMigration(volume string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.migrations.under, volume)
}

// percentAfterMigrations returns a function that computes how full a disk will be after all current migrations.
func (p *volumeReconciler) percentAfterMigrations(nodes []api.Node) func(disk api.UID, more int64) int64 {
	return func(disk api.UID, more int64) int64 {
		p.mu.Lock()
		for _, f := range p.migrations.under {
			if f.to == disk {
				more += f.bytes
			}
			if f.from == disk {
				more -= f.bytes
			}
		}
		p.mu.Unlock()
		for i := range nodes {
			for _, d := range nodes[i].Status.Disks {
				if d.UID == disk && d.Capacity > 0 {
					return percentUsed(d, more)
				}
			}
		}
		return 100 // an unknown disk
	}
}

// percentUsed is how much of a disk is in use with more bytes, in percent.
func percentUsed(d api.DiskStatus, more int64) int64 {
	return (d.Capacity - d.Available + more) * 100 / max(d.Capacity, 1)
}

// spreadChanged tells whether a node's change can make a place better.
func spreadChanged(old, now client.Object) bool {
	a, b := old.(*api.Node), now.(*api.Node)
	if a.Generation != b.Generation || zoneOf(a) != zoneOf(b) || len(a.Status.Disks) != len(b.Status.Disks) {
		return true
	}
	for i, x := range a.Status.Disks {
		if y := b.Status.Disks[i]; x.Ready != y.Ready || x.UID != y.UID || percentUsed(x, 0) != percentUsed(y, 0) {
			return true
		}
	}
	return false
}

// balancedVolumes requeues the volumes that balance applies to.
func (p *volumeReconciler) balancedVolumes(ctx context.Context, _ client.Object) []reconcile.Request {
	var list api.VolumeList
	if err := p.client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		p.log.Error("volumes cannot be listed", "err", err)
		return nil
	}
	var all []reconcile.Request
	setting := p.settingText(ctx, settingBalance)
	for i := range list.Items {
		v := &list.Items[i]
		own := v.Spec.ReplicaAutoBalance
		if v.Spec.NumberOfReplicas < 2 || own == balanceDisabled ||
			setting == balanceDisabled && own != balanceLeast && own != balanceBest &&
				meta.FindStatusCondition(v.Status.Conditions, api.ConditionBalanced) == nil {
			continue
		}
		all = append(all, watch.Requests(v.Name)...)
	}
	return all
}
