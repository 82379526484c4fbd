package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// initEnv marks this process as the init of a machine, and describes the machine.
const initEnv = "DROVER_CLUSTER_INIT"

// birth is the description of a machine for its init.
type birth struct {
	IP, Mask [4]byte
	Mounts   []diskMount
	Boot     string // file with the boot id of this run of the machine
}

// diskMount is a file system in a file.
type diskMount struct{ File, Dir string }

// Init turns this process into the init of a machine if PowerOn started the process; then Init never returns.
func Init() {
	text := os.Getenv(initEnv)
	if text == "" {
		return
	}
	var b birth
	err := json.Unmarshal([]byte(text), &b)
	if err == nil {
		err = b.live()
	}
	fmt.Fprintln(os.Stderr, "machine:", err)
	os.Exit(1)
}

// ownMounts gives this thread a mount table of its own, and machines copy the thread's table: the cluster copies the
// owner's table once, instead of at each start of a machine.
func ownMounts() error {
	err := unix.Unshare(unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = forsake()
	}
	if err != nil {
		return fmt.Errorf("a mount table of its own: %w", err)
	}
	return nil
}

// forsake unmounts the file systems on loop devices in the copied mount table. The file systems belong to other
// programs, and a copy keeps the devices in use. File systems below the owner's files stay.
func forsake() error {
	self, _ := os.Executable()
	here, _ := os.Getwd()
	own := []string{self, here, os.TempDir()}
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Source, "/dev/loop"), false
	})
	if err != nil {
		return err
	}
	for _, m := range mounts {
		below := func(p string) bool { return strings.HasPrefix(p+"/", strings.TrimRight(m.Mountpoint, "/")+"/") }
		if slices.ContainsFunc(own, below) {
			continue
		}
		err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH) // mount or folder may be gone by now
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("let go of %s: %w", m.Mountpoint, err)
		}
	}
	return nil
}

// live sets up the machine, passes the machine's network card to the owner (descriptor 3), and reaps orphans.
func (b *birth) live() error {
	// Mounts stay in the namespace; /proc shows this machine's processes; the machine has its own links of devices.
	err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	if err == nil {
		err = unix.Mount("proc", "/proc", "proc", 0, "")
	}
	if err == nil {
		err = unix.Mount("links", "/dev/drover", "tmpfs", 0, "size=1m")
	}
	if err == nil && b.Boot != "" { // machines share the kernel, but not the boot id
		err = unix.Mount(b.Boot, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, "")
	}
	if err != nil {
		return fmt.Errorf("mounts: %w", err)
	}
	for _, m := range b.Mounts {
		if out, err := exec.Command("mount", "-o", "loop", m.File, m.Dir).CombinedOutput(); err != nil {
			return fmt.Errorf("mount %s: %w: %s", m.Dir, err, out)
		}
	}
	if err := ifUp("lo"); err != nil {
		return err
	}
	tap, err := newTap("eth0", b.IP, b.Mask)
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(3, []byte{1}, unix.UnixRights(tap), nil, 0); err != nil {
		return fmt.Errorf("hand over the network card: %w", err)
	}
	_ = unix.Close(tap)
	_ = unix.Close(3)
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	for range children {
		for {
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			if pid <= 0 && !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
	return nil
}

// vnetHeader is the size of the header before each frame of a TAP: the TAP passes segments of 64 KiB whole and without
// checksums.
const vnetHeader = 10

// newTap creates a TAP in this process's network namespace. The kernel removes the TAP with the last descriptor.
func newTap(name string, ip, mask [4]byte) (int, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("/dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil { // leave checksums and segmentation undone, because no card needs either
		err = unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4)
	}
	if err == nil {
		err = configure(name, ip, mask)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("network card %s: %w", name, err)
	}
	return fd, nil
}

// configure gives an interface its addresses and turns the interface on. The hardware address follows from the IP
// address, so that a machine keeps its card. With a new card after each start the other machines would send to the old
// card for up to a minute.
func configure(name string, ip, mask [4]byte) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	hw := struct {
		name [unix.IFNAMSIZ]byte
		unix.RawSockaddr
		_ [8]byte // struct ifreq ends here
	}{RawSockaddr: unix.RawSockaddr{Family: unix.ARPHRD_ETHER}}
	copy(hw.name[:], name)
	for i, b := range append([]byte{2, 0}, ip[:]...) { // 2: locally administered
		hw.Data[i] = int8(b)
	}
	if _, _, no := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCSIFHWADDR, uintptr(unsafe.Pointer(&hw))); no != 0 {
		return fmt.Errorf("hardware address: %w", no)
	}
	for _, set := range []struct {
		what uint
		addr [4]byte
	}{{unix.SIOCSIFADDR, ip}, {unix.SIOCSIFNETMASK, mask}} {
		req, err := unix.NewIfreq(name)
		if err == nil {
			err = req.SetInet4Addr(set.addr[:])
		}
		if err == nil {
			err = unix.IoctlIfreq(s, set.what, req)
		}
		if err != nil {
			return err
		}
	}
	return ifUp(name)
}

func ifUp(name string) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(s) }()
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		err = unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req)
	}
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

// spawn starts a machine's init and returns the other end of the machine's network card. The machine dies with the
// calling thread.
func spawn(b birth, stderr *os.File) (*exec.Cmd, int, error) {
	if err := os.MkdirAll("/dev/drover", 0o755); err != nil {
		return nil, -1, err
	}
	text, err := json.Marshal(b)
	if err != nil {
		return nil, -1, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, err
	}
	theirs := os.NewFile(uintptr(pair[1]), "birth")
	self, err := filepath.EvalSymlinks("/proc/self/exe")
	if err != nil {
		return nil, -1, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), initEnv+"="+string(text))
	cmd.Stderr = stderr
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL,
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	err = cmd.Start()
	_ = theirs.Close()
	defer func() { _ = unix.Close(pair[0]) }()
	if err != nil {
		return nil, -1, fmt.Errorf("start a machine: %w", err)
	}
	oob := make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	var fds []int
	if err == nil && n == 1 {
		var msgs []unix.SocketControlMessage
		if msgs, err = unix.ParseSocketControlMessage(oob[:on]); err == nil && len(msgs) == 1 {
			fds, err = unix.ParseUnixRights(&msgs[0])
		}
	}
	if err != nil || len(fds) != 1 {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, -1, fmt.Errorf("a machine did not start: %w", errors.Join(err, errors.New("see the log")))
	}
	return cmd, fds[0], nil
}
