package mover

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target/folder"
	"drover.io/drover/block/suite"
)

// node is a machine with volumes, whose process is killed now and then: its store fails from then on, also for the
// deletion of its lock.
type node struct {
	*world
	volume string
	now    *disk
	killed atomic.Bool
	locks  []string // of the process
	mu     sync.Mutex

	faltering bool // the store, in this round
	short     bool // the lists of the store, in this round
}

var errKilled = errors.New("the process was killed")

// start is a new process of the node.
func (n *node) start() {
	n.killed.Store(false)
	n.locks = nil
	n.store.before = func(operation, name string) error {
		if n.killed.Load() {
			return errKilled
		}
		if filepath.Dir(name) == "locks" && operation == "put" {
			n.mu.Lock()
			n.locks = append(n.locks, name)
			n.mu.Unlock()
		}
		return nil
	}
	n.open()
}

// falter has the store fail the n-th operation, and lose the answer of a later Put or Delete that was done, again and
// again. Without n, the store recovers.
func (n *node) falter(nth int64) {
	before := n.store.before
	n.faltering = nth > 0
	if !n.faltering {
		n.store.after = nil
		return
	}
	fault := api.Errorf(api.Unavailable, "503 Slow Down")
	var begun, done atomic.Int64
	n.store.before = func(operation, name string) error {
		if begun.Add(1)%nth == 0 {
			return fault
		}
		return before(operation, name)
	}
	n.store.after = func() error {
		if done.Add(1)%nth == nth/2 {
			return fault
		}
		return nil
	}
}

// shorten has the lists lack some of the snapshots for some rounds, to all processes of the node: those of restic alone,
// or of all.
func (n *node) shorten(random *rand.Rand, foreign []string) {
	n.short = true
	seed, all := byte(random.IntN(256)), random.IntN(3) == 0
	n.store.hides = func(name string) bool {
		folder, name := filepath.Split(name)
		id, err := blob.Parse(name)
		return err == nil && folder == "snapshots/" && (all || slices.Contains(foreign, name)) && (id[0]^seed)%2 == 0
	}
}

// bury removes the locks of a killed process, or of sessions that could not delete theirs, as the store's clock does in
// 30 minutes.
func (n *node) bury() {
	for _, name := range n.locks {
		if err := os.Remove(filepath.Join(n.folder, name)); err != nil && !os.IsNotExist(err) {
			n.Error(err)
		}
	}
}

// model knows which backups exist, and their bytes.
type model struct {
	*world
	mu      sync.Mutex
	backups map[blob.ID]modelBackup
	foreign []string // snapshots of restic
}

type modelBackup struct {
	volume string
	disk   *disk
}

func (m *model) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.backups)
}

