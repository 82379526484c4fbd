// Package preflight checks whether this machine can run Drover. The checks change nothing and are independent of each
// other. The package starts no goroutines.
package preflight

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// Finding is the answer to a question about this machine.
type Finding struct {
	Check  string `json:"check"`
	Result string `json:"result"` // ok, Warning or Failed
	Detail string `json:"detail,omitempty"`
	Advice string `json:"advice,omitempty"`
}

// Results of a finding.
const (
	OK      = "ok"
	Warning = "warning"
	Failed  = "failed"
)

// Run asks all questions. The questions are independent.
func Run(disks []string) []Finding {
	all := []Finding{checkRoot(), checkKernel(), checkFUSE(), checkFUSETimeout(), checkLoop(), checkIOURing(),
		checkHungTask(), checkResource(), checkFiles()}
	for _, t := range []struct{ tool, pkg, need string }{
		{"mount", "mount", Failed}, {"blkid", "util-linux", Failed},
		{"mkfs.ext4", "e2fsprogs", Failed}, {"resize2fs", "e2fsprogs", Failed},
		{"mkfs.xfs", "xfsprogs", Warning}, {"xfs_growfs", "xfsprogs", Warning}, {"mkfs.btrfs", "btrfs-progs", Warning},
		{"qemu-img", "qemu-utils", ""},
	} {
		all = append(all, checkTool(t.tool, t.pkg, t.need))
	}
	for _, d := range disks {
		all = append(all, checkDisk(d))
	}
	return all
}

func checkRoot() Finding {
	if os.Geteuid() == 0 {
		return Finding{"root", OK, "runs as root", ""}
	}
	return Finding{"root", Failed, "runs as uid " + strconv.Itoa(os.Geteuid()),
		"devices and mounts need root: run this, and `drover serve`, with sudo"}
}

// kernelRelease returns the running kernel's release and its first two numbers.
func kernelRelease() (release string, major, minor int) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown", 0, 0
	}
	release = unix.ByteSliceToString(u.Release[:])
	_, err := fmt.Sscanf(release, "%d.%d", &major, &minor)
	if err != nil {
		return release, 0, 0
	}
	return release, major, minor
}

func checkKernel() Finding {
	release, major, minor := kernelRelease()
	at := func(a, b int) bool { return major > a || major == a && minor >= b }
	switch {
	case !at(5, 8):
		return Finding{"kernel", Failed, release, "Drover needs 5.8 or later (LOOP_CONFIGURE): upgrade the kernel"}
	case !at(6, 9):
		return Finding{"kernel", Warning, release, "before 6.9 FUSE cannot send requests again: if the data process is " +
			"killed, attached volumes fail and have to be attached again; from 6.9 on, I/O only pauses"}
	}
	return Finding{"kernel", OK, release + ": volumes survive a kill -9 of the data process (FUSE RESEND)", ""}
}

func checkFUSE() Finding {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return Finding{"fuse", Failed, errText(err),
			"load the module with `modprobe fuse`; in a container, give it /dev/fuse"}
	}
	f.Close()
	return Finding{"fuse", OK, "/dev/fuse opens", ""}
}

// checkFUSETimeout warns of a kernel that aborts slow requests, because a pause would become an I/O error.
func checkFUSETimeout() Finding {
	worst := 0
	for _, name := range []string{"default_request_timeout", "max_request_timeout"} {
		raw, err := os.ReadFile("/proc/sys/fs/fuse/" + name)
		if err != nil {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(string(raw))); err == nil && n > worst {
			worst = n
		}
	}
	if worst > 0 {
		return Finding{"fuse-timeout", Warning, fmt.Sprintf("requests are given up after %d s", worst),
			"a volume that waits (disk full, data process restarting) would get I/O errors: " +
				"`sysctl fs.fuse.default_request_timeout=0 fs.fuse.max_request_timeout=0`"}
	}
	return Finding{"fuse-timeout", OK, "requests wait as long as it takes", ""}
}

func checkLoop() Finding {
	f, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return Finding{"loop", Failed, errText(err), "load the module with `modprobe loop`; in a container, give it " +
			"/dev/loop-control and the loop devices"}
	}
	f.Close()
	return Finding{"loop", OK, "/dev/loop-control opens; devices are made as needed", ""}
}

