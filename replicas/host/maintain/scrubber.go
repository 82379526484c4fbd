package maintain

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// A scrub compares the layers of a replica with their digests: when a user asks, and at intervals. Each disk scrubs one
// replica at a time, at the lowest priority. The replica's reconciler writes the damage that scrubs and reads find into
// the status; the scrubber notifies open replicas of the layer at once, and reads of damaged ranges fail.

// Scrubber has one worker per disk.
type Scrubber struct {
	node    Node
	name    string // of the node
	client  client.Client
	events  events.EventRecorder
	log     *slog.Logger
	workers *Workers
	queue   atomic.Pointer[backlog.Queue] // of the replica reconciler

	mu    sync.Mutex
	todo  map[*stack.Disk][]scrubTask // a key: the disk has a worker
	under map[api.UID]bool            // replicas in todo, or being scrubbed
	found map[api.UID]*scrubFound     // until the status has it
	known map[api.UID]bool            // replicas whose status has what the disk's records say
	seen  map[string]time.Time        // layers, by disk and uid: a layer that replicas share is compared once
	marks map[string]string           // by disk and layer: Touched, when the last scrub found no damage
}

// NewScrubber scrubs the replicas of a node. Call Use and Queue before Reconcile.
func NewScrubber(node Node, name string, workers *Workers, log *slog.Logger) *Scrubber {
	return &Scrubber{node: node, name: name, workers: workers, log: log,
		todo: map[*stack.Disk][]scrubTask{}, under: map[api.UID]bool{}, found: map[api.UID]*scrubFound{},
		known: map[api.UID]bool{}, seen: map[string]time.Time{}, marks: map[string]string{}}
}

// Use gives the scrubber its client, before anything else is called.
func (s *Scrubber) Use(c client.Client, e events.EventRecorder) { s.client, s.events = c, e }

// Queue gives the scrubber the queue of the running replica reconciler.
func (s *Scrubber) Queue(q *backlog.Queue) { s.queue.Store(q) }

type scrubTask struct {
	name    string // of the Replica
	replica api.UID
	ask     string
	rate    int64
	fast    bool // only layers whose files were touched
}

type scrubFound struct {
	ask    string
	at     time.Time
	damage []api.LayerDamage
	told   bool // by an event
}

// maxTold is how many ranges a status has; maxLook how long a comparison of a layer counts for other replicas.
const (
	maxTold = 256
	maxLook = time.Hour
)

// Busy reports whether a replica is being scrubbed, or its status lacks the findings of a scrub.
func (s *Scrubber) Busy(replica api.UID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.found[replica] != nil || s.under[replica]
}

// Forget forgets when layers were compared last, for other replicas that have them.
func (s *Scrubber) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.seen)
}

// Reconcile writes the findings of a scrub into the replica's status, and begins a scrub that is due.
func (s *Scrubber) Reconcile(ctx context.Context, r *api.Replica, disk *stack.Disk) {
	s.mu.Lock()
	found := s.found[r.Spec.UID]
	under := s.under[r.Spec.UID]
	known := s.known[r.Spec.UID]
	s.mu.Unlock()
	if found != nil {
		at := metav1.NewTime(found.at.Truncate(time.Second))
		if r.Status.LastScrubbed.Equal(&at) && (found.ask == "" || r.Status.Scrubbed == found.ask) {
			s.mu.Lock()
			if s.found[r.Spec.UID] == found {
				delete(s.found, r.Spec.UID)
			}
			s.mu.Unlock()
			s.copyDamage(r, disk) // a repair may have removed damage between the scrub and its report
		} else {
			if !found.told {
				found.told = true
				s.reportDamage(r, disk, found.damage)
			}
			r.Status.LastScrubbed, r.Status.Damage = &at, found.damage
			if found.ask != "" {
				r.Status.Scrubbed = found.ask
			}
		}
	} else if !known {
		s.copyDamage(r, disk)
	}
	r.Status.BeyondRepair = beyondRepair(r, disk)
	asked := r.Spec.Scrub != "" && r.Spec.Scrub != r.Status.Scrubbed
	if under || !asked && !s.isDue(ctx, r) {
		return
	}
	task := scrubTask{name: r.Name, replica: r.Spec.UID, rate: s.node.Setting(ctx, "volume-scrub-rate-limit") << 20}
	if asked { // a user wants to know: compare all layers
		task.ask = r.Spec.Scrub
	} else {
		task.fast = s.integrityOf(ctx, r.Spec.Volume) == integrityFast
	}
	s.queueScrub(disk, task)
}

