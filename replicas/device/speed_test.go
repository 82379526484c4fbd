package device

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/suite"
	"drover.io/drover/block/uring"
	"drover.io/drover/replicas/device/loophelper"
)

// fio runs one job on a device or file and returns operations per second and the mean completion time in microseconds.
func fio(t *testing.T, path, rw, bs string, depth, seconds int) (iops, usec float64) {
	t.Helper()
	out, err := exec.Command("fio", "--name=j", "--filename="+path, "--rw="+rw, "--bs="+bs,
		"--iodepth="+strconv.Itoa(depth), "--runtime="+strconv.Itoa(seconds), "--time_based", "--ioengine=libaio",
		"--direct=1", "--norandommap", "--randrepeat=0", "--size=1g", "--output-format=json").Output()
	if err != nil {
		t.Fatalf("fio: %v", err)
	}
	type side struct {
		IOPS float64 `json:"iops"`
		Lat  struct {
			Mean float64 `json:"mean"`
		} `json:"lat_ns"`
	}
	var r struct {
		Jobs []struct{ Read, Write side }
	}
	if err := json.Unmarshal(out, &r); err != nil || len(r.Jobs) != 1 {
		t.Fatalf("fio: %v: %s", err, out)
	}
	s := r.Jobs[0].Read
	if s.IOPS == 0 {
		s = r.Jobs[0].Write
	}
	return s.IOPS, s.Lat.Mean / 1000
}

// TestSpeed compares, on the same file in the same run, the file itself, a loop device with direct I/O on the file, and
// a device. DROVER_SPEED sets the number of rounds; the table has medians. TestSpeed asserts nothing: machines differ.
func TestSpeed(t *testing.T) {
	rounds := suite.Count(t, "DROVER_SPEED", 0, 1)
	if rounds == 0 {
		t.Skip("set DROVER_SPEED to a number of rounds")
	}
	seconds := 1
	dir := runHolder(t)
	h, l := openHost(t, dir), runLoop(t)
	file := filepath.Join(t.TempDir(), "data")
	if out, err := exec.Command("fio", "--name=fill", "--filename="+file, "--rw=write", "--bs=1m", "--size=1g",
		"--direct=1", "--end_fsync=1").CombinedOutput(); err != nil {
		t.Fatalf("fio: %v: %s", err, out)
	}
	fd, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	n, err := loophelper.Configure(fd, file, false)
	_ = unix.Close(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer dropLoop(n, filepath.Base(file))
	be, err := openDisk(l, file, 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	defer be.close()
	d, err := h.Attach(t.Context(), Spec{Key: testKey("speed"), Name: testKey("speed"), Size: 1 << 30}, l, be)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Abort() }()
	fmt.Printf("%-14s %12s %12s %12s %9s %9s %9s %9s\n", "", "file", "loop", "device", "dev/loop", "loop us", "added us", "cpu us/op")
	for _, j := range []struct {
		name, rw, bs string
		depth        int
	}{
		{"randread-4k-1", "randread", "4k", 1}, {"randwrite-4k-1", "randwrite", "4k", 1},
		{"randread-4k-32", "randread", "4k", 32}, {"randwrite-4k-32", "randwrite", "4k", 32},
		{"read-1m", "read", "1m", 8}, {"write-1m", "write", "1m", 8},
	} {
		if only := os.Getenv("DROVER_SPEED_JOB"); only != "" && only != j.name {
			continue
		}
		var iops, usec [3][]float64
		var ratios, cpu []float64
		for range rounds {
			for i, path := range []string{file, loopPath(n), d.Path()} {
				before := cpuTime(l)
				x, y := fio(t, path, j.rw, j.bs, j.depth, seconds)
				iops[i], usec[i] = append(iops[i], x), append(usec[i], y)
				if i == 2 {
					cpu = append(cpu, (cpuTime(l)-before)/(x*float64(seconds)))
				}
			}
			ratios = append(ratios, iops[2][len(iops[2])-1]/iops[1][len(iops[1])-1])
		}
		fmt.Printf("%-14s %12.0f %12.0f %12.0f %9.2f %9.1f %9.1f %9.2f\n", j.name, median(iops[0]), median(iops[1]),
			median(iops[2]), median(ratios), median(usec[1]), median(usec[2])-median(usec[1]), median(cpu))
		slices.Sort(ratios)
		t.Logf("%s: ratios of device to loop: %.2f", j.name, ratios)
	}
}

// cpuTime is the CPU time of the loop's thread, in microseconds.
func cpuTime(l *uring.Loop) (us float64) {
	_ = l.Do(func() {
		var ru unix.Rusage
		if unix.Getrusage(unix.RUSAGE_THREAD, &ru) == nil {
			us = float64(ru.Utime.Nano()+ru.Stime.Nano()) / 1000
		}
	})
	return us
}

func median(v []float64) float64 {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[len(v)/2]
}