func checkIOURing() Finding {
	var params [120]byte // struct io_uring_params, all zero
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno == 0 {
		_ = unix.Close(int(fd))
		return Finding{"io_uring", OK, "allowed", ""}
	}
	return Finding{"io_uring", Warning, errno.Error(), "volumes work, but slower (worker threads): allow it with " +
		"`sysctl kernel.io_uring_disabled=0`, or in the container's seccomp profile"}
}

func checkHungTask() Finding {
	read := func(name string) int {
		raw, err := os.ReadFile("/proc/sys/kernel/" + name)
		if err != nil {
			return 0
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(raw)))
		if err != nil {
			return 0
		}
		return n
	}
	secs, panics := read("hung_task_timeout_secs"), read("hung_task_panic")
	if secs > 0 && panics > 0 {
		return Finding{"hung-task", Warning, fmt.Sprintf("the kernel panics when a task waits for %d s", secs),
			"a volume whose disk is full lets its writers wait, which would take the machine down: " +
				"`sysctl kernel.hung_task_panic=0`"}
	}
	return Finding{"hung-task", OK, "waiting tasks do not make the kernel panic", ""}
}

// checkResource checks CAP_SYS_RESOURCE by an operation that requires the capability.
func checkResource() Finding {
	if err := unix.Prctl(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0); err != nil {
		return Finding{"io-flusher", Warning, "the data process cannot be marked as one that serves I/O: " + err.Error(),
			"keep memory free for it, and set no memory limit that it shares with writers to its volumes; a mounted ext4 " +
				"does not grow: both take CAP_SYS_RESOURCE, which a VM or container may withhold from root"}
	}
	return Finding{"io-flusher", OK, "the process has CAP_SYS_RESOURCE", ""}
}

func checkFiles() Finding {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return Finding{"open-files", Warning, errText(err), ""}
	}
	if lim.Max < 8192 {
		return Finding{"open-files", Warning, fmt.Sprintf("at most %d", lim.Max),
			"a hundred attached volumes want some thousand: LimitNOFILE=65536 in the unit, or `ulimit -n 65536`"}
	}
	return Finding{"open-files", OK, fmt.Sprintf("at most %d", lim.Max), ""}
}

// checkTool looks for a program. need is the result for a missing program; "": Drover does not need the program.
func checkTool(tool, pkg, need string) Finding {
	path, err := exec.LookPath(tool)
	if err == nil {
		return Finding{tool, OK, path, ""}
	}
	switch need {
	case Failed:
		return Finding{tool, Failed, "not found", "install the package " + pkg}
	case Warning:
		return Finding{tool, Warning, "not found", "only for volumes with that filesystem: install the package " + pkg}
	}
	return Finding{tool, OK, "not found; Drover itself does not need it (package " + pkg + ")", ""}
}

// checkDisk inspects the file system below a folder without a write.
func checkDisk(path string) Finding {
	check := "disk " + path
	dir := path
	for {
		if _, err := os.Stat(dir); err == nil {
			break
		} else if !errors.Is(err, os.ErrNotExist) || dir == filepath.Dir(dir) {
			return Finding{check, Failed, errText(err), "choose another folder"}
		}
		dir = filepath.Dir(dir)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Finding{check, Failed, errText(err), "choose another folder"}
	}
	free := api.SizeText(int64(st.Bavail) * st.Bsize)
	names := map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs",
		unix.TMPFS_MAGIC: "tmpfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs", unix.NFS_SUPER_MAGIC: "nfs"}
	name := names[st.Type]
	switch name {
	case "ext4", "xfs":
		return Finding{check, OK, name + ", " + free + " free", ""}
	case "":
		name = fmt.Sprintf("file system type %#x", st.Type)
	}
	return Finding{check, Warning, name + ", " + free + " free",
		"ext4 and xfs are tested; `drover disk add` probes this file system, and refuses a file system that cannot keep " +
			"the promises of a disk"}
}

func errText(err error) string {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Path + ": " + pe.Err.Error()
	}
	return err.Error()
}
