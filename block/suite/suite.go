// Package suite says how much of the tests a run wants: the quick, pure ones (`go test -short`), all that are
// deterministic (the default), or all (DROVER_TEST=all): random seeds, long models, many kills. It is for tests alone.
package suite

import (
	"flag"
	"iter"
	"os"
	"strconv"
	"testing"
	"time"
)

// All reports whether the run takes seeds from the clock and has time: DROVER_TEST=all, as `make test-all` sets it.
func All() bool { return os.Getenv("DROVER_TEST") == "all" }

// System skips a test that needs root, devices, mounts or processes where the run is quick or has no root.
func System(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("not among the quick tests: it uses devices, mounts or processes")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: it uses devices, mounts or processes")
	}
}

// Slow skips a test that is pure, but takes seconds, where the run is quick.
func Slow(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("not among the quick tests: it takes seconds")
	}
}

// Long skips a test that is a matter of luck, or takes the processors for long, unless the run wants all.
func Long(t testing.TB) {
	t.Helper()
	if !All() {
		t.Skip("only where DROVER_TEST=all: it is a matter of luck, or takes the processors for long")
	}
}

// SystemMain ends the test process of a package whose tests need a server, where the run is quick. `make quick` does
// not even build such a package: to link an API server takes ten seconds.
func SystemMain() {
	flag.Parse()
	if testing.Short() {
		_, _ = os.Stdout.WriteString("not among the quick tests: they need a server\n")
		os.Exit(0)
	}
}

// Seed is DROVER_SEED if that is set. Otherwise it is always the same, so that a failure is not a matter of luck, but
// where the run wants all: there it comes from the clock.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := uint64(1)
	if text := os.Getenv("DROVER_SEED"); text != "" {
		seed = number(t, "DROVER_SEED", text)
	} else if All() {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("DROVER_SEED=%d", seed)
	return seed
}

// Seeds are n seeds from Seed on, or DROVER_SEED alone.
func Seeds(t testing.TB, n int) iter.Seq[uint64] {
	t.Helper()
	first := Seed(t)
	if os.Getenv("DROVER_SEED") != "" {
		n = 1
	}
	return func(yield func(uint64) bool) {
		for i := range uint64(n) {
			if !yield(first + i) {
				return
			}
		}
	}
}

// Count is how often a test does something: as the variable says; otherwise many times where the run wants all, a few
// times where not, and a tenth of that where the run is quick.
func Count(t testing.TB, variable string, few, many int) int {
	t.Helper()
	if text := os.Getenv(variable); text != "" {
		return int(number(t, variable, text))
	}
	if All() {
		return many
	}
	if testing.Short() {
		return (few + 9) / 10
	}
	return few
}

// Duration is how long a test repeats itself: as the variable says (`3h`); otherwise for long where the run wants all.
// It is 0 where not: the test then does a fixed number of repetitions, however fast the machine is.
func Duration(t testing.TB, variable string, long time.Duration) time.Duration {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" && All() {
		return long
	}
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return d
}

func number(t testing.TB, variable, text string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}
