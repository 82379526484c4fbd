package replicas

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/engine"
)

// A member whose layers are damaged, as a read or a scrub found, is repaired by the volume's engine with what the other
// members show; where no other shows it, another replica takes its place.

// Times of repairs: when one that ended is looked at again, as its node may not have told of it yet, and when one that
// could not be made is tried again.
const (
	repairedAgain = 2 * time.Second
	repairLater   = 30 * time.Second
)

// wantsRepair reports whether a replica is damaged and may be repaired.
func wantsRepair(r *api.Replica) bool { return len(r.Status.Damage) > 0 && !r.Status.BeyondRepair }

// repair begins to repair a member that is damaged, unless that is under way.
func (d *Data) repair(ctx context.Context, s *session, r *api.Replica, members []string, all *sync.WaitGroup) {
	uid, name := r.Spec.UID, r.Name
	if !wantsRepair(r) || len(members) < 2 || !slices.Contains(members, string(uid)) || !s.mates.repairs.Begin(uid, math.MaxInt) {
		return
	}
	all.Go(func() {
		again := repairedAgain
		did, err := s.engine.Repair(ctx, string(uid), d.Setting(ctx, "replica-copy-rate-limit")<<20)
		s.mates.repaired.Add(did.Bytes)
		var list []news
		if did.Chunks > 0 {
			list = append(list, news{"Normal", "ReplicaRepaired", fmt.Sprintf("replica %s: %s that were damaged on its disk "+
				"were put right from the other replicas", name, api.SizeText(did.Bytes))})
			s.log.Info("a damaged replica was repaired", "replica", name, "chunks", did.Chunks, "bytes", did.Bytes)
		}
		if did.Lost > 0 {
			list = append(list, news{"Warning", "RepairFailed", fmt.Sprintf("replica %s: no other replica shows what %d "+
				"damaged chunks on its disk held (%v): another replica takes its place", name, did.Lost, did.Why)})
			s.log.Warn("a damaged replica cannot be repaired", "replica", name, "chunks", did.Lost, "err", did.Why)
		}
		if err != nil && ctx.Err() == nil {
			again = repairLater
			s.log.Warn("a damaged replica is not repaired yet", "replica", name, "err", err)
		}
		s.mates.repairs.End(uid, again)
		s.mates.mu.Lock()
		s.mates.news = append(s.mates.news, list...)
		s.mates.mu.Unlock()
		s.mates.lookSoon()
	})
}

// repairFrom repairs the members from a replica that could not be made equal to them, as they are damaged, and reports
// whether anything is right now that was not.
func (d *Data) repairFrom(ctx context.Context, s *session, n engine.Named) bool {
	from := api.UID("from " + n.Name) // beside what is done about the replica itself
	if !s.mates.repairs.Begin(from, math.MaxInt) {
		return false
	}
	did, err := s.engine.RepairFrom(ctx, n, d.Setting(ctx, "replica-copy-rate-limit")<<20)
	again := time.Duration(0)
	if did.Chunks == 0 {
		again = repairLater // it is made equal again and again meanwhile, and has nothing new to show
	}
	s.mates.repairs.End(from, again)
	s.mates.repaired.Add(did.Bytes)
	s.log.Info("members were to be repaired from a replica on its way", "replica", n.Name, "chunks", did.Chunks,
		"bytes", did.Bytes, "beyond repair", did.Lost, "err", errors.Join(err, did.Why))
	if did.Chunks > 0 {
		s.mates.mu.Lock()
		s.mates.news = append(s.mates.news, news{"Normal", "ReplicaRepaired", fmt.Sprintf("%s that were damaged were put "+
			"right from replica %s", api.SizeText(did.Bytes), n.Name)})
		s.mates.mu.Unlock()
	}
	return did.Chunks > 0
}
