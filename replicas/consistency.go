package replicas

import (
	"context"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/replicas/stack"
)

// After a cut the members are compared in what it holds, in the background: where two replicas differ that should not,
// somebody has to know before one of them is needed.

// compareMost is how many snapshots wait for it at most: where they are taken faster, the oldest are left out.
const compareMost = 16

// compareSoon has a new snapshot compared on all members; before is the uid of its predecessor.
func (m *mates) compareSoon(before string, snapshot stack.Snapshot) {
	f := fresh{before: before, uid: snapshot.UID, name: snapshot.Name}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.compare = append(m.compare, f); len(m.compare) > compareMost {
		m.compare = m.compare[1:]
	}
}

// compareEvery is how often it is looked for something to compare.
const compareEvery = 3 * time.Second

// compareNext compares one. What cannot be compared now is tried again, but for what is gone.
func (d *Data) compareNext(ctx context.Context, s *session) {
	s.mates.mu.Lock()
	list := s.mates.compare
	s.mates.mu.Unlock()
	if len(list) == 0 || !d.APIReached() {
		return
	}
	f := list[0]
	err := s.engine.Compare(ctx, f.before, f.uid, d.Setting(ctx, "volume-scrub-rate-limit")<<20)
	switch {
	case api.Is(err, api.Corrupt):
		s.log.Error("the members of a volume differ", "snapshot", f.name, "err", err)
		s.mates.mu.Lock()
		s.mates.news = append(s.mates.news, news{"Warning", "ReplicasDiffer", "snapshot " + f.name +
			" is not the same on all replicas: " + err.Error() + "; scrub the volume, and remove the damaged replica"})
		s.mates.mu.Unlock()
	case err != nil && !api.Is(err, api.NotFound):
		return // a member is away, or merges those very layers
	}
	s.mates.mu.Lock()
	defer s.mates.mu.Unlock()
	for i := range s.mates.compare {
		if s.mates.compare[i] == f {
			s.mates.compare = append(s.mates.compare[:i:i], s.mates.compare[i+1:]...)
			break
		}
	}
}
