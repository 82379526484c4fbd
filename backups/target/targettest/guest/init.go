package guest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	modulesDir      = "/modules"
	environmentFile = "/environment"
	// testVariable has the name of the test, in the guest alone.
	testVariable = "DROVER_GUEST_TEST"
)

// Main is the TestMain of a package with tests for a guest.
func Main(m *testing.M) {
	if os.Getpid() != 1 {
		os.Exit(m.Run())
	}
	result := "passed"
	if err := runTest(); err != nil {
		result = "failed: " + err.Error()
	}
	_, _ = fmt.Fprintln(os.Stdout, verdict+result)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// Inside skips a test outside of a guest.
func Inside(t *testing.T) {
	t.Helper()
	if os.Getenv(testVariable) == "" {
		t.Skip("runs in a guest")
	}
}

// runTest prepares the guest, and runs the test in a process of its own.
func runTest() error {
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs",
		"/tmp"}} {
		if err := errors.Join(os.MkdirAll(m.at, 0o755), unix.Mount(m.kind, m.at, m.kind, 0, "")); err != nil {
			return fmt.Errorf("%s: %w", m.at, err)
		}
	}
	err := errors.Join(loadModules(), startInterface("lo", "127.0.0.1"), startInterface("eth0", "10.0.2.15"))
	if err != nil {
		return err
	}
	environment, err := os.ReadFile(environmentFile)
	if err != nil {
		return err
	}
	env := strings.Split(string(environment), "\n")
	name := ""
	for _, e := range env {
		if value, is := strings.CutPrefix(e, testVariable+"="); is {
			name = value
		}
	}
	cmd := exec.Command("/init", "-test.v", "-test.timeout", longest.String(), "-test.run", "^"+name+"$")
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stdout
	return cmd.Run()
}

// loadModules loads the modules by the order of their names.
func loadModules() error {
	files, err := filepath.Glob(modulesDir + "/*")
	for _, file := range files {
		f, e := os.Open(file)
		if e == nil {
			e = unix.FinitModule(int(f.Fd()), "", 0)
			_ = f.Close()
		}
		if e != nil && !errors.Is(e, unix.EEXIST) && !errors.Is(e, unix.ENODEV) { // ENODEV: for another processor
			err = errors.Join(err, fmt.Errorf("module %s: %w", file, e))
		}
	}
	return err
}

// startInterface starts a network interface with an address in a network of 24 bits.
func startInterface(name, address string) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(socket) }()
	a := netip.MustParseAddr(address).As4()
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	set := func(request uint, value []byte) error {
		if err := r.SetInet4Addr(value); err != nil {
			return err
		}
		return unix.IoctlIfreq(socket, request, r)
	}
	err = errors.Join(set(unix.SIOCSIFADDR, a[:]), set(unix.SIOCSIFNETMASK, []byte{255, 255, 255, 0}))
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err = errors.Join(err, unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, r)); err != nil {
		return fmt.Errorf("network interface %s: %w", name, err)
	}
	return nil
}