// reportDamage emits an event about damage that is new, or repaired.
func (s *Scrubber) reportDamage(r *api.Replica, disk *stack.Disk, damage []api.LayerDamage) {
	switch {
	case slices.Equal(damage, r.Status.Damage):
	case len(damage) > 0:
		g := damage[0]
		s.events.Eventf(r, nil, "Warning", "DataDamaged", "Scrub", "volume %s: %d ranges are damaged on disk %s, the first "+
			"%d bytes at %d in layer %s; reads of them fail", r.Spec.Volume, len(damage), disk.Path(), g.Length,
			g.Offset, g.Layer)
		s.log.Error("data is damaged", "volume", r.Spec.Volume, "disk", disk.Path(), "layer", g.Layer, "offset", g.Offset,
			"length", g.Length, "ranges", len(damage))
	default:
		s.events.Eventf(r, nil, "Normal", "DataIntact", "Scrub", "volume %s: the damaged data is whole "+
			"again", r.Spec.Volume)
	}
}

// copyDamage copies the disk's records of damage, which reads write as well, into the status.
func (s *Scrubber) copyDamage(r *api.Replica, disk *stack.Disk) {
	m, err := disk.Stack(string(r.Spec.UID))
	if err != nil {
		return
	}
	s.mu.Lock()
	s.known[r.Spec.UID] = true // before the look: a read that finds damage meanwhile wakes the replica again
	s.mu.Unlock()
	var damage []api.LayerDamage
	for _, uid := range m.AllLayers() {
		damage = addDamage(damage, uid, disk.Damaged(uid))
	}
	if slices.Equal(damage, r.Status.Damage) {
		return
	}
	s.reportDamage(r, disk, damage)
	r.Status.Damage = damage
	s.mu.Lock()
	delete(s.known, r.Spec.UID) // until the status has the damage
	s.mu.Unlock()
}

// beyondRepair reports whether no other copy exists of a damaged layer of a replica.
func beyondRepair(r *api.Replica, disk *stack.Disk) bool {
	var last api.UID
	for _, g := range r.Status.Damage { // in the order of the layers
		if g.Layer != last && disk.BeyondRepair(string(r.Spec.UID), string(g.Layer)) {
			return true
		}
		last = g.Layer
	}
	return false
}

func addDamage(to []api.LayerDamage, uid string, list []stack.Damage) []api.LayerDamage {
	for _, g := range list {
		if len(to) < maxTold {
			to = append(to, api.LayerDamage{Layer: api.UID(uid), Offset: g.Off, Length: g.Len})
		}
	}
	return to
}

// Damaged wakes the replicas of a layer in which a read found damage, or in which a repair removed damage.
func (s *Scrubber) Damaged(disk *stack.Disk, layer string) {
	q := s.queue.Load()
	var list api.ReplicaList
	if q == nil || s.client.List(context.Background(), &list, client.MatchingFields{watch.ByNode: s.name},
		client.UnsafeDisableDeepCopy) != nil {
		return // the first reconciliation of each replica reads the records
	}
	for i := range list.Items {
		r := &list.Items[i]
		if string(r.Spec.Disk) != disk.UID() {
			continue
		}
		if m, err := disk.Stack(string(r.Spec.UID)); err != nil || !slices.Contains(m.AllLayers(), layer) {
			continue
		}
		s.mu.Lock()
		delete(s.known, r.Spec.UID)
		s.mu.Unlock()
		(*q).Add(watch.Request(r.Name))
	}
}

// isDue reports whether the last scrub of a replica is long ago.
func (s *Scrubber) isDue(ctx context.Context, r *api.Replica) bool {
	last := r.CreationTimestamp
	if at := r.Status.LastScrubbed; at != nil {
		last = *at
	}
	every := time.Duration(s.node.Setting(ctx, "volume-scrub-interval")) * time.Hour
	return every > 0 && time.Since(last.Time) > every && s.integrityOf(ctx, r.Spec.Volume) != integrityOff
}

// SettingIntegrity says which layers are compared at intervals, for volumes without a value of their own.
const SettingIntegrity = "snapshot-data-integrity"

// Values of SettingIntegrity: layers whose files were touched, and none. Any other value: all layers.
const (
	integrityFast = "fast-check"
	integrityOff  = "disabled"
)

// integrityOf says which layers of a volume are compared at intervals.
func (s *Scrubber) integrityOf(ctx context.Context, volume string) string {
	var v api.Volume
	if err := s.client.Get(ctx, client.ObjectKey{Name: volume}, &v); err == nil {
		if at := v.Spec.SnapshotDataIntegrity; at != "" && at != "ignored" {
			return at
		}
	}
	var set api.Setting
	if err := s.client.Get(ctx, client.ObjectKey{Name: SettingIntegrity}, &set); err == nil {
		return set.Value
	}
	return api.Settings[SettingIntegrity]
}

