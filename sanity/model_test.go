package sanity_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"drover.io/drover/block/suite"
)

// The model test of the whole program: random steps of users on a few small volumes, with kills of the processes in
// between, against models that know every byte of every volume and snapshot.

const (
	modelSteps   = 80 // in a program
	modelVolumes = 4  // at most; checks of snapshots use the last
	modelSnaps   = 5
	modelSmall   = 16 * mib
	modelLarge   = 32 * mib
	modelShrink  = 2 * time.Minute // to make a failing program shorter
)

// modelled is a volume and the bytes that a reader must see.
type modelled struct {
	*pod
	image []byte
	dev   *os.File // nil: detached
	or    []byte   // not nil: another allowed content of each sector; check settles image
}

// kept is a snapshot and the bytes that a reader must see.
type kept struct {
	id, name string
	volume   string
	image    []byte
	either   []byte // not nil: each sector equals image or either, until a check
}

// model is one program: all random choices of a step follow from the step's seed and from the present objects, except
// the moments of kills. So a program makes sense with any of the steps left out.
type model struct {
	w       *world
	t       *testing.T
	rng     *rand.Rand
	bytes   *rand.ChaCha8
	prefix  string
	named   int
	volumes []*modelled
	snaps   []*kept
	begun   int // steps of the program
	steps   []string
	until   time.Time
	dying   chan struct{} // not nil: a kill of serve runs; closed after the kill
}

// modelPrograms counts the programs of this process: each program has names of its own.
var modelPrograms atomic.Int64

func newModel(w *world, until time.Time) *model {
	return &model{w: w, until: until, prefix: fmt.Sprintf("model-%d-%d", os.Getpid(), modelPrograms.Add(1))}
}

// TestModelOfProgram runs one program, or programs of new seeds for the time in DROVER_MODEL; DROVER_SEED runs one
// program alone. The test shortens a failing program: DROVER_MODEL_STEPS, the seeds of its steps, runs such a program
// alone.
func TestModelOfProgram(t *testing.T) {
	t.Parallel()
	if text := os.Getenv("DROVER_MODEL_STEPS"); text != "" {
		var list []uint64
		must(t, json.Unmarshal([]byte(text), &list))
		m := newModel(newWorld(t), time.Now().Add(time.Hour))
		m.run(t, list)
		t.Logf("steps:\n%s", strings.Join(m.steps, "\n"))
		return
	}
	n, long := 1, suite.Duration(t, "DROVER_MODEL", 10*time.Minute)
	until := time.Now().Add(time.Hour)
	if long > 0 {
		n, until = math.MaxInt, time.Now().Add(long)
	}
	w := newWorld(t)
	programs, steps := 0, 0
	for seed := range suite.Seeds(t, n) {
		if time.Now().After(until) {
			break
		}
		list, m := modelProgram(seed), newModel(w, until)
		if !suite.All() {
			list = list[:modelSteps/4]
		}
		well := t.Run(fmt.Sprint(seed), func(t *testing.T) { m.run(t, list) })
		w.t = t
		if !well {
			t.Logf("DROVER_SEED=%d, steps:\n%s", seed, strings.Join(m.steps, "\n"))
			shrinkModel(t, list[:m.begun])
			return
		}
		programs, steps = programs+1, steps+len(m.steps)
	}
	t.Logf("%d programs, %d steps", programs, steps)
}

// modelProgram returns the program of a seed: the seeds of the steps.
func modelProgram(seed uint64) []uint64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	list := make([]uint64, modelSteps)
	for i := range list {
		list[i] = rng.Uint64()
	}
	return list
}

// shrinkModel prints the shortest failing program found, and tries each program on a new world.
func shrinkModel(t *testing.T, list []uint64) {
	until := time.Now().Add(modelShrink)
	var steps []string
	fails := func(list []uint64) bool {
		m := newModel(nil, until)
		well := t.Run("shorter", func(t *testing.T) {
			m.w = newWorld(t)
			m.run(t, list)
		})
		if !well {
			steps = m.steps
		}
		return !well
	}
	if !fails(list) {
		t.Log("the same steps do not fail again: it is a matter of the moments of kills")
		return
	}
	list = shrink(list, fails, until)
	text, err := json.Marshal(list)
	must(t, err)
	t.Logf("the shortest program found that fails: DROVER_MODEL_STEPS=%s, steps:\n%s", text, strings.Join(steps, "\n"))
}

