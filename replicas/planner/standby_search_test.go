package planner

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"drover.io/drover/api"
)

const (
	supplyStep  = 5 * time.Minute
	supplyDisk  = 1 << 30 // bytes that the largest disk has
	supplyLarge = 2 << 30
)

// suppliedBackup is a backup of a supply.
type suppliedBackup struct {
	*api.Backup
	restore time.Duration // how long the store needs for it
	bad     bool          // the restore fails at its end
	large   bool          // the content has no room on any disk, although the backup claims another size
	done    time.Duration // of the running restore
}

func (b *suppliedBackup) isGood() bool { return !b.bad && !b.large && b.Status.VolumeSize < supplyDisk }

// supply lets random backups arrive for a standby volume, and restores its next one.
type supply struct {
	*fallback
	t        *testing.T
	rng      *rand.Rand
	all      map[string]*suppliedBackup
	next     string // the next backup of the last step
	restores int    // begun
	// The running search must end before limit restores while the store has good.
	search *metav1.Time
	good   string
	limit  int
}

func newSupply(t *testing.T, seed uint64) *supply {
	f := newFallback()
	f.full, f.v.Status.Standby.Held = supplyDisk, nil
	return &supply{fallback: f, t: t, rng: rand.New(rand.NewPCG(seed, 1)), all: map[string]*suppliedBackup{}}
}

// arrive adds a backup with the instant of its content.
func (s *supply) arrive(b suppliedBackup, cutAt time.Time) *suppliedBackup {
	b.Backup = backupOfTest(1)
	b.Name = fmt.Sprintf("s%d", len(s.all))
	b.CreationTimestamp = metav1.NewTime(s.now)
	b.Status.URL = api.BackupURL(storeOfTest, b.Name, "db")
	b.Status.SnapshotID = strings.Repeat(b.Name, 32)
	b.Status.SnapshotCreatedAt = cutAt.Format(time.RFC3339)
	s.all[b.Name] = &b
	s.backups = append(s.backups, b.Backup)
	slices.SortFunc(s.backups, func(x, y *api.Backup) int {
		if x.NewerThan(y) {
			return -1
		}
		return 1
	})
	return &b
}

// newestGood is the newest listed good backup; nil: none.
func (s *supply) newestGood(older func(*api.Backup) bool) *suppliedBackup {
	for _, b := range s.backups {
		if g := s.all[b.Name]; g.isGood() && older(b) {
			return g
		}
	}
	return nil
}

// restore continues the restore of the next backup, and decides.
func (s *supply) restore() {
	st := s.v.Status.Standby
	held := st.Held
	if st.Next != nil {
		b := s.all[st.Next.Backup]
		if b.Name != s.next {
			s.restores, b.done = s.restores+1, 0
		}
		s.next = b.Name
		img := imageOfTest(api.ImageInProgress, 0)
		s.images[b.Name] = img
		switch {
		case s.away:
			img.Status.State, img.Status.Message = api.ImageFailed, "the store is away"
		case b.done >= b.restore && b.bad:
			img.Status.State, img.Status.Message = api.ImageFailed, "a chunk is damaged"
		case b.done >= b.restore:
			img.Status.State, img.Status.ReadyCopies = api.ImageReady, 1
			img.Status.VirtualSize = 64 << 20
			if b.large {
				img.Status.VirtualSize = supplyLarge
			}
		default:
			b.done += supplyStep
		}
		img.Status.Progress = int32(min(100, 100*b.done/b.restore))
	}
	s.step(supplyStep)
	if st.Next == nil {
		s.next = ""
	}
	s.checkHeld(held)
	s.checkSearch()
}

func (s *supply) checkHeld(before *api.StandbyBackup) {
	s.t.Helper()
	held := s.v.Status.Standby.Held
	if held != nil && !s.all[held.Backup].isGood() {
		s.t.Fatalf("the volume holds the bad backup %s", held.Backup)
	}
	if before != nil && (held == nil || before.IsNewerThan(held)) {
		s.t.Fatalf("the volume holds %+v after %+v", held, before)
	}
	if text, err := json.Marshal(s.v.Status); err != nil || len(text) > 8<<10 {
		s.t.Fatalf("the status has %d bytes, %v", len(text), err)
	}
}

// checkSearch fails the test if a search above a good backup takes more than two restores for each backup of its begin.
func (s *supply) checkSearch() {
	s.t.Helper()
	now := s.v.Status.Standby.Search
	switch {
	case now == nil:
		s.search, s.good = nil, ""
	case s.search == nil || !s.search.Equal(&now.Since):
		s.search, s.good, s.limit = &now.Since, "", s.restores+2*len(s.backups)+2
		good := s.newestGood(func(b *api.Backup) bool { return now.Oldest.IsNewerThan(nextBackup(s.v, b)) })
		if held := s.v.Status.Standby.Held; good != nil && (held == nil || good.CutAt().After(held.CutAt())) {
			s.good = good.Name
		}
	case s.good != "" && s.restores > s.limit:
		s.t.Fatalf("the good backup %s has no turn: %+v", s.good, now)
	}
}

// remove deletes a backup from the store.
func (s *supply) remove(n int) {
	if s.backups[n].Name == s.good {
		s.good = ""
	}
	s.backups = slices.Delete(s.backups, n, n+1)
}

