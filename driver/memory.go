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

// releaseMemory checks every settleEvery. A process with less CPU time than settleIdle in between is idle. After
// settleHeap checks releaseMemory collects an idle heap: a little before the runtime would, because the runtime keeps
// the freed memory.
const (
	settleEvery = 10 * time.Second
	settleIdle  = settleEvery / 40
	settleHeap  = 10
)

// releaseMemory returns memory that an idle process does not need, until ctx ends. releaseMemory frees heap after the
// start, after each burst of work and from time to time. At each check of an idle process releaseMemory also drops the
// pages of the program, at nearly no cost.
func releaseMemory(ctx context.Context) error {
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

// cpuTime returns the CPU time of this process.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// dropProgram returns the clean pages of the program; the kernel reads the pages again from the page cache.
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
			// Only clean, file-backed pages: dropping loses nothing. From Linux 6.18 on one touch maps 2 MiB if the
			// page cache holds the program in folios of 2 MiB, unless MADV_NOHUGEPAGE forbids large mappings.
			for _, advice := range []uintptr{unix.MADV_NOHUGEPAGE, unix.MADV_DONTNEED} {
				_, _, _ = unix.Syscall(unix.SYS_MADVISE, uintptr(lo), uintptr(hi-lo), advice)
			}
		}
	}
}
