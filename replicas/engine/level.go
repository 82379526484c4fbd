package engine

import (
	"context"
	"fmt"
	"slices"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// mirrors prepares the members of a volume with several replicas: they note intents, the engine resyncs where an
// unclean end left them unequal, and they have the same snapshots.
func (e *Engine) mirrors(ctx context.Context) error {
	if !e.cfg.Track && len(e.cfg.Members) < 2 {
		e.tellLast()
		return e.cfg.unnoted(ctx)
	}
	var all []Mirror
	var who []int // their numbers
	for i, m := range e.cfg.Members {
		if r, ok := m.Member.(Mirror); ok && !e.suspect.has(i) {
			if err := r.Track(ctx, true); err != nil {
				return err
			}
			all, who = append(all, r), append(who, i)
		}
	}
	// First of all: a member that went back in time must not win.
	all, behind, err := e.leaveBehind(ctx, all, who)
	if err != nil {
		return err
	}
	e.tellLast()
	if e.cfg.Equalise && len(all) > 1 {
		if err := e.equalise(ctx, all); err != nil {
			return err
		}
	}
	if behind {
		if err := e.intendAll(ctx, all); err != nil {
			return err
		}
	}
	return e.level(ctx, all)
}

// leaveBehind takes the members out that lack a snapshot which another one has and the API reported: they went back in
// time. The engine drops them like members that it did not reach.
func (e *Engine) leaveBehind(ctx context.Context, all []Mirror, who []int) (left []Mirror, some bool, err error) {
	states, err := statesOf(ctx, all)
	if err != nil || states == nil || e.cfg.Reported == nil {
		return all, false, err
	}
	lacks := make([]string, len(all)) // name of such a snapshot, by member
	for _, st := range states {
		for _, s := range st.Snapshots {
			if everywhere(states, s) {
				continue
			}
			is, err := e.cfg.Reported(ctx, s)
			if err != nil {
				return nil, false, fmt.Errorf("snapshot %s: not known whether it was reported: %w", s.Name, err)
			}
			for i, o := range states {
				if is && !slices.ContainsFunc(o.Snapshots, s.Same) {
					lacks[i] = s.Name
				}
			}
		}
	}
	for i, m := range all {
		if lacks[i] == "" {
			left = append(left, m)
			continue
		}
		k := who[i]
		e.suspect |= bit(k)
		e.absent |= bit(k)
		e.dropped[k] = api.Errorf(api.Corrupt, "replica %s: it lacks snapshot %s, which was reported: its disk went back in "+
			"time", e.cfg.Members[k].Name, lacks[i])
	}
	if len(left) == 0 {
		return nil, false, api.Errorf(api.Corrupt, "each replica lacks a snapshot that another one has: their disks "+
			"went back in time; salvage the one that is to count")
	}
	return left, len(left) < len(all), nil
}

// intendAll has members note every region: intents do not tell what a member lacks that went back in time.
func (e *Engine) intendAll(ctx context.Context, all []Mirror) error {
	for _, m := range all {
		t, err := m.Intents(ctx)
		if err != nil {
			return err
		}
		var regions []int64
		for g := range (e.cfg.Size + t.Region - 1) / t.Region {
			regions = append(regions, g)
		}
		if err := m.Intend(ctx, regions); err != nil {
			return err
		}
	}
	return nil
}

// statesOf are the records of members; nil: they keep no snapshots.
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

func everywhere(states []stack.Meta, s stack.Snapshot) bool {
	return !slices.ContainsFunc(states, func(o stack.Meta) bool { return !slices.ContainsFunc(o.Snapshots, s.Same) })
}

// level makes the snapshots of the members the same, before anything is served: one that is not on all of them was not
// there for anybody yet, or was being taken away.
func (e *Engine) level(ctx context.Context, all []Mirror) error {
	states, err := statesOf(ctx, all)
	if err != nil {
		return err
	}
	for i, st := range states {
		for _, s := range st.Snapshots {
			if everywhere(states, s) {
				continue
			}
			if err := all[i].(Cutter).Forget(ctx, s.UID); err != nil {
				return fmt.Errorf("snapshots of the members: %w", err)
			}
		}
	}
	return nil
}
