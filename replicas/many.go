package replicas

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/device"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// A volume with several replicas, or whose only one is on another node.

// many reports whether a volume is one.
func (d *Data) many(ctx context.Context, v *api.Volume) (bool, error) {
	if v.Spec.NumberOfReplicas > 1 || len(v.Status.Members) > 1 {
		return true, nil
	}
	var list api.ReplicaList
	if err := d.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return false, err
	}
	n := 0
	var moved api.UID // whose place the only member has taken on this node
	for i := range list.Items {
		if r := &list.Items[i]; slices.Contains(v.Status.Members, r.Name) && r.Spec.From != nil && r.Spec.From.Whole {
			moved = r.Spec.From.Replica
		}
	}
	for i := range list.Items {
		r := &list.Items[i]
		is := slices.Contains(v.Status.Members, r.Name)
		switch {
		case r.Spec.VolumeUID != v.Status.UID || r.Spec.UID == moved:
			continue
		case !is && (r.DeletionTimestamp != nil || r.Spec.From != nil && r.Spec.From.Whole):
			continue // the latter takes the place of one that counts
		}
		n++
		if is && (r.Spec.Node != d.Node || r.Spec.Transient) {
			return true, nil
		}
	}
	return n > 1, nil
}

// found is a member that was looked at before a volume is attached.
type found struct {
	spec memberSpec
	info peer.Info
	err  error
	held bool // who has it cannot be waited for: it has all that was acknowledged, and is not to be had
}

// lookTime bounds how long a member is looked for when a volume is attached.
const lookTime = 5 * time.Second

// A process that is being restarted refuses connections for a moment: it is asked again until then.
const (
	restartTime = 2 * time.Second
	lookAgain   = 100 * time.Millisecond
)

// look asks the members of a volume what they are. Nothing is opened that stays open.
func (l *attachmentLoop) look(ctx context.Context, v *api.Volume) ([]found, error) {
	if l.peers == nil {
		return nil, api.Errorf(api.Unsupported, "volume %s has replicas on other nodes, which this node cannot reach: it "+
			"has no identity", v.Name)
	}
	list := make([]found, len(v.Status.Members))
	var wg sync.WaitGroup
	for i, name := range v.Status.Members {
		var r api.Replica
		if err := l.reader.Get(ctx, client.ObjectKey{Name: name}, &r); client.IgnoreNotFound(err) != nil {
			return nil, err
		} else if err != nil {
			list[i] = found{spec: memberSpec{Name: name}, err: api.Errorf(api.NotFound, "replica %s does not exist", name)}
			continue
		}
		f := &list[i]
		f.spec = memberSpec{Name: name, UID: r.Spec.UID, Node: r.Spec.Node, Disk: r.Spec.Disk}
		if r.Spec.Node == l.Node {
			if f.held = l.watch.Buried(string(r.Spec.UID)); f.held {
				f.err = api.Errorf(api.Unavailable, "replica %s was given up, and its disk does not answer yet", name)
			} else {
				f.info, f.err = l.lookHere(ctx, &r)
			}
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(ctx, lookTime)
			defer cancel()
			loop, err := l.pick()
			if err != nil {
				f.err = err
				return
			}
			defer l.putBack(loop)
			m := l.peers.Member(peer.Options{Node: f.spec.Node, Replica: string(f.spec.UID), Volume: string(v.Status.UID),
				Loop: loop})
			for began := time.Now(); ; {
				if f.info, _, f.err = m.Probe(ctx); f.err == nil || !api.Is(f.err, api.Unavailable) {
					break
				}
				pause := time.NewTimer(lookAgain)
				select {
				case <-pause.C:
				case <-ctx.Done():
				}
				if ctx.Err() != nil || time.Since(began) > restartTime {
					pause.Stop()
					break
				}
			}
			if errors.Is(f.err, peer.ErrGivenUp) {
				f.held, f.err = true, api.Errorf(api.Unavailable, "replica %s of node %s: %w", name, f.spec.Node, f.err)
			}
			_ = m.Close() // it had no session
		}()
	}
	wg.Wait()
	return list, nil
}