// pick returns a backup of a volume, or of any.
func (m *model) pick(random *rand.Rand, volume string) *blob.ID {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []blob.ID
	for id, b := range m.backups {
		if volume == "" || b.volume == volume {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	slices.SortFunc(ids, func(a, b blob.ID) int { return slices.Compare(a[:], b[:]) })
	return &ids[random.IntN(len(ids))]
}

// lacks reports whether the folder has no snapshot of an id.
func (m *model) lacks(id blob.ID) bool {
	_, err := os.Stat(filepath.Join(m.folder, "snapshots", id.String()))
	return os.IsNotExist(err)
}

// mostBackups bounds the backups of the model: each round compares all of them.
const mostBackups = 16

// step does one thing of a node.
func (m *model) step(random *rand.Rand, n *node) error {
	step := random.IntN(10)
	if m.count() > mostBackups && step > 5 { // a deletion in place of a backup
		step = 0
	}
	switch step {
	case 0, 1:
		id := m.pick(random, "")
		if id == nil {
			return nil
		}
		err := n.r.DeleteSnapshots(m.Context(), *id)
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.lacks(*id) {
			delete(m.backups, *id)
		}
		return err
	case 2, 3:
		m.mu.Lock()
		known := slices.Collect(maps.Keys(m.backups))
		m.mu.Unlock()
		_, err := n.r.Sweep(m.Context(), repo.SweepOptions{Poll: 5 * time.Millisecond, Empty: true, Known: known,
			Threshold: 50 + random.IntN(50), Writer: repo.WriterOptions{PackSize: 5 << 20, Memory: 1}})
		if api.Is(err, api.Unavailable) && slices.ContainsFunc(known, m.lacks) { // another node deleted the backup
			return nil
		}
		return err
	case 4, 5:
		return m.restore(random, n)
	}
	return m.backup(random, n)
}

// restore restores a backup that another node may delete, and sweep, meanwhile: a lock keeps all packs, or lets the blobs
// of the backup move into others. The index is that of the begin for several restores.
func (m *model) restore(random *rand.Rand, n *node) (err error) {
	id := m.pick(random, "")
	if id == nil {
		return nil
	}
	m.mu.Lock()
	want := m.backups[*id].disk
	m.mu.Unlock()
	var lock *repo.Lock
	if random.IntN(3) == 0 {
		lock, err = n.r.Lock(m.Context(), repo.Shared)
	} else {
		lock, err = n.r.LockSnapshot(m.Context(), *id)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close(m.Context())) }()
	blobs, err := n.r.LoadIndex(m.Context())
	if err != nil {
		return err
	}
	defer blobs.Close()
	backup, err := openSnapshot(m.Context(), n.r, blobs, *id)
	if err != nil {
		return err
	}
	for range 1 + random.IntN(4) {
		got := newDisk(backup.Size)
		_, err = Restore(m.Context(), blobs, backup, got, RestoreOptions{})
		if n.faltering && api.Is(err, api.Unavailable) || api.Is(err, api.Busy) {
			return err
		}
		if err != nil {
			return fmt.Errorf("restore of %.8s: %v", *id, err) //nolint:errorlint // no kind: nothing may be missing
		}
		if want != nil && !got.equals(want) {
			m.Errorf("%s: a restore of %.8s differs", n.volume, *id)
		}
		time.Sleep(time.Duration(random.IntN(30)) * time.Millisecond) // others delete and sweep
	}
	return nil
}

func (m *model) backup(random *rand.Rand, n *node) error {
	n.now = n.now.copy(n.now.size + random.Int64N(3)*chunkSize)
	for range 1 + random.IntN(3) {
		mutate(random, n.now)
	}
	n.now.digests = random.IntN(2) == 0
	o := options(n.volume)
	o.Writer.Memory, o.Workers = 1, 2
	o.FragmentSize = []int{0, 512 << 10}[random.IntN(2)]
	if o.Base = m.pick(random, n.volume); o.Base != nil {
		m.mu.Lock()
		base := m.backups[*o.Base].disk
		m.mu.Unlock()
		if base == nil {
			o.Base = nil // deleted meanwhile
		} else {
			o.Changed = changed(random, base, n.now)
		}
	}
	result, err := Backup(m.Context(), n.r, n.now, o)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		m.backups[result.Snapshot] = modelBackup{n.volume, n.now}
	}
	return err
}

// backupByRestic makes a backup of restic, of which Drover has no object, and deletes an old one. A visit with whole
// lists follows.
func (m *model) backupByRestic(random *rand.Rand) {
	m.Helper()
	path := filepath.Join(m.TempDir(), "file")
	must(m, os.WriteFile(path, randomBytes(random.Uint64(), 1<<20), 0o600))
	m.restic("backup", "--quiet", path)
	var listed []struct{ ID string }
	must(m, json.Unmarshal([]byte(m.restic("snapshots", "--json", "--latest", "1", "--path", path)), &listed))
	if m.foreign = append(m.foreign, listed[0].ID); len(m.foreign) > 4 {
		m.restic("forget", m.foreign[0])
		m.foreign = m.foreign[1:]
	}
	list, err := m.r.ListRecorded(m.Context())
	must(m, err)
	must(m, list.Save(m.Context()))
}

