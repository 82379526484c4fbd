package attach

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/watch"
	"drover.io/drover/replicas/engine"
	"drover.io/drover/replicas/host/iothreads"
	"drover.io/drover/replicas/peer"
	"drover.io/drover/replicas/stack"
)

// The members of a volume: which members a new engine begins with, and how the engine reaches each.

// hasOthers reports whether a volume has, or is to have, other replicas beside its only member on this node. An engine
// without others notes no intents.
func (as *Attachments) hasOthers(ctx context.Context, v *api.Volume) (bool, error) {
	if v.Spec.NumberOfReplicas > 1 || len(v.Status.Members) > 1 {
		return true, nil
	}
	var list api.ReplicaList
	if err := as.Client.List(ctx, &list, client.MatchingFields{watch.ByVolume: v.Name}); err != nil {
		return false, err
	}
	n := 0
	var moved api.UID // the replica whose place the only member has taken on this node
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
			continue // a whole copy replaces a replica that counts
		}
		n++
		if is && (r.Spec.Node != as.Name || r.Spec.Transient) {
			return true, nil
		}
	}
	return n > 1, nil
}

// memberProbe is what a member answered before an engine opens it.
type memberProbe struct {
	spec memberSpec
	info peer.Info
	err  error
	held bool // the member has every acknowledged write, and its owner cannot be awaited
}

const (
	probeTime = 5 * time.Second // for a member's answer when a volume is attached
	// A process that is being restarted refuses connections for a moment: a probe asks again every probeAgain until
	// restartTime.
	restartTime = 2 * time.Second
	probeAgain  = 100 * time.Millisecond
)

// probeMembers probes the members of a volume, and leaves none open.
func (as *Attachments) probeMembers(ctx context.Context, v *api.Volume) ([]memberProbe, error) {
	list := make([]memberProbe, len(v.Status.Members))
	var wg sync.WaitGroup
	for i, name := range v.Status.Members {
		var r api.Replica
		if err := as.Reader.Get(ctx, client.ObjectKey{Name: name}, &r); client.IgnoreNotFound(err) != nil {
			return nil, err
		} else if err != nil {
			list[i] = memberProbe{spec: memberSpec{Name: name}, err: api.Errorf(api.NotFound, "replica %s does not exist", name)}
			continue
		}
		f := &list[i]
		f.spec = memberSpec{Name: name, UID: r.Spec.UID, Node: r.Spec.Node, Disk: r.Spec.Disk}
		if r.Spec.Node == as.Name {
			if f.held = as.watch.Abandoned(string(r.Spec.UID)); f.held {
				f.err = api.Errorf(api.Unavailable, "replica %s was abandoned, and its disk does not answer yet", name)
			} else {
				f.info, f.err = as.probeHere(ctx, &r)
			}
			continue
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			ctx, cancel := context.WithTimeout(ctx, probeTime)
			defer cancel()
			loop, err := as.Threads.Pick()
			if err != nil {
				f.err = err
				return
			}
			defer as.Threads.PutBack(loop)
			m, err := as.remote.Member(peer.Options{Node: f.spec.Node, Replica: string(f.spec.UID),
				Volume: string(v.Status.UID), Loop: loop})
			if err != nil {
				f.err = err
				return
			}
			for began := time.Now(); ; {
				if f.info, _, f.err = m.Probe(ctx); f.err == nil || !api.Is(f.err, api.Unavailable) {
					break
				}
				pause := time.NewTimer(probeAgain)
				select {
				case <-pause.C:
				case <-ctx.Done():
				}
				if ctx.Err() != nil || time.Since(began) > restartTime {
					pause.Stop()
					break
				}
			}
			if errors.Is(f.err, peer.ErrAbandoned) {
				f.held, f.err = true, api.Errorf(api.Unavailable, "replica %s of node %s: %w", name, f.spec.Node, f.err)
			}
			_ = m.Close() // the probe had no session
		}()
	}
	wg.Wait()
	return list, nil
}

func (as *Attachments) probeHere(ctx context.Context, r *api.Replica) (peer.Info, error) {
	disk, err := as.replicas.Disk(ctx, r.Spec.Disk)
	if err != nil {
		return peer.Info{}, err
	}
	loop, err := as.Threads.Pick()
	if err != nil {
		return peer.Info{}, err
	}
	defer as.Threads.PutBack(loop)
	rep, err := as.openHere(ctx, disk, string(r.Spec.UID), loop)
	if err != nil {
		return peer.Info{}, err
	}
	b := peer.NewBackend(rep, loop)
	if m := rep.Meta(); m.VolumeUID != string(r.Spec.VolumeUID) {
		return peer.Info{}, errors.Join(b.Close(), api.Errorf(api.Corrupt, "replica %s: the disk has the replica for "+
			"volume %s (%s)",
			r.Name, m.Volume, m.VolumeUID))
	}
	info := b.Info()
	return info, b.Close()
}

