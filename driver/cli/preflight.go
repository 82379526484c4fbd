package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// finding is the answer to a question about this machine.
type finding struct {
	Check  string `json:"check"`
	Result string `json:"result"` // ok, warning or failed
	Detail string `json:"detail,omitempty"`
	Advice string `json:"advice,omitempty"`
}

// Results of a finding.
const (
	fine    = "ok"
	warning = "warning"
	failed  = "failed"
)

func (a *app) preflightCommand() *cobra.Command {
	var disks []string
	c := &cobra.Command{
		Use:   "preflight",
		Short: "Check whether this machine can run Drover, and name the remedies",
		Long: "Looks at the kernel, FUSE, loop devices, io_uring, tools, limits and disks " +
			"of this machine; changes nothing.\n" +
			"Exit code 0: nothing is missing; 1: something is missing. Warnings do not count.",
		Args: checkArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.checkOutput(); err != nil {
				return err
			}
			all := runChecks(disks)
			bad := 0
			for _, f := range all {
				if f.Result == failed {
					bad++
				}
			}
			if err := a.printFindings(cmd, all); err != nil {
				return err
			}
			if bad > 0 {
				return api.Errorf(api.Other, "preflight: %d of %d checks failed", bad, len(all))
			}
			return nil
		},
	}
	c.Flags().StringSliceVar(&disks, "disk", []string{DefaultStateDir}, "folder that shall become a disk")
	return c
}

func (a *app) printFindings(cmd *cobra.Command, all []finding) error {
	w := cmd.OutOrStdout()
	switch a.output {
	case "json", "yaml":
		return a.encodeValue(w, all)
	case "name":
		for _, f := range all {
			if f.Result == failed {
				fmt.Fprintln(w, f.Check)
			}
		}
		return nil
	}
	rows := make([][]string, 0, len(all))
	for _, f := range all {
		rows = append(rows, []string{f.Check, f.Result, f.Detail})
	}
	if err := printTable(w, "CHECK RESULT DETAIL", rows); err != nil {
		return err
	}
	for _, f := range all {
		if f.Advice != "" {
			fmt.Fprintf(w, "\n%s: %s\n", f.Check, f.Advice)
		}
	}
	return nil
}

// runChecks asks all questions. The questions are independent.
func runChecks(disks []string) []finding {
	all := []finding{checkRoot(), checkKernel(), checkFUSE(), checkFUSETimeout(), checkLoop(), checkIOURing(),
		checkHungTask(), checkResource(), checkFiles()}
	for _, t := range []struct{ tool, pkg, need string }{
		{"mount", "mount", failed}, {"blkid", "util-linux", failed},
		{"mkfs.ext4", "e2fsprogs", failed}, {"resize2fs", "e2fsprogs", failed},
		{"mkfs.xfs", "xfsprogs", warning}, {"xfs_growfs", "xfsprogs", warning}, {"mkfs.btrfs", "btrfs-progs", warning},
		{"qemu-img", "qemu-utils", ""},
	} {
		all = append(all, checkTool(t.tool, t.pkg, t.need))
	}
	for _, d := range disks {
		all = append(all, checkDisk(d))
	}
	return all
}

func checkRoot() finding {
	if os.Geteuid() == 0 {
		return finding{"root", fine, "runs as root", ""}
	}
	return finding{"root", failed, "runs as uid " + strconv.Itoa(os.Geteuid()),
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

func checkKernel() finding {
	release, major, minor := kernelRelease()
	at := func(a, b int) bool { return major > a || major == a && minor >= b }
	switch {
	case !at(5, 8):
		return finding{"kernel", failed, release, "Drover needs 5.8 or later (LOOP_CONFIGURE): upgrade the kernel"}
	case !at(6, 9):
		return finding{"kernel", warning, release, "before 6.9 FUSE cannot send requests again: if the data process is " +
			"killed, attached volumes fail and have to be attached again; from 6.9 on, I/O only pauses"}
	}
	return finding{"kernel", fine, release + ": volumes survive a kill -9 of the data process (FUSE RESEND)", ""}
}

func checkFUSE() finding {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return finding{"fuse", failed, errText(err),
			"load the module with `modprobe fuse`; in a container, give it /dev/fuse"}
	}
	f.Close()
	return finding{"fuse", fine, "/dev/fuse opens", ""}
}

// checkFUSETimeout warns of a kernel that aborts slow requests, because a pause would become an I/O error.
func checkFUSETimeout() finding {
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
		return finding{"fuse-timeout", warning, fmt.Sprintf("requests are given up after %d s", worst),
			"a volume that waits (disk full, data process restarting) would get I/O errors: " +
				"`sysctl fs.fuse.default_request_timeout=0 fs.fuse.max_request_timeout=0`"}
	}
	return finding{"fuse-timeout", fine, "requests wait as long as it takes", ""}
}