func (l *attachmentLoop) lookHere(ctx context.Context, r *api.Replica) (peer.Info, error) {
	disk, err := l.disk(ctx, r.Spec.Disk)
	if err != nil {
		return peer.Info{}, err
	}
	l.openLenders(ctx, r.Spec.Disk, r.Spec.Layers)
	loop, err := l.pick()
	if err != nil {
		return peer.Info{}, err
	}
	defer l.putBack(loop)
	rep, err := l.openHere(ctx, disk, string(r.Spec.UID), loop)
	if err != nil {
		return peer.Info{}, err
	}
	b := peer.NewBackend(rep, loop)
	info := b.Info()
	return info, b.Close()
}

// choose says which members a new engine begins with. All recorded ones have every acknowledged write, so those that
// can be reached do. One whose machine restarted during the last session may lack what was not flushed: it is taken
// only where no other is left, like any disk after a power cut.
func choose(v *api.Volume, list []found) (take []found, err error) {
	var restarted []found
	var why []error
	var held error
	reverted := int64(0)
	for _, f := range list {
		reverted = max(reverted, f.info.Reverted)
	}
	for _, f := range list {
		switch {
		case f.err != nil:
			why = append(why, f.err)
			if f.held {
				held = f.err
			} else if api.Is(f.err, api.Busy) { // it is there, and about to be free
				return nil, f.err
			}
		case f.info.Epoch > v.Status.Epoch:
			return nil, api.Errorf(api.Denied, "replica %s has adopted epoch %d and the API says %d: the API went back in "+
				"time. Restore a newer state of it, or recover the volume from its disk", f.spec.Name, f.info.Epoch, v.Status.Epoch)
		case f.info.Reverted < reverted && f.info.Joined < reverted:
			why = append(why, api.Errorf(api.Unavailable, "replica %s was not reverted with the others", f.spec.Name))
		case f.info.Restarted:
			restarted = append(restarted, f)
		default:
			take = append(take, f)
		}
	}
	if len(take) == 0 && len(restarted) > 0 {
		if held != nil {
			return nil, api.Errorf(api.Busy, "replica %s may lack what another one has, which cannot be had now: %w",
				restarted[0].spec.Name, held)
		}
		take = restarted[:1]
	}
	if len(take) == 0 {
		return nil, api.Errorf(api.Unavailable, "no member of volume %s can be reached: %w", v.Name, errors.Join(why...))
	}
	return take, nil
}

