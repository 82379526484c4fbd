package stack

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"drover.io/drover/block/suite"
)

// The model test runs random programs of all operations on the replicas of a disk, with kills and power losses at any
// moment, against models of every byte. The test shortens a failing program and writes the program to testdata/model,
// for replays for ever.

// modelPrograms is the number of programs to run if no time is set.
const modelPrograms = 60

// A deed is a step of a program. The meaning of the numbers depends on the state of the disk, so that a program makes
// sense without some of the deeds, too.
type deed struct {
	Do      string `json:"do"`
	A, B, C uint64 `json:",omitempty"`
}

// program makes the program of a seed.
func program(seed uint64) []deed {
	rng := rand.New(rand.NewPCG(seed, 0))
	var all []string
	for name, weight := range deeds {
		for range weight.often {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	list := make([]deed, 30+rng.IntN(170))
	for i := range list {
		list[i] = deed{all[rng.IntN(len(all))], rng.Uint64(), rng.Uint64(), rng.Uint64()}
	}
	return list
}

// execute carries out a program on a new disk. The error is a difference from the model.
func execute(list []deed, on *modelLoop) (err error) {
	dir, err := os.MkdirTemp("", "drover-model-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	w, err := newModel(on, dir)
	if err != nil {
		return err
	}
	defer func() { w.abandon() }()
	for i, d := range list {
		if err := w.step(d); err != nil {
			return fmt.Errorf("step %d, %s: %w", i, d.Do, err)
		}
	}
	return w.finale()
}

// shrink leaves out the deeds which a failing program does not need.
func shrink(list []deed, fails func([]deed) error, until time.Time) []deed {
	for size := len(list) / 2; size > 0; size /= 2 {
		for at := 0; at < len(list); {
			if time.Now().After(until) {
				return list
			}
			less := slices.Delete(slices.Clone(list), at, min(at+size, len(list)))
			if fails(less) != nil {
				list = less
			} else {
				at += size
			}
		}
	}
	return list
}

// TestModelOfDisk runs a few programs, or programs of new seeds for the time in DROVER_MODEL (`3h`). DROVER_SEED runs
// the program of a single seed.
func TestModelOfDisk(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	seeds := make(chan uint64)
	var programs, steps atomic.Int64
	var once sync.Once
	failed := make(chan struct{})
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		on := &modelLoop{startLoop(t)}
		wg.Go(func() {
			for seed := range seeds {
				list := program(seed)
				err := execute(list, on)
				programs.Add(1)
				steps.Add(int64(len(list)))
				if err == nil {
					continue
				}
				once.Do(func() {
					close(failed)
					t.Errorf("seed %d: %v", seed, err)
					short := shrink(list, func(l []deed) error { return execute(l, on) }, time.Now().Add(time.Minute))
					text, _ := json.MarshalIndent(short, "", " ")
					name := filepath.Join("testdata", "model", fmt.Sprintf("%d.json", seed))
					if werr := os.WriteFile(name, append(text, '\n'), 0o600); werr != nil {
						t.Error(werr)
					}
					t.Errorf("%s: %d steps: %v\n%s", name, len(short), execute(short, on), text)
				})
			}
		})
	}
	n, end := modelPrograms, make(<-chan time.Time)
	if d := suite.Duration(t, "DROVER_MODEL", 10*time.Minute); d > 0 {
		n, end = math.MaxInt, time.After(d)
	}
feed:
	for seed := range suite.Seeds(t, n) {
		select {
		case seeds <- seed:
		case <-failed:
			break feed
		case <-end:
			break feed
		}
	}
	close(seeds)
	wg.Wait()
	t.Logf("%d programs, %d steps", programs.Load(), steps.Load())
}

// TestModelReplays runs the programs which once failed.
func TestModelReplays(t *testing.T) {
	suite.Slow(t)
	t.Parallel()
	names, err := filepath.Glob("testdata/model/*.json")
	if err != nil {
		t.Fatal(err)
	}
	on := &modelLoop{startLoop(t)}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var list []deed
		if err := json.Unmarshal(text, &list); err != nil {
			t.Fatal(name, err)
		}
		if err := execute(list, on); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