func checkLoop() finding {
	f, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return finding{"loop", failed, errText(err), "load the module with `modprobe loop`; in a container, give it " +
			"/dev/loop-control and the loop devices"}
	}
	f.Close()
	return finding{"loop", fine, "/dev/loop-control opens; devices are made as needed", ""}
}

func checkIOURing() finding {
	var params [120]byte // struct io_uring_params, all zero
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if errno == 0 {
		_ = unix.Close(int(fd))
		return finding{"io_uring", fine, "allowed", ""}
	}
	return finding{"io_uring", warning, errno.Error(), "volumes work, but slower (worker threads): allow it with " +
		"`sysctl kernel.io_uring_disabled=0`, or in the container's seccomp profile"}
}

func checkHungTask() finding {
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
		return finding{"hung-task", warning, fmt.Sprintf("the kernel panics when a task waits for %d s", secs),
			"a volume whose disk is full lets its writers wait, which would take the machine down: " +
				"`sysctl kernel.hung_task_panic=0`"}
	}
	return finding{"hung-task", fine, "waiting tasks do not make the kernel panic", ""}
}

// checkResource checks CAP_SYS_RESOURCE by an operation that requires the capability.
func checkResource() finding {
	if err := unix.Prctl(unix.PR_GET_IO_FLUSHER, 0, 0, 0, 0); err != nil {
		return finding{"io-flusher", warning, "the data process cannot be marked as one that serves I/O: " + err.Error(),
			"keep memory free for it, and set no memory limit that it shares with writers to its volumes; a mounted ext4 " +
				"does not grow: both take CAP_SYS_RESOURCE, which a VM or container may withhold from root"}
	}
	return finding{"io-flusher", fine, "the process has CAP_SYS_RESOURCE", ""}
}

func checkFiles() finding {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return finding{"open-files", warning, errText(err), ""}
	}
	if lim.Max < 8192 {
		return finding{"open-files", warning, fmt.Sprintf("at most %d", lim.Max),
			"a hundred attached volumes want some thousand: LimitNOFILE=65536 in the unit, or `ulimit -n 65536`"}
	}
	return finding{"open-files", fine, fmt.Sprintf("at most %d", lim.Max), ""}
}

// checkTool looks for a program. need is the result for a missing program; "": Drover does not need the program.
func checkTool(tool, pkg, need string) finding {
	path, err := exec.LookPath(tool)
	if err == nil {
		return finding{tool, fine, path, ""}
	}
	switch need {
	case failed:
		return finding{tool, failed, "not found", "install the package " + pkg}
	case warning:
		return finding{tool, warning, "not found", "only for volumes with that filesystem: install the package " + pkg}
	}
	return finding{tool, fine, "not found; Drover itself does not need it (package " + pkg + ")", ""}
}

// checkDisk inspects the file system below a folder without a write.
func checkDisk(path string) finding {
	check := "disk " + path
	dir := path
	for {
		if _, err := os.Stat(dir); err == nil {
			break
		} else if !errors.Is(err, os.ErrNotExist) || dir == filepath.Dir(dir) {
			return finding{check, failed, errText(err), "choose another folder"}
		}
		dir = filepath.Dir(dir)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return finding{check, failed, errText(err), "choose another folder"}
	}
	free := api.SizeText(int64(st.Bavail) * st.Bsize)
	names := map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs",
		unix.TMPFS_MAGIC: "tmpfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs", unix.NFS_SUPER_MAGIC: "nfs"}
	name := names[st.Type]
	switch name {
	case "ext4", "xfs":
		return finding{check, fine, name + ", " + free + " free", ""}
	case "":
		name = fmt.Sprintf("file system type %#x", st.Type)
	}
	return finding{check, warning, name + ", " + free + " free",
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