// makeMany claims a volume for this node and makes its device.
func (l *attachmentLoop) makeMany(ctx context.Context, a *api.Attachment, v *api.Volume) (*session, error) {
	list, err := l.look(ctx, v)
	if err != nil {
		return nil, err
	}
	// The engine of a node that is cut off from the API alone may have its own member for as long as it lives.
	for i := range list {
		f := &list[i]
		if !api.Is(f.err, api.Busy) || f.spec.Node == l.Node {
			continue
		}
		if quiet, err := l.quiet(ctx, f.spec.Node); err != nil {
			return nil, err
		} else if quiet {
			f.held, f.err = true, api.Errorf(api.Unavailable, "node %s gives no sign of life: %v", f.spec.Node, f.err)
		}
	}
	take, err := choose(v, list)
	if err != nil {
		return nil, err
	}
	b := blob{Volume: v.Name, VolumeUID: v.Status.UID, ReadOnly: a.Spec.ReadOnly}
	names := make([]string, 0, len(take))
	size, blank := take[0].info.Size, true
	for _, f := range take {
		names = append(names, f.spec.Name)
		b.Members = append(b.Members, f.spec)
		size = min(size, f.info.Size)
		blank = blank && f.info.Empty
	}
	was := v.Status.Members
	v.Status.Epoch++
	v.Status.EngineNode, v.Status.Members = l.Node, names
	if err := l.client.Status().Update(ctx, v); err != nil {
		return nil, fmt.Errorf("claim volume %s: %w", v.Name, err)
	}
	for _, f := range list {
		if slices.Contains(was, f.spec.Name) && !slices.Contains(names, f.spec.Name) {
			l.events.Eventf(v, nil, "Warning", "ReplicaDropped", "Attach", "replica %s is not current any more: %v",
				f.spec.Name, orRestarted(f.err))
		}
	}
	b.Epoch, b.Now = v.Status.Epoch, v.Status.Epoch
	s, err := l.openMany(ctx, b, size, true)
	if err != nil {
		return nil, errors.Join(err, l.giveBack(ctx, v.Name, b.Epoch))
	}
	l.mendOften(s)
	s.blank = blank
	spec, err := s.spec()
	if err == nil {
		s.dev, err = l.Host.Attach(ctx, spec, s.loop.Loop, s.engine)
	}
	if err != nil {
		return nil, errors.Join(err, l.close(s), l.giveBack(ctx, s.Volume, s.at()))
	}
	if err := l.keepBlob(s); err != nil { // what changed since the device began to be made
		l.Log.Error("what is kept with the device is old", "volume", s.Volume, "err", err)
	}
	l.note(s, v)
	l.keep(s)
	l.Log.Info("volume attached", "volume", s.Volume, "device", s.dev.Path(), "epoch", s.Epoch, "members", names)
	return s, nil
}

func orRestarted(err error) error {
	if err == nil {
		return stack.ErrRestarted
	}
	return err
}

// openMember opens a replica for a session: here (then it is returned too), or by the node that has it.
func (d *Data) openMember(ctx context.Context, s *session, spec *memberSpec) (engine.Named, *stack.Replica, error) {
	uid := string(spec.UID)
	n := engine.Named{Name: uid, Local: spec.Node == d.Node}
	down := func(why error) {
		if e := s.serving.Load(); e != nil {
			e.Suspect(uid, why)
		}
	}
	if !n.Local {
		n.Member = d.peers.Member(peer.Options{Node: spec.Node, Replica: uid, Volume: string(s.VolumeUID), Loop: s.loop,
			Boot: spec.Boot, OnDown: down})
		return n, nil, nil
	}
	if d.watch.Buried(uid) {
		return n, nil, api.Errorf(api.Unavailable, "replica %s was given up, and its disk does not answer yet", uid)
	}
	var disk *stack.Disk
	var err error
	if spec.Path != "" {
		disk, err = d.disks.Open(ctx, spec.Path, spec.Disk, false)
	} else {
		disk, err = d.disk(ctx, spec.Disk)
	}
	if err != nil {
		return n, nil, err
	}
	spec.Path = disk.Path()
	r, err := d.openHere(ctx, disk, uid, s.loop)
	if err != nil {
		d.doubt(ctx, spec.UID, err)
		return n, nil, err
	}
	n.Member = engine.NewNear(d.backendOf(r, s.loop), engine.NearOptions{Watch: d.watch, Loop: s.loop, Replica: uid,
		OnDown: down})
	return n, r, nil
}

// backendOf is a replica of this node that an engine of this node has for a member.
func (d *Data) backendOf(r *stack.Replica, loop *ioLoop) *peer.Backend {
	b := peer.NewBackend(r, loop)
	b.Node = d.Node
	return b
}

