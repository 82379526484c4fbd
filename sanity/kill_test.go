package sanity_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"drover.io/drover/block/suite"
)

// kills returns how often a test kills: a few times, or as DROVER_KILLS says.
func kills(t *testing.T, few int) int {
	t.Helper()
	return suite.Count(t, "DROVER_KILLS", few, 10*few)
}

// completed returns how many reads and writes a disk has carried.
func completed(t *testing.T, disk string) int64 {
	raw, err := os.ReadFile(filepath.Join("/sys/block", disk, "stat"))
	must(t, err)
	var reads, writes, skip int64
	_, err = fmt.Sscan(string(raw), &reads, &skip, &skip, &skip, &writes)
	must(t, err)
	return reads + writes
}

// killUnderFio kills the data process again and again under loads of fio that verify their writes: aligned and not,
// single and many at once, each load on a separate volume. fio must see no error and no difference.
func killUnderFio(t *testing.T, w *world) {
	if _, err := exec.LookPath("fio"); err != nil {
		t.Skip("no fio here")
	}
	loads := [][]string{
		{"--rw=randwrite", "--bs=4k", "--iodepth=32"},
		{"--rw=randrw", "--bsrange=512-64k", "--bs_unaligned=0", "--blockalign=512", "--iodepth=16"},
		{"--rw=write", "--bs=1m", "--iodepth=4"},
	}
	var pods []*pod
	var disks []string
	for i := range loads {
		p, err := w.create(fmt.Sprintf("fio-%d", i), 256*mib, blockCap())
		must(t, err)
		must(t, p.up())
		var st syscall.Stat_t
		must(t, syscall.Stat(p.target, &st))
		link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", st.Rdev>>8&0xfff, st.Rdev&0xff|st.Rdev>>12&^uint64(0xff)))
		must(t, err)
		pods, disks = append(pods, p), append(disks, filepath.Base(link))
	}
	dir := t.TempDir()
	type outcome struct {
		load int
		out  []byte
		err  error
	}
	ended := make(chan outcome, len(loads))
	stop := make([]*exec.Cmd, len(loads))
	for i, load := range loads {
		// Rounds of writing and reading back, until a signal: fio then ends after the I/O in progress.
		args := append([]string{"--name=load", "--filename=" + pods[i].target, "--size=64m", "--direct=1",
			"--ioengine=libaio", "--verify=crc32c", "--verify_backlog=512", "--verify_fatal=1", "--do_verify=1",
			"--time_based", "--runtime=100000", "--randrepeat=0", "--output-format=json", "--aux-path=" + dir}, load...)
		cmd := exec.Command("fio", args...)
		cmd.Dir = dir
		stop[i] = cmd
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		must(t, cmd.Start())
		go func() {
			err := cmd.Wait()
			ended <- outcome{i, []byte(out.String()), err}
		}()
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	// alive returns once every load has completed some more I/O.
	alive := func(more int64) (waited time.Duration) {
		began := time.Now()
		for i, disk := range disks {
			for from := completed(t, disk); completed(t, disk) < from+more; {
				select {
				case o := <-ended:
					t.Fatalf("load %d ended: %v\n%s", o.load, o.err, o.out)
				case <-tick.C:
				}
				if time.Since(began) > settle {
					w.fatal("no I/O on the volume of load %d for %v", i, settle)
				}
			}
		}
		return time.Since(began)
	}
	alive(50)
	var slowest time.Duration
	n := kills(t, 3)
	for range n {
		pid := w.kill("data")
		slowest = max(slowest, alive(2))
		for w.child("data") == pid || w.child("data") == 0 {
			alive(1)
		}
		alive(20)
	}
	for _, cmd := range stop {
		must(t, cmd.Process.Signal(syscall.SIGINT))
	}
	for range loads {
		o := <-ended
		start := max(strings.Index(string(o.out), "{"), 0)
		var report struct {
			Jobs []struct {
				Error       int
				Read, Write struct {
					IOs int64 `json:"total_ios"`
				}
			}
		}
		if err := json.Unmarshal(o.out[start:], &report); err != nil || len(report.Jobs) != 1 {
			t.Fatalf("load %d: %v: %v\n%s", o.load, o.err, err, o.out)
		}
		j := report.Jobs[0]
		if j.Error != 0 {
			t.Errorf("load %d: error %d\n%s", o.load, j.Error, o.out)
		}
		t.Logf("%s: %d writes, %d reads, error %d", strings.Join(loads[o.load], " "), j.Write.IOs, j.Read.IOs, j.Error)
	}
	t.Logf("%d kills, at most %v until I/O went on everywhere", n, slowest.Round(time.Millisecond))
	for _, p := range pods {
		do(t, p.down, p.remove)
	}
}