// selectMembers says which members a new engine begins with. Every recorded member has every acknowledged
// write, so the engine takes all that answer. A member whose machine restarted during the last session may lack writes
// that were not flushed: the engine takes that member only if no other is left, like any disk after a power cut.
func selectMembers(v *api.Volume, list []memberProbe) (take []memberProbe, err error) {
	var restarted []memberProbe
	var why []error
	var held error
	reverted, largest := int64(0), int64(0)
	for _, f := range list {
		if reverted = max(reverted, f.info.Reverted); f.err == nil {
			largest = max(largest, f.info.Size)
		}
	}
	reverted = min(reverted, v.Status.RevertedEpoch) // one member's word alone leaves no other member out
	for _, f := range list {
		switch {
		case f.err != nil:
			why = append(why, f.err)
			if f.held {
				held = f.err
			} else if api.Is(f.err, api.Busy) { // the member exists, and is about to be free
				return nil, f.err
			}
		case f.info.Epoch > v.Status.Epoch:
			return nil, api.Errorf(api.Denied, "replica %s has adopted epoch %d and the API says %d: the API went back in "+
				"time. Restore a newer state of it, or recover the volume from its disk", f.spec.Name, f.info.Epoch, v.Status.Epoch)
		case f.info.Reverted < reverted && f.info.Joined < reverted:
			why = append(why, api.Errorf(api.Unavailable, "replica %s was not reverted with the others", f.spec.Name))
		case f.info.Size < min(largest, v.Status.Size): // every member had this size
			why = append(why, api.Errorf(api.Corrupt, "replica %s has %d bytes, and the volume has %d", f.spec.Name, f.info.Size,
				v.Status.Size))
		case f.info.Restarted:
			restarted = append(restarted, f)
		default:
			take = append(take, f)
		}
	}
	if len(take) == 0 && len(restarted) > 0 {
		if held != nil {
			return nil, api.Errorf(api.Busy, "replica %s may lack writes of another replica, which does not answer now: %w",
				restarted[0].spec.Name, held)
		}
		take = restarted[:1]
	}
	if len(take) == 0 && len(list) == 1 && list[0].err != nil {
		return nil, list[0].err
	}
	if len(take) == 0 {
		return nil, api.Errorf(api.Unavailable, "no member of volume %s can be reached: %w", v.Name, errors.Join(why...))
	}
	return take, nil
}

// claimVolume moves a volume to a new epoch with the engine on this node and the selected members, by compare-and-swap.
// claimVolume returns the record of the session to be and the size of the smallest member.
func (as *Attachments) claimVolume(ctx context.Context, v *api.Volume, take []memberProbe) (b blob, size int64,
	err error) {
	others, err := as.hasOthers(ctx, v)
	if err != nil {
		return b, 0, err
	}
	b = blob{Volume: v.Name, VolumeUID: v.Status.UID, Alone: !others}
	size = take[0].info.Size
	v.Status.Members = nil
	for _, f := range take {
		b.Members = append(b.Members, f.spec)
		v.Status.Members = append(v.Status.Members, f.spec.Name)
		size = min(size, f.info.Size)
	}
	v.Status.Epoch++
	v.Status.EngineNode = as.Name
	if err := as.Client.Status().Update(ctx, v); err != nil {
		return b, 0, fmt.Errorf("claim volume %s: %w", v.Name, err)
	}
	b.Epoch, b.Now = v.Status.Epoch, v.Status.Epoch
	return b, size, nil
}

func orRestarted(err error) error {
	if err == nil {
		return stack.ErrRestarted
	}
	return err
}

