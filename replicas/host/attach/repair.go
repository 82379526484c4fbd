package attach

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

// A read or a scrub finds damage in the layers of a member. The volume's engine repairs the member with chunks of the
// other members; if all members lack a chunk, the planner replaces the replica.

// Times of repairs: the pause after a repair, because the node may not have reported the end of the damage yet, and the
// pause after a failed repair.
const (
	repairedAgain = 2 * time.Second
	repairLater   = 30 * time.Second
)

// wantsRepair reports whether a replica is damaged and may be repaired.
func wantsRepair(r *api.Replica) bool { return len(r.Status.Damage) > 0 && !r.Status.BeyondRepair }

// startRepair starts the repair of a damaged member, unless a repair is in progress.
func (as *Attachments) startRepair(ctx context.Context, s *Session, r *api.Replica, members []string,
	all *sync.WaitGroup) {
	uid, name := r.Spec.UID, r.Name
	if !wantsRepair(r) || len(members) < 2 || !slices.Contains(members, string(uid)) ||
		!s.membership.repairs.Begin(uid, math.MaxInt) {
		return
	}
	all.Go(func() {
		again := repairedAgain
		did, err := s.engine.Repair(ctx, string(uid), as.Setting(ctx, "replica-copy-rate-limit")<<20)
		s.membership.repaired.Add(did.Bytes)
		var list []event
		if did.Chunks > 0 {
			list = append(list, event{"Normal", "ReplicaRepaired", fmt.Sprintf("replica %s: the engine repaired %s of "+
				"damaged data from the other replicas", name, api.SizeText(did.Bytes))})
			s.log.Info("a damaged replica was repaired", "replica", name, "chunks", did.Chunks, "bytes", did.Bytes)
		}
		if did.Lost > 0 {
			list = append(list, event{"Warning", "RepairFailed", fmt.Sprintf("replica %s: no other replica has the "+
				"content of %d damaged chunks (%v): another replica replaces it", name, did.Lost, did.Why)})
			s.log.Warn("a damaged replica cannot be repaired", "replica", name, "chunks", did.Lost, "err", did.Why)
		}
		if err != nil && ctx.Err() == nil {
			again = repairLater
			s.log.Warn("a damaged replica is not repaired yet", "replica", name, "err", err)
		}
		s.membership.repairs.End(uid, again)
		s.membership.mu.Lock()
		s.membership.events = append(s.membership.events, list...)
		s.membership.mu.Unlock()
		s.membership.wakeRebuilds()
	})
}

// repairFrom repairs damaged members from a replica whose resync failed because of the damage, and reports whether a
// chunk was repaired.
func (as *Attachments) repairFrom(ctx context.Context, s *Session, n engine.Named) bool {
	from := api.UID("from " + n.Name) // besides the repairs of the replica itself
	if !s.membership.repairs.Begin(from, math.MaxInt) {
		return false
	}
	did, err := s.engine.RepairFrom(ctx, n, as.Setting(ctx, "replica-copy-rate-limit")<<20)
	again := time.Duration(0)
	if did.Chunks == 0 {
		again = repairLater // the next resyncs of the replica show nothing new
	}
	s.membership.repairs.End(from, again)
	s.membership.repaired.Add(did.Bytes)
	s.log.Info("members were repaired from a replica during its rebuild", "replica", n.Name, "chunks", did.Chunks,
		"bytes", did.Bytes, "beyond repair", did.Lost, "err", errors.Join(err, did.Why))
	if did.Chunks > 0 {
		s.membership.mu.Lock()
		s.membership.events = append(s.membership.events, event{"Normal", "ReplicaRepaired",
			fmt.Sprintf("the engine repaired %s of damaged data from replica %s", api.SizeText(did.Bytes), n.Name)})
		s.membership.mu.Unlock()
	}
	return did.Chunks > 0
}
