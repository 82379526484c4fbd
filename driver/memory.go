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

// Times of settle: between two looks, and how long a process may compute between them and still count as idle.
const (
	settleEvery = 15 * time.Second
	settleIdle  = settleEvery / 50
)

// settle gives memory back when starting is over, and after every burst of work, until ctx ends.
func settle(ctx context.Context) error {
	trim()
	tick := time.NewTicker(settleEvery)
	defer tick.Stop()
	for busy, last := true, cpuTime(); ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		now := cpuTime()
		idle := now-last < settleIdle
		if idle && busy {
			trim()
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

// trim gives back what starting up has touched and idling does not need: free heap, and the clean pages of the program
// itself, which the kernel brings back from its cache when they are wanted.
func trim() {
	debug.FreeOSMemory()
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
		if len(f) < 6 || f[5] != exe || strings.Contains(f[1], "w") {
			continue
		}
		from, to, ok := strings.Cut(f[0], "-")
		lo, err1 := strconv.ParseUint(from, 16, 64)
		hi, err2 := strconv.ParseUint(to, 16, 64)
		if ok && err1 == nil && err2 == nil && lo < hi {
			// Only clean, file-backed pages: dropping them loses nothing.
			_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(lo), uintptr(hi-lo), unix.MADV_DONTNEED)
		}
	}
}