// openMember opens a replica of this node, which openMember returns too, or a replica of another node, for a session.
func (as *Attachments) openMember(ctx context.Context, s *Session, spec *memberSpec) (engine.Named, *stack.Replica,
	error) {
	uid := string(spec.UID)
	n := engine.Named{Name: uid, Local: spec.Node == as.Name}
	watched := engine.WatchOptions{Loop: s.loop, Replica: uid, OnStall: func(why error) {
		if e := s.serving.Load(); e != nil {
			e.Suspect(uid, why)
		}
	}}
	if !n.Local {
		m, err := as.remote.Member(peer.Options{Node: spec.Node, Replica: uid, Volume: string(s.VolumeUID), Loop: s.loop,
			Boot: spec.Boot})
		if err == nil {
			n.Member = as.watch.Member(m, watched)
		}
		return n, nil, err
	}
	if as.watch.Abandoned(uid) {
		return n, nil, api.Errorf(api.Unavailable, "replica %s was abandoned, and its disk does not answer yet", uid)
	}
	var disk *stack.Disk
	var err error
	if spec.Path != "" {
		disk, err = as.Disks.Open(ctx, spec.Path, spec.Disk, false)
	} else {
		disk, err = as.replicas.Disk(ctx, spec.Disk)
	}
	if err != nil {
		return n, nil, err
	}
	spec.Path = disk.Path()
	r, err := as.openHere(ctx, disk, uid, s.loop)
	if err != nil {
		as.replicas.Damaged(ctx, spec.UID, err)
		return n, nil, err
	}
	r.OnLost(func(bool) { s.wake() })
	n.Member = as.watch.Member(as.backendOf(r, s.loop), watched)
	return n, r, nil
}

// backendOf is a replica of this node that an engine of this node has for a member.
func (as *Attachments) backendOf(r *stack.Replica, loop *iothreads.Thread) *peer.Backend {
	b := peer.NewBackend(r, loop)
	b.Node = as.Name
	return b
}

// openSession opens the members of b and the engine: by a claim, which is fresh, or to resume.
func (as *Attachments) openSession(ctx context.Context, b blob, size int64, fresh bool) (_ *Session, err error) {
	loop, err := as.Threads.Pick()
	if err != nil {
		return nil, err
	}
	b.Replica, b.Disk, b.Path = "", "", "" // those of the member here, when the blob is written
	s := as.newSession(b, loop)
	s.membership.tried.Store(b.Now)
	var members []engine.Named
	defer func() {
		if err != nil {
			for _, m := range members {
				err = errors.Join(err, m.Member.Close())
			}
			as.Threads.PutBack(loop)
		}
	}()
	for i := range s.Members {
		spec := &s.Members[i]
		if spec.Missing && !fresh {
			why := api.Errorf(api.Unavailable, "the volume's engine began without the replica")
			members = append(members, engine.Named{Name: string(spec.UID), Member: &missingMember{why}})
			continue
		}
		m, r, err := as.openMember(ctx, s, spec)
		if !fresh && spec.Node == as.Name && len(s.Members) > 1 && isMissing(err) {
			s.log.Error("the volume continues without a replica of this node", "replica", spec.Name, "err", err)
			m, err = engine.Named{Name: string(spec.UID), Member: &missingMember{err}}, nil
		}
		if err != nil && (fresh || spec.Node != as.Name) {
			return nil, fmt.Errorf("replica %s: %w", spec.Name, err)
		} else if err != nil {
			return nil, err // the disk of this node returns, or a user detaches the volume by force
		}
		if r != nil && s.replicaHere() == nil {
			members = slices.Insert(members, 0, m) // reads prefer the local member, and a resync copies from the first
		} else {
			members = append(members, m)
		}
		if r != nil {
			s.local.Store(spec.UID, r)
		}
	}
	c := as.engineConfig(s, size, b.Now)
	c.Members, c.Track, c.Resync, c.Lenient = members, !b.Alone, fresh, true
	if fresh || as.APIReached() { // a resume does not wait for the API
		c.Reported = func(ctx context.Context, k stack.Snapshot) (bool, error) {
			return as.snapshots.Reported(ctx, s.Volume, k)
		}
	}
	s.engine, err = engine.Open(ctx, c)
	if err != nil {
		return nil, err
	}
	s.serving.Store(s.engine)
	s.noteMissing(s.engine.Missing())
	for _, m := range members {
		if p, ok := engine.Unwrap(m.Member).(*peer.Member); ok {
			s.membership.mu.Lock()
			for i := range s.Members {
				if string(s.Members[i].UID) == m.Name {
					s.Members[i].Boot = p.Boot()
				}
			}
			s.membership.mu.Unlock()
		}
	}
	return s, nil
}

// noteMissing notes the members that the engine did not reach at its start, for the device record.
func (s *Session) noteMissing(names []string) {
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	for i := range s.Members {
		s.Members[i].Missing = slices.Contains(names, string(s.Members[i].UID))
	}
}
