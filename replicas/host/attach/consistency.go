package attach

import (
	"context"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// After a cut the engine compares the members in the new layer, in the background: users learn of a difference before
// the volume needs the damaged replica. The list of comparisons ends with the session, so the session keeps the list.

// compareMost bounds how many snapshots wait for a comparison. After faster cuts the oldest are left out.
const compareMost = 16

// compareSoon has a new snapshot compared on all members.
func (m *membership) compareSoon(snapshot stack.Snapshot) {
	f := fresh{uid: snapshot.UID, name: snapshot.Name}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.compare = append(m.compare, f); len(m.compare) > compareMost {
		m.compare = m.compare[1:]
	}
}

// compareEvery is the pause between two comparisons.
const compareEvery = 3 * time.Second

// compareNext compares one snapshot. A failed comparison is tried again, unless the snapshot is deleted.
func (as *Attachments) compareNext(ctx context.Context, s *Session) {
	s.membership.mu.Lock()
	list := s.membership.compare
	s.membership.mu.Unlock()
	if len(list) == 0 || !as.APIReached() {
		return
	}
	f := list[0]
	err := s.engine.Compare(ctx, f.uid, as.Setting(ctx, "volume-scrub-rate-limit")<<20)
	switch {
	case api.Is(err, api.Corrupt):
		s.log.Error("the members of a volume differ", "snapshot", f.name, "err", err)
		s.membership.mu.Lock()
		s.membership.events = append(s.membership.events, event{"Warning", "ReplicasDiffer", "snapshot " + f.name +
			" is not the same on all replicas: " + err.Error() + "; scrub the volume, and remove the damaged replica"})
		s.membership.mu.Unlock()
	case err != nil && !api.Is(err, api.NotFound):
		return // a member is missing, has not finished the layer, or merges it
	}
	s.membership.mu.Lock()
	defer s.membership.mu.Unlock()
	for i := range s.membership.compare {
		if s.membership.compare[i] == f {
			s.membership.compare = append(s.membership.compare[:i:i], s.membership.compare[i+1:]...)
			break
		}
	}
}