// shrink leaves out steps that a failing program does not need: halves first, then less and less.
func shrink[T any](list []T, fails func([]T) bool, until time.Time) []T {
	for size := (len(list) + 1) / 2; size > 0; size /= 2 {
		for at := 0; at < len(list); {
			if time.Now().After(until) {
				return list
			}
			less := slices.Delete(slices.Clone(list), at, min(at+size, len(list)))
			if fails(less) {
				list = less
			} else {
				at += size
			}
		}
	}
	return list
}

// TestShrink: shrink leaves only the steps that the failure needs.
func TestShrink(t *testing.T) {
	never := time.Now().Add(time.Hour)
	list := modelProgram(7)
	for _, need := range [][]int{{}, {0}, {79}, {3, 4}, {0, 40, 79}, {10, 11, 12, 30, 77}} {
		var want []uint64
		for _, i := range need {
			want = append(want, list[i])
		}
		tries := 0
		fails := func(l []uint64) bool {
			tries++
			at := 0
			for _, step := range l { // in this order, with any steps in between
				if at < len(want) && step == want[at] {
					at++
				}
			}
			return at == len(want)
		}
		before := slices.Clone(list)
		if got := shrink(list, fails, never); !slices.Equal(got, want) || !slices.Equal(list, before) {
			t.Errorf("what needs the steps %v is shrunk to %d steps", need, len(got))
		}
		if tries > 4*len(list) {
			t.Errorf("what needs the steps %v takes %d tries", need, tries)
		}
		if got := shrink(list, fails, time.Now().Add(-time.Second)); len(got) != len(list) {
			t.Errorf("%d steps are left with no time to leave any out", len(got))
		}
	}
}

// run carries out a program, checks everything, and removes everything.
func (m *model) run(t *testing.T, list []uint64) {
	m.t, m.w.t = t, t
	defer func() {
		if t.Failed() {
			for _, v := range m.volumes {
				if v.dev != nil {
					v.dev.Close()
				}
			}
		}
	}()
	for i, seed := range list {
		if time.Now().After(m.until) {
			break
		}
		m.begun = i + 1
		m.sow(seed)
		m.step(modelDeeds())
		if i%10 == 9 {
			m.checkVolumes()
			if len(m.snaps) > 0 {
				m.checkSnap(m.snaps[m.rng.IntN(len(m.snaps))])
			}
		}
	}
	m.checkVolumes()
	for len(m.snaps) > 0 {
		m.checkSnap(m.snaps[0])
		m.unsnap(m.snaps[0])
	}
	m.checkVolumes()
	for len(m.volumes) > 0 {
		m.remove(m.volumes[0])
	}
	// The space returns in the background; a layer whose deletion a kill cut short waits for the hourly garbage
	// collection.
	var left []string
	volumes := func(name string) bool { return strings.HasPrefix(name, "replicas/") }
	if !comes(func() bool { left = m.w.onDisk(); return !slices.ContainsFunc(left, volumes) }) {
		m.w.fatal("everything was deleted, and there are %v", left)
	}
}

// sow makes all random choices follow from a seed.
func (m *model) sow(seed uint64) {
	key := [32]byte{}
	copy(key[:], fmt.Sprint(seed))
	m.rng, m.bytes = rand.New(rand.NewPCG(seed, 0)), rand.NewChaCha8(key)
}

type modelDeed struct {
	often int
	do    func(*model)
}

// modelDeeds lists the steps, kills included.
func modelDeeds() []modelDeed {
	return append(modelCalm(),
		modelDeed{5, (*model).killData},
		modelDeed{2, (*model).killServe},
		modelDeed{1, (*model).restartServe})
}