// openMany opens the members of b and the engine. fresh: by an attach, else to resume.
func (d *Data) openMany(ctx context.Context, b blob, size int64, fresh bool) (_ *session, err error) {
	loop, err := d.pick()
	if err != nil {
		return nil, err
	}
	b.Replica, b.Disk, b.Path = "", "", "" // as found below
	s := d.newSession(b, loop, nil)
	s.mates.many.Store(true)
	s.mates.tried.Store(b.Now)
	var members []engine.Named
	defer func() {
		if err != nil {
			for _, m := range members {
				err = errors.Join(err, m.Member.Close())
			}
			d.putBack(loop)
		}
	}()
	for i := range s.Members {
		spec := &s.Members[i]
		if spec.Absent && !fresh {
			why := api.Errorf(api.Unavailable, "the volume's engine began without it")
			members = append(members, engine.Named{Name: string(spec.UID), Member: &absent{why}})
			continue
		}
		m, r, err := d.openMember(ctx, s, spec)
		if !fresh && spec.Node == d.Node && len(s.Members) > 1 && isAbsent(err) {
			s.log.Error("the volume goes on without a replica of this node", "replica", spec.Name, "err", err)
			m, err = engine.Named{Name: string(spec.UID), Member: &absent{err}}, nil
		}
		if err != nil && (fresh || spec.Node != d.Node) {
			return nil, fmt.Errorf("replica %s: %w", spec.Name, err)
		} else if err != nil {
			return nil, err // of this node: it comes back, or the volume is detached by force
		}
		if r != nil && s.Replica == "" {
			s.Replica, s.Disk, s.Path = spec.UID, spec.Disk, spec.Path
			s.has(r)
			members = slices.Insert(members, 0, m) // reads prefer it, and the others are made like it
			continue
		}
		if r != nil {
			s.others.Store(spec.UID, r)
		}
		members = append(members, m)
	}
	c := d.config(s, size, b.Now)
	c.Members, c.Track, c.Equalise, c.Lenient = members, true, fresh, true
	if fresh || d.api.Load() { // one that resumes does not wait for the API
		c.Reported = d.reported(s)
	}
	s.engine, err = engine.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	s.serving.Store(s.engine)
	s.noteAbsent(s.engine.Absent())
	for _, m := range members {
		if p, ok := m.Member.(*peer.Member); ok {
			s.mates.mu.Lock()
			for i := range s.Members {
				if string(s.Members[i].UID) == m.Name {
					s.Members[i].Boot = p.Boot()
				}
			}
			s.mates.mu.Unlock()
		}
	}
	return s, nil
}

// noteAbsent notes the members that the engine did not reach when it opened, for what is kept with the device.
func (s *session) noteAbsent(names []string) {
	s.mates.mu.Lock()
	defer s.mates.mu.Unlock()
	for i := range s.Members {
		s.Members[i].Absent = slices.Contains(names, string(s.Members[i].UID))
	}
}

// mendOften begins to bring replicas back.
func (d *Data) mendOften(s *session) {
	var ctx context.Context
	ctx, s.mates.cancel = context.WithCancel(context.Background())
	s.mates.done, s.mates.alike = make(chan struct{}), make(chan struct{})
	go d.mend(ctx, s, s.mates.joiners)
	go d.compareOften(ctx, s)
}

// resumeMany takes up the device of such a volume on the epoch that it was on. A swap that was under way must be
// settled first, which needs the API.
func (d *Data) resumeMany(ctx context.Context, spec device.Spec, b blob) (*session, error) {
	if d.peers == nil {
		return nil, api.Errorf(api.Unsupported, "this node has no identity: replicas on others cannot be reached")
	}
	if b.Next != 0 {
		if err := d.settleBlob(ctx, &b); err != nil {
			return nil, err
		}
	}
	s, err := d.openMany(ctx, b, spec.Size, false)
	if api.Is(err, api.Denied) { // a member's word; the API knows
		if oerr := d.ownerOf(b)(ctx, b.Now); !api.Is(oerr, api.Denied) {
			return nil, api.Errorf(api.Unavailable, "volume %s: %w", b.Volume, errors.Join(err, oerr))
		}
	}
	if api.Is(err, api.Denied) || errors.Is(err, stack.ErrRestarted) {
		// Another engine has the volume, or what was written is lost: to go on would be a lie.
		return nil, errors.Join(err, d.Host.Discard(spec.Key))
	}
	if err != nil {
		return nil, err
	}
	d.mendOften(s)
	want, err := s.spec()
	if err == nil {
		s.dev, err = d.Host.Resume(ctx, want, s.loop.Loop, s.engine)
	}
	if err != nil {
		return nil, errors.Join(err, d.close(s))
	}
	if err := d.keepBlob(s); err != nil {
		d.Log.Error("what is kept with the device is old", "volume", s.Volume, "err", err)
	}
	d.keep(s)
	d.Log.Info("device resumed", "volume", s.Volume, "device", s.dev.Path(), "epoch", s.Now)
	return s, nil
}