// TestStandbyHoldsTheNewestBackupThatCanBeTaken: with any arrivals, and however long restores take, a search reaches each
// good backup of its begin after a bounded number of restores. After the last arrival the volume holds the newest good
// backup after a bounded number of restores. The status stays small.
func TestStandbyHoldsTheNewestBackupThatCanBeTaken(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newSupply(t, seed)
			interval := time.Duration(1+s.rng.IntN(40)) * supplyStep
			longest := time.Duration(1+s.rng.IntN(40)) * supplyStep
			good, outages, deletions := s.rng.Float64()/2, s.rng.Float64()/50, s.rng.Float64()/50
			for range 600 {
				if s.rng.Float64() < float64(supplyStep)/float64(interval) {
					b := suppliedBackup{restore: supplyStep + time.Duration(s.rng.Int64N(int64(longest)))}
					b.bad = s.rng.Float64() >= good
					b.large = s.rng.IntN(8) == 0
					cutAt := s.now
					if s.rng.IntN(4) == 0 { // a late or a forged one
						cutAt = cutAt.Add(-time.Duration(s.rng.Int64N(int64(24 * time.Hour))))
					}
					if a := s.arrive(b, cutAt); s.rng.IntN(8) == 0 {
						a.Status.VolumeSize = supplyLarge
					}
				}
				if s.rng.Float64() < deletions && len(s.backups) > 0 {
					s.remove(s.rng.IntN(len(s.backups)))
				}
				if s.away = s.rng.Float64() < outages || s.away && s.rng.IntN(6) > 0; s.away {
					outages /= 2
				}
				s.restore()
			}
			s.away = false
			want := s.newestGood(func(*api.Backup) bool { return true })
			limit, steps := s.restores+3*len(s.backups)+3, 0
			holds := func() bool {
				held := s.v.Status.Standby.Held
				return want == nil || held != nil && !nextBackup(s.v, want.Backup).IsNewerThan(held)
			}
			for ; !holds(); steps++ {
				if s.restore(); s.restores > limit || steps > 100_000 {
					t.Fatalf("after %d restores the volume does not hold %s: %+v", s.restores, want.Name, s.v.Status.Standby)
				}
			}
		})
	}
}

// TestFloodOfBadBackupsHidesNoGoodOne: bad backups arrive faster than restores fail, also with old instants, or leave the
// store after their failure. The standby volume reaches a good backup from before the flood, or from its midst.
func TestFloodOfBadBackupsHidesNoGoodOne(t *testing.T) {
	const restore = 90 * time.Minute
	good, bad := suppliedBackup{restore: restore}, suppliedBackup{restore: restore, bad: true}
	for what, c := range map[string]struct {
		old    bool // a good backup came before the flood
		delete bool // what failed leaves the store
		flood  func(s *supply, search *api.StandbySearch)
	}{
		"of new ones":            {true, false, func(s *supply, _ *api.StandbySearch) { s.arrive(bad, s.now) }},
		"that the store deletes": {true, true, func(s *supply, _ *api.StandbySearch) { s.arrive(bad, s.now) }},
		"below the last that failed": {true, false, func(s *supply, search *api.StandbySearch) {
			if search != nil {
				s.arrive(bad, search.Oldest.CutAt().Add(-time.Second))
			}
		}},
		"above each good one": {false, false, func(s *supply, search *api.StandbySearch) {
			if search != nil {
				s.arrive(good, s.now.Add(-time.Second))
				s.arrive(bad, s.now)
			}
		}},
	} {
		t.Run(what, func(t *testing.T) {
			s := newSupply(t, 1)
			if c.old {
				s.arrive(good, s.now)
			}
			for range 3 {
				s.arrive(bad, s.now.Add(time.Hour))
			}
			st := s.v.Status.Standby
			for n := 0; st.Held == nil; n++ {
				if c.delete && st.Next != nil && s.all[st.Next.Backup].done >= restore && s.all[st.Next.Backup].bad {
					s.backups = slices.DeleteFunc(s.backups, func(b *api.Backup) bool { return isNamed(st.Next, b) })
				}
				if n%6 == 0 {
					c.flood(s, st.Search)
				}
				if s.restore(); s.restores > 20 {
					t.Fatalf("after %d restores the volume holds nothing: %+v", s.restores, st)
				}
			}
		})
	}
}

// TestFloodKeepsNoActivationFromAReadableBackup: bad backups arrive more often than the store opens a backup. An
// activation without a held backup begins with the good backup below after a bounded number of tries.
func TestFloodKeepsNoActivationFromAReadableBackup(t *testing.T) {
	const opening, interval = 50, 20 // in seconds
	s := newSupply(t, 1)
	s.v.Spec.Standby = false
	good := s.arrive(suppliedBackup{}, s.now)
	began, chosen := 0, (*api.StandbyBackup)(nil)
	for second := 0; chosen == nil; second++ {
		if second > 20*opening {
			t.Fatalf("the activation waits: %+v", s.v.Status.Standby)
		}
		if second%interval == 0 {
			s.arrive(suppliedBackup{bad: true}, s.now)
		}
		s.late = second >= 60
		view := &standbyView{answered: true, late: s.late}
		if next := s.v.Status.Standby.Next; next != nil {
			if next.Backup != s.next {
				s.next, began = next.Backup, second
			}
			img := imageOfTest(api.ImageInProgress, 0)
			switch opened := second-began >= opening; {
			case opened && s.all[next.Backup].bad:
				img.Status.State = api.ImageFailed
			case opened:
				img.Status.Readable = true
			}
			s.images[next.Backup], view.next = img, img
		}
		s.step(time.Second)
		if next := s.v.Status.Standby.Next; next != nil && next.Backup == s.next {
			view.judgeNext(s.v)
			chosen, _ = chooseActivated(s.v, view)
		}
	}
	if chosen.Backup != good.Name {
		t.Errorf("the activation begins with %s", chosen.Backup)
	}
}
