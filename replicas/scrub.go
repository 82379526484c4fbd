package replicas

import (
	"context"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/stack"
)

// A scrub compares the layers of a replica with their digests: when somebody asks, and at intervals. One at a time on
// each disk, at the lowest priority. What it finds is in the Replica's status, written by its loop, as is what reads
// find; sessions that have the layer open are told at once, and reads of what is damaged fail.

// scrubber has one worker per disk, which the tidier's owner waits for.
type scrubber struct {
	queue atomic.Pointer[backlog.Queue] // of the Replica loop

	mu    sync.Mutex
	todo  map[*stack.Disk][]scrubTask // a key: the disk has a worker
	under map[api.UID]bool            // replicas in todo, or at it
	found map[api.UID]*scrubFound     // until the status has it
	known map[api.UID]bool            // replicas whose status has what the disk's records say
	seen  map[string]time.Time        // layers, by disk and uid: of a shared one, not every replica needs an own look
	marks map[string]string           // of the same, what Touched said when they were found whole
}

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

// maxTold is how many ranges a status has; maxLook how long a look at a layer counts for other replicas.
const (
	maxTold = 256
	maxLook = time.Hour
)

// number is a setting that is a number.
func (d *Data) number(ctx context.Context, name string) int64 {
	var s api.Setting
	text := api.Settings[name]
	if err := d.client.Get(ctx, client.ObjectKey{Name: name}, &s); err == nil {
		text = s.Value
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		n, _ = strconv.ParseInt(api.Settings[name], 10, 64)
	}
	return n
}

// scrub writes what a scrub found into the replica's status, and begins one that is due.
func (l *replicaLoop) scrub(ctx context.Context, r *api.Replica, disk *stack.Disk) {
	s := &l.scrubber
	s.mu.Lock()
	found := s.found[r.Spec.UID]
	under := s.under[r.Spec.UID]
	known := s.known[r.Spec.UID]
	s.mu.Unlock()
	if found != nil {
		at := metav1.NewTime(found.at.Truncate(time.Second))
		if r.Status.LastScrubbed.Equal(&at) && (found.ask == "" || r.Status.Scrubbed == found.ask) { // it is written
			s.mu.Lock()
			if s.found[r.Spec.UID] == found {
				delete(s.found, r.Spec.UID)
			}
			s.mu.Unlock()
		} else {
			if !found.told {
				found.told = true
				l.tellDamage(r, disk, found.damage)
			}
			r.Status.LastScrubbed, r.Status.Damage = &at, found.damage
			if found.ask != "" {
				r.Status.Scrubbed = found.ask
			}
		}
	} else if !known {
		l.recorded(r, disk)
	}
	r.Status.BeyondRepair = beyondRepair(r, disk)
	asked := r.Spec.Scrub != "" && r.Spec.Scrub != r.Status.Scrubbed
	if under || !asked && !l.due(ctx, r) {
		return
	}
	task := scrubTask{name: r.Name, replica: r.Spec.UID, rate: l.number(ctx, "volume-scrub-rate-limit") << 20}
	if asked { // by somebody who wants to know: all is compared
		task.ask = r.Spec.Scrub
	} else {
		task.fast = l.integrity(ctx, r.Spec.Volume) == integrityFast
	}
	l.scrubSoon(disk, task)
}

// tellDamage tells of what is new.
func (l *replicaLoop) tellDamage(r *api.Replica, disk *stack.Disk, damage []api.LayerDamage) {
	switch {
	case slices.Equal(damage, r.Status.Damage):
	case len(damage) > 0:
		g := damage[0]
		l.events.Eventf(r, nil, "Warning", "DataDamaged", "Scrub", "volume %s: %d ranges are damaged on disk %s, the first "+
			"%d bytes at %d in layer %s; reads of them fail", r.Spec.Volume, len(damage), disk.Path(), g.Length,
			g.Offset, g.Layer)
		l.Log.Error("data is damaged", "volume", r.Spec.Volume, "disk", disk.Path(), "layer", g.Layer, "offset", g.Offset,
			"length", g.Length, "ranges", len(damage))
	default:
		l.events.Eventf(r, nil, "Normal", "DataIntact", "Scrub", "volume %s: what was damaged is whole again", r.Spec.Volume)
	}
}