// TestNoBackupIsLost: in each round three nodes make and delete backups and sweep at the same time, while restic may
// prune. The test kills nodes at random places, makes their stores fail, and lets the stores' lists lack snapshots.
// Between rounds restic may make a backup, and forget a backup and prune. After each round `restic check` finds no error, and the test restores all backups of the model.
func TestNoBackupIsLost(t *testing.T) {
	suite.System(t)
	rounds := suite.Count(t, "DROVER_ROUNDS", 12, 1000)
	for seed := range suite.Seeds(t, 1) {
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 2))
		m := &model{world: newWorld(t), backups: map[blob.ID]modelBackup{}}
		nodes := make([]*node, 3)
		for i := range nodes {
			w := *m.world
			s, err := folder.Open(t.Context(), w.folder)
			must(t, err)
			w.store = &hookedStore{Store: s, counts: map[string]int{}}
			nodes[i] = &node{world: &w, volume: fmt.Sprint("v", i), now: newDisk((5 + int64(i)*70) * chunkSize)}
			nodes[i].start()
		}
		for round := range rounds {
			m.round(random, nodes)
			if t.Failed() {
				t.Fatalf("round %d of seed %d failed", round, seed)
			}
			if round%50 == 49 {
				t.Logf("%d rounds", round+1)
			}
		}
	}
}

// round lets the nodes work at once, kills some, and compares.
func (m *model) round(random *rand.Rand, nodes []*node) {
	var group sync.WaitGroup
	var cut atomic.Bool
	for _, n := range nodes {
		own := rand.New(rand.NewPCG(random.Uint64(), 3))
		kill := own.IntN(4) == 0
		after := own.IntN(40) // operations of the store
		if own.IntN(4) == 0 {
			n.falter(20 + own.Int64N(100))
		}
		if own.IntN(2) == 0 {
			n.shorten(own, slices.Clone(m.foreign))
		}
		before := n.store.before
		if kill {
			var count atomic.Int64
			n.store.before = func(operation, name string) error {
				if int(count.Add(1)) > after {
					n.killed.Store(true)
				}
				return before(operation, name)
			}
		}
		group.Go(func() {
			for range 1 + own.IntN(3) {
				err := m.step(own, n)
				if err != nil && !n.killed.Load() && !api.Is(err, api.Busy) && !api.Is(err, api.NotFound) &&
					!((n.faltering || n.short) && api.Is(err, api.Unavailable)) {
					m.Errorf("%s: %v", n.volume, err)
				}
				if n.faltering {
					cut.Store(true)
					n.bury()
				}
				if n.killed.Load() {
					cut.Store(true)
					break
				}
			}
			if kill || n.faltering {
				n.falter(0)
				n.bury()
				n.start()
			}
			if n.short && own.IntN(2) == 0 {
				n.start() // a new process, with the same lists
			}
		})
	}
	if random.IntN(6) == 0 {
		group.Go(func() { m.prune(true) })
	}
	group.Wait()
	for _, n := range nodes {
		if n.short && random.IntN(2) == 0 {
			n.short, n.store.hides = false, nil
		}
	}
	if cut.Load() && m.hasErrors() {
		nodes[0].short, nodes[0].store.hides = false, nil
		// A session that was cut just after its snapshot needs a hidden pack, which the next sweep returns.
		m.Log("a sweep returns packs")
		_, err := nodes[0].r.Sweep(m.Context(), repo.SweepOptions{Poll: time.Millisecond, Empty: true})
		must(m, err)
	}
	m.compareAll()
	if random.IntN(3) == 0 {
		m.backupByRestic(random)
	}
	if random.IntN(4) == 0 {
		if id := m.pick(random, ""); id != nil {
			m.restic("forget", id.String())
			delete(m.backups, *id)
		}
		m.prune(false)
		m.compareAll()
	}
}

func (m *model) hasErrors() bool {
	cmd := exec.CommandContext(m.Context(), "restic", "--no-cache", "--repo", m.folder, "check", "--no-lock")
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+password)
	return cmd.Run() != nil
}

// compareAll compares the repository with the model. A backup whose snapshot a killed process wrote may be unknown to
// the model; all bytes of it are right according to restic.
func (m *model) compareAll() {
	m.Helper()
	m.check()
	for id, b := range m.backups {
		m.compare(id, b.disk)
	}
}

// prune lets restic prune. Beside the nodes, restic may find their locks, and leave all as it is.
func (m *model) prune(beside bool) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "restic", "--no-cache", "--repo", m.folder, "prune", "--max-unused", "0")
	cmd.Env = append(os.Environ(), "RESTIC_PASSWORD="+password)
	output, err := cmd.CombinedOutput()
	if beside && bytes.Contains(output, []byte("already locked")) {
		return
	}
	if err != nil {
		m.Errorf("restic prune: %v\n%.2000s", err, output)
	}
}