// WakeDue wakes the replicas of this node that are due.
func (s *Scrubber) WakeDue(ctx context.Context) {
	q := s.queue.Load()
	var list api.ReplicaList
	here := client.MatchingFields{watch.ByNode: s.name}
	if q == nil || s.client.List(ctx, &list, here, client.UnsafeDisableDeepCopy) != nil {
		return
	}
	for i := range list.Items {
		if r := &list.Items[i]; r.Status.Mode == api.ReplicaCurrent && s.isDue(ctx, r) {
			(*q).Add(watch.Request(r.Name))
		}
	}
}

// queueScrub queues a replica for the worker of the disk.
func (s *Scrubber) queueScrub(disk *stack.Disk, task scrubTask) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, works := s.todo[disk]; !works && !s.workers.Go(func(ctx context.Context) { s.scrubQueued(ctx, disk) }) {
		return
	}
	s.under[task.replica] = true
	s.todo[disk] = append(s.todo[disk], task)
}

// scrubQueued scrubs the queued replicas of a disk.
func (s *Scrubber) scrubQueued(ctx context.Context, disk *stack.Disk) {
	lowestPriority()
	for {
		s.mu.Lock()
		list := s.todo[disk]
		if len(list) == 0 || ctx.Err() != nil {
			delete(s.todo, disk)
			s.mu.Unlock()
			return
		}
		task := list[0]
		s.todo[disk] = list[1:]
		s.mu.Unlock()
		found, err := s.scrubReplica(ctx, disk, task)
		s.mu.Lock()
		delete(s.under, task.replica)
		if err == nil {
			s.found[task.replica] = &found
		}
		s.mu.Unlock()
		if err != nil && ctx.Err() == nil {
			s.log.Warn("a scrub did not end", "replica", task.name, "disk", disk.Path(), "err", err)
		}
		if q := s.queue.Load(); q != nil && (err == nil || task.ask != "") {
			(*q).AddAfter(watch.Request(task.name), retryIf(err))
		}
	}
}

func retryIf(err error) time.Duration {
	if err != nil {
		return mergeRetry
	}
	return 0
}

// isUntouched reports whether the files of a layer are unchanged since the seal or the last scrub without damage; mark
// is for the next call.
func (s *Scrubber) isUntouched(disk *stack.Disk, uid, key string) (is bool, mark string) {
	mark, err := disk.Touched(uid)
	if err != nil || len(disk.Damaged(uid)) > 0 {
		return false, mark
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return mark == "" || mark == s.marks[key], mark
}

// scrubReplica compares all layers of a replica that have digests. Layers without digests are new: the next scrub
// compares them.
func (s *Scrubber) scrubReplica(ctx context.Context, disk *stack.Disk, task scrubTask) (scrubFound, error) {
	m, err := disk.Stack(string(task.replica))
	if err != nil {
		return scrubFound{}, err
	}
	f := scrubFound{ask: task.ask}
	began, compared := time.Now(), 0
	for _, uid := range m.AllLayers() {
		key := disk.UID() + "/" + uid
		s.mu.Lock()
		last := s.seen[key]
		s.mu.Unlock()
		var list []stack.Damage
		same, mark := s.isUntouched(disk, uid, key)
		if task.ask == "" && time.Since(last) < maxLook || task.fast && same {
			list = disk.Damaged(uid)
		} else {
			compared++
			list, err = disk.Scrub(ctx, uid, task.rate)
			switch {
			case api.Is(err, api.Unavailable) || api.Is(err, api.NotFound) || api.Is(err, api.Busy):
				continue // frozen, on another disk, or being merged, which compares the digests, too
			case err != nil:
				return f, err
			}
			s.mu.Lock()
			s.seen[key] = time.Now()
			if s.marks[key] = mark; len(list) > 0 {
				delete(s.marks, key)
			}
			s.mu.Unlock()
			for _, open := range s.node.Opened(disk) {
				if err := open.Knows(uid, list); err != nil {
					s.log.Warn("an attached volume cannot be notified of damage", "replica", open.Meta().UID, "err", err)
				}
			}
		}
		f.damage = addDamage(f.damage, uid, list)
	}
	f.at = time.Now()
	s.log.Info("layers compared with their digests", "volume", m.Volume, "layers", len(m.AllLayers()),
		"compared", compared, "damaged", len(f.damage), "took", time.Since(began).Round(time.Millisecond))
	return f, nil
}