// recorded makes the status say what the disk's records say: reads write them, too.
func (l *replicaLoop) recorded(r *api.Replica, disk *stack.Disk) {
	s := &l.scrubber
	m, err := disk.Stack(string(r.Spec.UID))
	if err != nil {
		return
	}
	s.mu.Lock()
	if s.known == nil {
		s.known = map[api.UID]bool{}
	}
	s.known[r.Spec.UID] = true // before it looks: what a read finds meanwhile is looked at again
	s.mu.Unlock()
	var damage []api.LayerDamage
	for _, uid := range m.All() {
		damage = addDamage(damage, uid, disk.Damaged(uid))
	}
	if slices.Equal(damage, r.Status.Damage) {
		return
	}
	l.tellDamage(r, disk, damage)
	r.Status.Damage = damage
	s.mu.Lock()
	delete(s.known, r.Spec.UID) // until it is written
	s.mu.Unlock()
}

// beyondRepair reports whether nobody has what some layer of a replica held.
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

// damaged has the replicas looked at that have a layer of which a read found something out.
func (d *Data) damaged(disk *stack.Disk, layer string) {
	q := d.scrubber.queue.Load()
	var list api.ReplicaList
	if q == nil || d.client.List(context.Background(), &list, client.MatchingFields{watch.ByNode: d.Node},
		client.UnsafeDisableDeepCopy) != nil {
		return // each replica is looked at in the beginning
	}
	for i := range list.Items {
		r := &list.Items[i]
		if string(r.Spec.Disk) != disk.UID() {
			continue
		}
		if m, err := disk.Stack(string(r.Spec.UID)); err != nil || !slices.Contains(m.All(), layer) {
			continue
		}
		d.scrubber.mu.Lock()
		delete(d.scrubber.known, r.Spec.UID)
		d.scrubber.mu.Unlock()
		(*q).Add(watch.Request(r.Name))
	}
}

// due reports whether the last scrub of a replica is long ago.
func (d *Data) due(ctx context.Context, r *api.Replica) bool {
	last := r.CreationTimestamp
	if at := r.Status.LastScrubbed; at != nil {
		last = *at
	}
	every := time.Duration(d.number(ctx, "volume-scrub-interval")) * time.Hour
	return every > 0 && time.Since(last.Time) > every && d.integrity(ctx, r.Spec.Volume) != integrityOff
}

// settingIntegrity is for volumes that do not say themselves what is compared at intervals.
const settingIntegrity = "snapshot-data-integrity"

// Values of it: layers whose files were touched alone, and none. Anything else: all.
const (
	integrityFast = "fast-check"
	integrityOff  = "disabled"
)

// integrity is what is compared at intervals of a volume's layers.
func (d *Data) integrity(ctx context.Context, volume string) string {
	var v api.Volume
	if err := d.client.Get(ctx, client.ObjectKey{Name: volume}, &v); err == nil {
		if at := v.Spec.SnapshotDataIntegrity; at != "" && at != "ignored" {
			return at
		}
	}
	var s api.Setting
	if err := d.client.Get(ctx, client.ObjectKey{Name: settingIntegrity}, &s); err == nil {
		return s.Value
	}
	return api.Settings[settingIntegrity]
}

// scrubDue wakes the replicas of this node that are due.
func (d *Data) scrubDue(ctx context.Context) {
	q := d.scrubber.queue.Load()
	var list api.ReplicaList
	here := client.MatchingFields{watch.ByNode: d.Node}
	if q == nil || d.client.List(ctx, &list, here, client.UnsafeDisableDeepCopy) != nil {
		return
	}
	for i := range list.Items {
		if r := &list.Items[i]; r.Status.Mode == api.ReplicaCurrent && d.due(ctx, r) {
			(*q).Add(watch.Request(r.Name))
		}
	}
}