func modelCalm() []modelDeed {
	return []modelDeed{
		{4, (*model).create},
		{14, func(m *model) { m.some(true, func(v *modelled) { m.write(v)() }) }},
		{4, func(m *model) { m.some(true, m.discard) }},
		{4, func(m *model) { m.some(true, m.zero) }},
		{3, func(m *model) { m.some(true, m.flush) }},
		{4, func(m *model) { m.some(false, m.snapshot) }},
		{3, func(m *model) { m.some(true, m.snapshotBusy) }},
		{4, func(m *model) { m.some(false, m.clone) }},
		{4, (*model).restore},
		{3, func(m *model) { m.someSnap(m.unsnap) }},
		{2, func(m *model) { m.some(false, m.remove) }},
		{3, func(m *model) { m.someSnap(m.revert) }},
		{2, func(m *model) { m.some(false, m.grow) }},
		{4, func(m *model) { m.some(false, m.turn) }},
		{1, func(m *model) { m.some(false, m.scrub) }},
	}
}

func (m *model) step(deeds []modelDeed) {
	sum := 0
	for _, d := range deeds {
		sum += d.often
	}
	n := m.rng.IntN(sum)
	for _, d := range deeds {
		if n -= d.often; n < 0 {
			d.do(m)
			return
		}
	}
}

// say records a step before its start.
func (m *model) say(format string, args ...any) {
	m.steps = append(m.steps, fmt.Sprintf("%3d %s ", len(m.steps), time.Now().Format("15:04:05.000"))+
		fmt.Sprintf(format, args...))
}

// again repeats a call as a caller does, until the call succeeds. All calls are idempotent.
func (m *model) again(call func() error) {
	m.t.Helper()
	var err error
	done := comes(func() bool {
		if err = call(); err == nil {
			return true
		}
		revived := m.revive(false)
		m.say("  that failed, again: %v", err)
		switch status.Code(err) {
		case codes.Unavailable, codes.Aborted, codes.DeadlineExceeded:
		default:
			if !revived {
				m.w.fatal("%v", err)
			}
		}
		return false
	})
	if !done {
		m.w.fatal("%v", err)
	}
}

func (m *model) command(args ...string) {
	m.t.Helper()
	m.again(func() error {
		if out, code := m.w.command(args...); code != 0 {
			return fmt.Errorf("drover %v: exit code %d: %s", args, code, out)
		}
		return nil
	})
}

func (m *model) name() string {
	m.named++
	return fmt.Sprintf("%s-%d", m.prefix, m.named)
}

// some does a step with one of the volumes, attached if need be.
func (m *model) some(attached bool, do func(*modelled)) {
	if len(m.volumes) == 0 {
		m.create()
	}
	v := m.volumes[m.rng.IntN(len(m.volumes))]
	if attached {
		m.up(v)
	}
	do(v)
}

func (m *model) someSnap(do func(*kept)) {
	if len(m.snaps) > 0 {
		do(m.snaps[m.rng.IntN(len(m.snaps))])
	}
}

func (m *model) find(id string) *modelled {
	for _, v := range m.volumes {
		if v.id == id {
			return v
		}
	}
	return nil
}

func (m *model) create() {
	if len(m.volumes) >= modelVolumes-1 {
		return
	}
	name, size := m.name(), m.larger(modelSmall-4*mib)
	m.say("create %s of %d", name, size)
	v := &modelled{image: make([]byte, size)}
	m.again(func() (err error) { v.pod, err = m.w.create(name, size, blockCap()); return err })
	m.volumes = append(m.volumes, v)
}

// larger is a random size above size.
func (m *model) larger(size int64) int64 {
	return size + int64(1+m.rng.IntN(int((modelLarge-size)/(4*mib))))*4*mib
}

func (m *model) up(v *modelled) {
	if v.dev != nil {
		return
	}
	m.say("attach %s", v.id)
	m.again(v.pod.up)
	var err error
	v.dev, err = os.OpenFile(v.target, os.O_RDWR|syscall.O_DIRECT, 0)
	must(m.t, err)
}

