package sanity_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/block/suite"
)

// memoryGroup makes a cgroup whose processes, page cache included, share limit bytes. The returned function starts a
// command in the cgroup.
func memoryGroup(t *testing.T, limit int64) func(*exec.Cmd) error {
	name := fmt.Sprintf("drover-test-%d", os.Getpid())
	dir, file := filepath.Join("/sys/fs/cgroup/memory", name), "memory.limit_in_bytes" // version 1
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		dir, file = filepath.Join("/sys/fs/cgroup", name), "memory.max"
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("no memory cgroup can be made here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Rmdir(dir); err != nil {
			t.Errorf("cgroup %s: %v", dir, err)
		}
	})
	if err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.FormatInt(limit, 10)), 0o644); err != nil {
		t.Skipf("memory cannot be limited here: %v", err)
	}
	return func(cmd *exec.Cmd) error {
		// A shell joins the cgroup and becomes the command, so nothing runs outside.
		cmd.Args = append([]string{"sh", "-c", `echo $$ > "$0" && exec "$@"`, filepath.Join(dir, "cgroup.procs")}, cmd.Args...)
		sh, err := exec.LookPath("sh")
		if err != nil {
			return err
		}
		cmd.Path = sh
		return cmd.Start()
	}
}

// ownMemory: the data process has buffers before any I/O, locked, and shared by all volumes. If root has the right,
// the kernel kills the data process last for memory, and reclaims no memory for a thread of the data process through
// Drover's own devices.
func ownMemory(t *testing.T, w *world) {
	locked := func() int64 {
		t.Helper()
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.child("data")))
		must(t, err)
		var kib int64
		_, after, _ := strings.Cut(string(b), "VmLck:")
		_, err = fmt.Sscan(after, &kib)
		must(t, err)
		return kib << 10
	}
	first, err := w.create("own-0", 64*mib, blockCap())
	must(t, err)
	must(t, first.up())
	pods, one := []*pod{first}, locked()
	if one < 4*mib {
		t.Errorf("with a volume attached %d bytes are locked", one)
	}
	for i := range 7 {
		p, err := w.create(fmt.Sprintf("own-%d", i+1), 64*mib, blockCap())
		must(t, err)
		must(t, p.up())
		pods = append(pods, p)
	}
	if !comes(func() bool { return locked() < one+7*2*mib }) { // a burst returns memory a little later
		t.Errorf("eight volumes have %d bytes locked, one has %d: they do not share their buffers", locked(), one)
	}
	if err := unix.Prctl(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0); err != nil {
		t.Logf("CAP_SYS_RESOURCE is withheld here (%v): priorities of memory are not looked at", err)
	} else {
		const flusher = 0x00080000 | 0x00100000 // PF_MEMALLOC_NOIO, PF_LOCAL_THROTTLE
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", w.child("data")))
		must(t, err)
		for _, name := range threads {
			b, err := os.ReadFile(name)
			if err != nil {
				continue // the thread has ended
			}
			_, rest, _ := strings.Cut(string(b), ") ")
			flags, err := strconv.ParseUint(strings.Fields(rest)[6], 10, 64)
			must(t, err)
			if flags&flusher != flusher {
				t.Errorf("%s: a thread of the data process is no I/O flusher: %#x", name, flags)
			}
		}
		adj, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", w.child("data")))
		must(t, err)
		if strings.TrimSpace(string(adj)) != "-999" {
			t.Errorf("the data process is killed for memory at %s", adj)
		}
	}
	for _, p := range pods {
		do(t, p.down, p.remove)
	}
}

// scarceMemory writes through the page cache with hardly any memory: each further page has to wait until other pages
// were written to the volume. Nothing may stand still, and the volume must have every byte.
func scarceMemory(t *testing.T, w *world) {
	fio, err := exec.LookPath("fio")
	if err != nil {
		t.Skip("no fio here")
	}
	seconds := suite.Count(t, "DROVER_SECONDS", 4, 60)
	start := memoryGroup(t, 24*mib)
	p, err := w.create("scarce", 1024*mib, mountCap("ext4"))
	must(t, err)
	must(t, p.up())
	var st syscall.Stat_t
	must(t, syscall.Stat(p.target, &st))
	link, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", st.Dev>>8&0xfff, st.Dev&0xff|st.Dev>>12&^uint64(0xff)))
	must(t, err)
	disk := filepath.Base(link)

	cmd := exec.Command(fio, "--name=load", "--directory="+p.target, "--size=512m", "--rw=randwrite", "--bs=64k",
		"--ioengine=psync", "--direct=0", "--verify=crc32c", "--verify_backlog=512", "--verify_fatal=1", "--time_based",
		"--runtime="+strconv.Itoa(seconds), "--randrepeat=0", "--output-format=terse", "--terse-version=3")
	cmd.Dir = t.TempDir()
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	must(t, start(cmd))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	before, since := completed(t, disk), time.Now()
	for first, running := before, true; running; {
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("fio: %v\n%s", err, out.String())
			}
			t.Logf("%d requests in %d s of writing and the check of it", completed(t, disk)-first, seconds)
			running = false
		case <-tick.C:
			if n := completed(t, disk); n != before {
				before, since = n, time.Now()
			} else if time.Since(since) > settle {
				_ = cmd.Process.Kill()
				w.fatal("no I/O for %v", settle)
			}
		}
	}
	do(t, p.down, p.remove)
}