func (d *Data) scrubSoon(disk *stack.Disk, task scrubTask) {
	t, s := d.tidier, &d.scrubber
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.todo == nil {
		s.todo, s.under = map[*stack.Disk][]scrubTask{}, map[api.UID]bool{}
		s.found, s.seen = map[api.UID]*scrubFound{}, map[string]time.Time{}
		s.marks = map[string]string{}
	}
	s.under[task.replica] = true
	_, works := s.todo[disk]
	s.todo[disk] = append(s.todo[disk], task)
	if works {
		return
	}
	t.wg.Add(1)
	go func() {
		defer t.wg.Done()
		runtime.LockOSThread() // not given back: as the tidier's
		lowest()
		for {
			s.mu.Lock()
			list := s.todo[disk]
			if len(list) == 0 || t.ctx.Err() != nil {
				delete(s.todo, disk)
				s.mu.Unlock()
				return
			}
			task, s.todo[disk] = list[0], list[1:]
			s.mu.Unlock()
			found, err := d.scrubReplica(t.ctx, disk, task)
			s.mu.Lock()
			delete(s.under, task.replica)
			if err == nil {
				s.found[task.replica] = &found
			}
			s.mu.Unlock()
			if err != nil && t.ctx.Err() == nil {
				d.Log.Warn("a scrub did not end", "replica", task.name, "disk", disk.Path(), "err", err)
			}
			if q := s.queue.Load(); q != nil && (err == nil || task.ask != "") {
				(*q).AddAfter(watch.Request(task.name), retryIf(err))
			}
		}
	}()
}

func retryIf(err error) time.Duration {
	if err != nil {
		return tidyRetry
	}
	return 0
}

// untouched reports whether nobody changed the files of a layer since it was sealed or last found whole; mark is for
// the next time.
func (d *Data) untouched(disk *stack.Disk, uid, key string) (is bool, mark string) {
	mark, err := disk.Touched(uid)
	if err != nil || len(disk.Damaged(uid)) > 0 {
		return false, mark
	}
	d.scrubber.mu.Lock()
	defer d.scrubber.mu.Unlock()
	return mark == "" || mark == d.scrubber.marks[key], mark
}

// scrubReplica compares all layers of a replica that have digests; the others are new, and have their turn next time.
func (d *Data) scrubReplica(ctx context.Context, disk *stack.Disk, task scrubTask) (scrubFound, error) {
	m, err := disk.Stack(string(task.replica))
	if err != nil {
		return scrubFound{}, err
	}
	f := scrubFound{ask: task.ask}
	began, compared := time.Now(), 0
	for _, uid := range m.All() {
		key := disk.UID() + "/" + uid
		d.scrubber.mu.Lock()
		last := d.scrubber.seen[key]
		d.scrubber.mu.Unlock()
		var list []stack.Damage
		same, mark := d.untouched(disk, uid, key)
		if task.ask == "" && time.Since(last) < maxLook || task.fast && same {
			list = disk.Damaged(uid)
		} else {
			compared++
			list, err = disk.Scrub(ctx, uid, task.rate)
			switch {
			case api.Is(err, api.Unavailable) || api.Is(err, api.NotFound) || api.Is(err, api.Busy):
				continue // frozen, on another disk, or being merged: the merge compares too
			case err != nil:
				return f, err
			}
			d.scrubber.mu.Lock()
			d.scrubber.seen[key] = time.Now()
			if d.scrubber.marks[key] = mark; len(list) > 0 {
				delete(d.scrubber.marks, key)
			}
			d.scrubber.mu.Unlock()
			for _, s := range d.all() {
				if s.member() != nil && string(s.Disk) == disk.UID() {
					if err := s.member().Knows(uid, list); err != nil {
						d.Log.Warn("an attached volume cannot be told of damage", "volume", s.Volume, "err", err)
					}
				}
			}
		}
		f.damage = addDamage(f.damage, uid, list)
	}
	f.at = time.Now()
	d.Log.Info("layers compared with their digests", "volume", m.Volume, "layers", len(m.All()), "compared", compared,
		"damaged", len(f.damage), "took", time.Since(began).Round(time.Millisecond))
	return f, nil
}