func (m *model) down(v *modelled) {
	if v.dev == nil {
		return
	}
	m.say("detach %s", v.id)
	must(m.t, v.dev.Close())
	v.dev = nil
	m.again(v.pod.down)
}

func (m *model) turn(v *modelled) {
	if v.dev == nil {
		m.up(v)
	} else {
		m.down(v)
	}
}

func (m *model) remove(v *modelled) {
	m.down(v)
	m.say("delete volume %s", v.id)
	m.again(v.pod.remove)
	m.volumes = slices.DeleteFunc(m.volumes, func(o *modelled) bool { return o == v })
}

func (m *model) grow(v *modelled) {
	if int64(len(v.image)) >= modelLarge {
		return
	}
	size := m.larger(int64(len(v.image)))
	m.say("expand %s to %d, attached: %t", v.id, size, v.dev != nil)
	m.again(func() error { return v.expand(size) })
	if v.dev != nil {
		m.again(func() error { return v.expandNode(size) })
	}
	v.image = resized(v.image, size)
}

// resized is a copy of an image, extended with zeros.
func resized(image []byte, size int64) []byte {
	out := make([]byte, size)
	copy(out, image)
	return out
}

func (m *model) snapshot(v *modelled) {
	if len(m.snaps) >= modelSnaps {
		return
	}
	s := &kept{name: m.name(), volume: v.id, image: slices.Clone(v.image)}
	m.say("snapshot %s of %s", s.name, v.id)
	m.again(func() (err error) { s.id, err = m.w.snap(v.id, s.name); return err })
	m.snaps = append(m.snaps, s)
}

// snapshotBusy takes a snapshot under writes. Each sector of the snapshot has the bytes from before the write or the
// new bytes, for ever.
func (m *model) snapshotBusy(v *modelled) {
	if len(m.snaps) >= modelSnaps {
		return
	}
	before := slices.Clone(v.image)
	wait := m.write(v)
	m.snapshot(v)
	wait()
	s := m.snaps[len(m.snaps)-1]
	s.image, s.either = before, s.image
	m.checkSnap(s)
}

func (m *model) unsnap(s *kept) {
	m.say("delete snapshot %s of %s", s.name, s.volume)
	tried := false
	m.again(func() error {
		out, code := m.w.command("snapshot", "delete", s.name)
		if code == 0 || tried && code == 3 { // not found: deleted, and serve killed before the answer
			return nil
		}
		tried = true
		return fmt.Errorf("exit code %d: %s", code, out)
	})
	m.snaps = slices.DeleteFunc(m.snaps, func(o *kept) bool { return o == s })
}

func (m *model) clone(v *modelled) { m.from(v.id, v.image) }
func (m *model) restore()          { m.someSnap(func(s *kept) { m.from(s.id, s.image) }) }
func (m *model) scrub(v *modelled) { m.say("scrub %s", v.id); m.command("volume", "scrub", v.id) }
func (m *model) flush(v *modelled) { m.say("flush %s", v.id); m.io(v, "flush", v.dev.Sync)() }

// from creates a volume from a volume or a snapshot, as large or larger, linked or copied.
func (m *model) from(source string, image []byte) {
	if len(m.volumes) >= modelVolumes-1 {
		return
	}
	name, size, mode := m.name(), int64(len(image)), "linked-clone"
	if m.rng.IntN(4) == 0 && size < modelLarge {
		size = m.larger(size)
	}
	if m.rng.IntN(4) == 0 {
		mode = "full-copy"
	}
	m.say("clone %s, %s, of %d from %s", name, mode, size, source)
	v := &modelled{image: resized(image, size)}
	m.again(func() (err error) {
		v.pod, err = m.w.from(source, name, size, blockCap(), "cloneMode", mode)
		return err
	})
	m.volumes = append(m.volumes, v)
}

func (m *model) revert(s *kept) {
	v := m.find(s.volume)
	if v == nil {
		return
	}
	m.down(v)
	m.say("revert %s to %s", v.id, s.name)
	m.command("snapshot", "revert", s.name)
	v.image = resized(s.image, int64(len(v.image)))
}
