package driver

import (
	"bufio"
	"context"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Times of settle: between two looks, and how long a process may compute between them and still count as
// idle; and after how many looks an idle process's heap is collected: a little before the runtime would, which keeps
// what it frees.
const (
	settleEvery = 10 * time.Second
	settleIdle  = settleEvery / 40
	settleHeap  = 10
)

// settle gives back what idling does not need, until ctx ends: free heap when starting is over, after every burst
// of work and now and then, and at every look at an idle process the pages of the program itself, which costs next to
// nothing.
func settle(ctx context.Context) error {
	debug.FreeOSMemory()
	dropProgram()
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for busy, last, looks := true, cpuTime(), 0; ; looks++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		now := cpuTime()
		idle := now-last < settleIdle
		if idle && (busy || looks >= settleHeap) {
			debug.FreeOSMemory()
			looks = 0
		}
		if idle {
			dropProgram()
			now = cpuTime()
		}
		busy, last = !idle, now
	}
}

// cpuTime is what this process has computed so far.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// dropProgram gives back the clean pages of the program itself, which the kernel brings back from its cache when they
// are wanted.
func dropProgram() {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return
	}
	defer maps.Close()
	for sc := bufio.NewScanner(maps); sc.Scan(); {
		f := strings.Fields(sc.Text())
		if len(f) < 6 || strings.Join(f[5:], " ") != exe || strings.Contains(f[1], "w") {
			continue
		}
		from, to, ok := strings.Cut(f[0], "-")
		lo, err1 := strconv.ParseUint(from, 16, 64)
		hi, err2 := strconv.ParseUint(to, 16, 64)
		if ok && err1 == nil && err2 == nil && lo < hi {
			// Only clean, file-backed pages: dropping them loses nothing. From Linux 6.18 on one touch brings 2 MiB back,
			// where the kernel's cache has the program in pieces of that size, unless told otherwise.
			for _, advice := range []uintptr{unix.MADV_NOHUGEPAGE, unix.MADV_DONTNEED} {
				_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(lo), uintptr(hi-lo), advice)
			}
		}
	}
}
