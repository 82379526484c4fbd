package engine

import (
	"context"
	"fmt"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/block"
	"drover.io/drover/replicas/stack"
)

// opening is one run of Open, which prepares the members.
type opening struct {
	e   *Engine
	all []Mirror // members that answered
	who []int    // their numbers
	// behind: a member went back in time, and the intents of the others do not name what the member lacks.
	behind bool
}

// prepareMembers prepares the members of a volume with several replicas: the members note intents, the engine resyncs
// the members after an unclean end, and removes snapshots that some member lacks.
func (p *opening) prepareMembers(ctx context.Context) error {
	e := p.e
	if !e.cfg.Track && len(e.cfg.Members) < 2 {
		e.updateLast()
		if err := e.cfg.recordUnnoted(ctx); !api.Is(err, api.Full) {
			return err
		}
		e.cfg.Track = true // a full disk has no room for the record, and room for intents: the file of intents exists
	}
	for {
		err := p.prepareServing(ctx)
		if err == nil || !p.leaveOut() {
			return err
		}
	}
}

func (p *opening) prepareServing(ctx context.Context) error {
	e := p.e
	p.all, p.who = nil, nil
	for i, m := range e.cfg.Members {
		if r, ok := m.Member.(Mirror); ok && !e.suspect.has(i) {
			if err := r.Track(ctx, true); err != nil {
				return err
			}
			p.all, p.who = append(p.all, r), append(p.who, i)
		}
	}
	// First of all: a member that went back in time must not win.
	if err := p.leaveBehind(ctx); err != nil {
		return err
	}
	e.updateLast()
	if e.cfg.Resync && len(p.all) > 1 {
		if err := p.resyncMembers(ctx); err != nil {
			return err
		}
	}
	if p.behind {
		if err := p.intendAll(ctx); err != nil {
			return err
		}
	}
	return p.removePartialSnapshots(ctx)
}

// leaveOut takes out the members that stalled in the preparation, and reports whether the engine can begin with the
// others: each other member has every acknowledged write, and notes the copies of the unfinished resync. The engine
// drops the stalled members like members that Open did not reach.
func (p *opening) leaveOut() bool {
	e := p.e
	var stalled set
	for i, m := range e.cfg.Members {
		if a, ok := m.Member.(Abandonable); ok && !e.suspect.has(i) {
			if why := a.Abandoned(); why != nil {
				stalled |= bit(i)
				e.dropped[i] = fmt.Errorf("replica %s, epoch %d: %w", m.Name, e.epoch, why)
			}
		}
	}
	if stalled == 0 || !e.cfg.Lenient || e.members&^e.suspect&^stalled == 0 {
		return false
	}
	e.suspect |= stalled
	e.missing |= stalled
	return true
}

// leaveBehind takes out the members without a snapshot that another member has and the API reported: these members went
// back in time. The engine drops them like members that Open did not reach.
func (p *opening) leaveBehind(ctx context.Context) error {
	e := p.e
	states, err := statesOf(ctx, p.all)
	if err != nil || states == nil || e.cfg.Reported == nil {
		return err
	}
	lacks := make([]string, len(p.all)) // name of such a snapshot, by member
	for _, st := range states {
		for _, s := range st.Snapshots {
			if allHaveSnapshot(states, s) {
				continue
			}
			is, err := e.cfg.Reported(ctx, s)
			if err != nil {
				return fmt.Errorf("snapshot %s: the API does not answer whether the snapshot was reported: %w", s.Name, err)
			}
			for i, o := range states {
				if is && !slices.ContainsFunc(o.Snapshots, s.Same) {
					lacks[i] = s.Name
				}
			}
		}
	}
	var left []Mirror
	var who []int
	for i, m := range p.all {
		k := p.who[i]
		if lacks[i] == "" {
			left, who = append(left, m), append(who, k)
			continue
		}
		e.suspect |= bit(k)
		e.missing |= bit(k)
		e.dropped[k] = api.Errorf(api.Corrupt, "replica %s: the replica lacks reported snapshot %s: its disk went back "+
			"in time", e.cfg.Members[k].Name, lacks[i])
	}
	if len(left) == 0 {
		return api.Errorf(api.Corrupt, "each replica lacks a snapshot of another replica: the disks went back in time; "+
			"salvage the volume with the right replica")
	}
	p.behind = p.behind || len(left) < len(p.all)
	p.all, p.who = left, who
	return nil
}

// intendAll makes members note every region: intents do not name what a member lacks that went back in time.
func (p *opening) intendAll(ctx context.Context) error {
	for _, m := range p.all {
		t, err := m.Intents(ctx)
		if err != nil {
			return err
		}
		var regions []int64
		for g := range (p.e.cfg.Size + t.Region - 1) / t.Region {
			regions = append(regions, g)
		}
		if err := m.Intend(ctx, regions); err != nil {
			return err
		}
	}
	return nil
}

// statesOf returns the records of members; nil: the members keep no snapshots.
func statesOf(ctx context.Context, all []Mirror) ([]stack.Meta, error) {
	states := make([]stack.Meta, len(all))
	for i, m := range all {
		x, ok := m.(Cutter)
		if !ok {
			return nil, nil
		}
		var err error
		if states[i], err = x.State(ctx); err != nil {
			return nil, fmt.Errorf("snapshots of the members: %w", err)
		}
	}
	return states, nil
}

func allHaveSnapshot(states []stack.Meta, s stack.Snapshot) bool {
	return !slices.ContainsFunc(states, func(o stack.Meta) bool { return !slices.ContainsFunc(o.Snapshots, s.Same) })
}

// removePartialSnapshots removes snapshots that some member lacks, before the engine serves: the API never reported
// such a snapshot, or the snapshot was being deleted.
func (p *opening) removePartialSnapshots(ctx context.Context) error {
	states, err := statesOf(ctx, p.all)
	if err != nil {
		return err
	}
	for i, st := range states {
		for _, s := range st.Snapshots {
			if allHaveSnapshot(states, s) {
				continue
			}
			if err := p.all[i].(Cutter).Forget(ctx, s.UID); err != nil {
				return fmt.Errorf("snapshots of the members: %w", err)
			}
		}
	}
	return nil
}

// resyncMembers resyncs the members before the engine serves the guest. The first member wins: each member has every
// acknowledged write, and an unacknowledged write may survive or not, but on all members alike. For a piece with damage
// on the first member, another member wins.
func (p *opening) resyncMembers(ctx context.Context) error {
	var regions []int64
	var region int64
	for _, m := range p.all {
		t, err := m.Intents(ctx)
		if err != nil {
			return err
		}
		if region != 0 && t.Region != region {
			return api.Errorf(api.Corrupt, "members note intents in regions of %d and %d bytes", region, t.Region)
		}
		region, regions = t.Region, union(regions, t.Regions)
	}
	c := copier{e: p.e, equal: p.all}
	if _, err := c.copyRegions(ctx, regions, region, p.e.cfg.Size); err != nil {
		return fmt.Errorf("members are resynced: %w", err)
	}
	for _, m := range p.all {
		if err := submitAndWait(ctx, p.e.cfg.Loop, m, &block.Request{Op: block.OpFlush}); err != nil {
			return fmt.Errorf("members are resynced: %w", err)
		}
	}
	return nil
}
