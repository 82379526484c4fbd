package stack

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
)

// openReplicas is the registry of the replicas that one Disk has open. It passes changes of layers on to the replicas,
// and damage to the function of OnDamage.
type openReplicas struct {
	mu       sync.Mutex
	open     map[*Replica]bool
	onDamage atomic.Pointer[func(layer string)]
}

func (o *openReplicas) add(r *Replica) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.open == nil {
		o.open = map[*Replica]bool{}
	}
	o.open[r] = true
}

func (o *openReplicas) remove(r *Replica) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.open, r)
}

func (o *openReplicas) list() []*Replica {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := make([]*Replica, 0, len(o.open))
	for r := range o.open {
		list = append(list, r)
	}
	return list
}

// Finished makes open replicas use the map and the digests of a layer.
func (o *openReplicas) Finished(uid string) error {
	var errs []error
	for _, r := range o.list() {
		errs = append(errs, r.nameError(r.layerFinished(uid)))
	}
	return errors.Join(errs...)
}

// Damaged passes the known damage of a layer to open replicas.
func (o *openReplicas) Damaged(uid string, list []Damage) {
	for _, r := range o.list() {
		if err := r.Knows(uid, list); err != nil {
			slog.Warn("an open replica does not learn of damage", "replica", r.dir, "layer", uid, "error", err)
		}
	}
	o.Hopeless(uid)
}

// Hopeless reports a layer with damage.
func (o *openReplicas) Hopeless(uid string) {
	if fn := o.onDamage.Load(); fn != nil {
		(*fn)(uid)
	}
}

// OnDamage calls fn after a read has found damage in a layer, or no damage any more. Fn must not block.
func (d *Disk) OnDamage(fn func(layer string)) { d.open.onDamage.Store(&fn) }

// records answers the questions of the layer store about the records of a disk.
type records struct{ d *Disk }

func (r records) Named() (map[string]bool, error)       { return r.d.referencedLayers() }
func (r records) IsNamed(uid string) (bool, error)      { return r.d.isNamed(uid) }
func (r records) SyncRecords(ctx context.Context) error { return r.d.syncReferences(ctx) }

func (r records) MergeIn(replica string) (*Merge, error) {
	m, err := r.d.readStack(replica)
	return m.Merge, err
}