// settleBlob finds out what came of a swap that a dead process had begun.
func (d *Data) settleBlob(ctx context.Context, b *blob) error {
	if !d.api.Load() {
		return api.Errorf(api.Unavailable, "a change of the members was under way: the API has to be asked what came of it")
	}
	var v api.Volume
	if err := d.reader.Get(ctx, client.ObjectKey{Name: b.Volume}, &v); err != nil {
		return api.Errorf(api.Unavailable, "a change of the members was under way: %w", err)
	}
	switch {
	case v.Status.UID != b.VolumeUID || v.Status.EngineNode != d.Node:
		return api.Errorf(api.Unavailable, "the engine of volume %s is on node %q by now: detach it here by force", b.Volume,
			v.Status.EngineNode)
	case v.Status.Epoch == b.Now:
		// It was not made. What the dead process sent may be on its way yet: the epoch is taken, so that it comes too late.
		v.Status.Epoch = b.Next
		if err := d.client.Status().Update(ctx, &v); err != nil {
			return api.Errorf(api.Unavailable, "a change of the members was under way: %w", err)
		}
		b.Now = b.Next
	case v.Status.Epoch == b.Next:
		all := b.Members
		if b.Joining != nil {
			all = append(slices.Clone(all), *b.Joining)
		}
		b.Members = nil
		for _, m := range all {
			if slices.Contains(v.Status.Members, m.Name) {
				b.Members = append(b.Members, m)
			}
		}
		b.Now = b.Next
	default:
		return api.Errorf(api.Unavailable, "volume %s is at epoch %d, and this engine knows %d: detach it here by force",
			b.Volume, v.Status.Epoch, b.Now)
	}
	b.Next, b.Joining = 0, nil
	return nil
}

// growMany makes the members and the device larger once every replica may be.
func (l *attachmentLoop) growMany(ctx context.Context, s *session) error {
	var list api.ReplicaList
	if err := l.client.List(ctx, &list, client.MatchingFields{watch.ByVolume: s.Volume}); err != nil {
		return err
	}
	_, members, err := s.engine.Epoch(ctx)
	if err != nil {
		return err
	}
	size, n := int64(0), 0
	for i := range list.Items {
		if r := &list.Items[i]; slices.Contains(members, string(r.Spec.UID)) {
			n++
			if size == 0 || r.Spec.Size < size {
				size = r.Spec.Size
			}
		}
	}
	if n < len(members) || size <= s.dev.Spec().Size {
		return nil
	}
	return s.expand(ctx, size)
}

// standing says whether a replica is one of the volume's members.
func (l *replicaLoop) standing(ctx context.Context, r *api.Replica) error {
	var v api.Volume
	if err := l.client.Get(ctx, client.ObjectKey{Name: r.Spec.Volume}, &v); err != nil {
		return client.IgnoreNotFound(err)
	}
	if v.Status.UID != r.Spec.VolumeUID || len(v.Status.Members) == 0 {
		return nil
	}
	if slices.Contains(v.Status.Members, r.Name) {
		r.Status.Mode = api.ReplicaCurrent
		return nil
	}
	r.Status.Mode, r.Status.Message = api.ReplicaStale, "it lacks what was written since it was a member"
	return nil
}

// encoded is the blob of a session.
func (s *session) encoded() ([]byte, error) { return json.Marshal(s.snapshotBlob()) }
