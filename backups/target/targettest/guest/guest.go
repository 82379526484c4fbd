// Package guest runs a test in a virtual machine with Debian's cloud kernel, because the kernel of this machine may
// lack clients of file servers. QEMU needs no KVM. The test binary is the init of the guest, so both sides of a test
// are one program. Only tests import the package.
//
// The guest has the programs and modules of Options, a file system in memory, and 127.0.0.1 of this machine as
// HostAddress. Run owns QEMU and waits for the end of QEMU.
package guest

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"drover.io/drover/block/suite"
)

// HostAddress leads from the guest to 127.0.0.1 of this machine.
const HostAddress = "10.0.2.2"

const (
	// kernelPackage has the newest kernel of Debian's kind for clouds.
	kernelPackage = "linux-image-cloud-amd64"
	// longest is how long a guest may live: an emulated processor is slow, and so is a busy machine.
	longest = 40 * time.Minute
	memory  = "1500M"
	// verdict begins the last line of the guest.
	verdict = "guest: the test "
)

// Options say what a guest has.
type Options struct {
	Test     string            // name of the test to run in the guest
	Modules  []string          // of the kernel, besides the network's; with all dependencies
	Programs []string          // of this machine; with all libraries
	Files    []string          // of this machine, with their whole path
	Env      map[string]string // of the test
}

// Run runs a test of this test binary in a guest, and fails if the test fails there. `.ci/setup all` installs missing
// programs.
func Run(t *testing.T, o Options) {
	t.Helper()
	suite.Long(t)
	suite.System(t)
	if runtime.GOARCH != "amd64" {
		t.Skip("the guest is an amd64 machine")
	}
	dir := t.TempDir()
	kernel, modules := unpackKernel(t, dir, append([]string{"virtio_pci", "virtio_net"}, o.Modules...))
	root := filepath.Join(dir, "root")
	self, err := os.Executable()
	must(t, err)
	files := map[string]string{"/init": self}
	for _, program := range o.Programs {
		path, err := exec.LookPath(program)
		must(t, err)
		files["/sbin/"+filepath.Base(program)] = path
	}
	for _, path := range files {
		for _, library := range librariesOf(t, path) {
			files[library] = library
		}
	}
	for _, path := range o.Files {
		files[path] = path
	}
	for i, module := range modules {
		files[fmt.Sprintf("%s/%03d-%s", modulesDir, i, filepath.Base(module))] = module
	}
	env := []string{"PATH=/sbin", testVariable + "=" + o.Test}
	for name, value := range o.Env {
		env = append(env, name+"="+value)
	}
	environment := filepath.Join(dir, "environment")
	must(t, os.WriteFile(environment, []byte(strings.Join(env, "\n")), 0o600))
	files[environmentFile] = environment
	must(t, writeArchive(root, files))
	boot(t, kernel, root)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// boot runs the guest to the end, and logs the lines of the guest's console.
func boot(t *testing.T, kernel, root string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), longest)
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", memory,
		"-kernel", kernel, "-initrd", root, "-append", "console=ttyS0 quiet panic=-1", "-no-reboot", "-nodefaults",
		"-display", "none", "-serial", "stdio", "-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")
	cmd.WaitDelay = time.Second
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	last := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		t.Log(line)
		if strings.HasPrefix(line, verdict) {
			last = line
		}
	}
	if err := cmd.Wait(); err != nil || last != verdict+"passed" {
		t.Fatalf("the guest ended with %q, %v", last, err)
	}
}

// unpackKernel unpacks Debian's kernel into dir, and returns the kernel and the modules in the order of loading.
func unpackKernel(t *testing.T, dir string, names []string) (kernel string, modules []string) {
	t.Helper()
	depends := output(t, dir, "apt-cache", "depends", "--important", kernelPackage)
	name := ""
	for _, line := range strings.Split(depends, "\n") {
		if _, dependency, is := strings.Cut(line, "Depends: "); is {
			name = dependency
		}
	}
	if name == "" {
		t.Fatalf("%s names no kernel: %s", kernelPackage, depends)
	}
	output(t, dir, "apt-get", "download", name)
	packages, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(packages) != 1 {
		t.Fatalf("packages of the kernel: %v, %v", packages, err)
	}
	unpacked := filepath.Join(dir, "kernel")
	output(t, dir, "dpkg-deb", "-x", packages[0], unpacked)
	version := strings.TrimPrefix(name, "linux-image-")
	output(t, dir, "depmod", "-b", unpacked, version)
	for _, name := range names {
		steps := output(t, dir, "modprobe", "-d", unpacked, "-S", version, "--show-depends", name)
		for _, step := range strings.Split(steps, "\n") {
			file, is := strings.CutPrefix(strings.TrimSpace(step), "insmod ")
			if is && !slices.Contains(modules, file) {
				modules = append(modules, file)
			}
		}
	}
	return filepath.Join(unpacked, "boot", "vmlinuz-"+version), modules
}

// librariesOf are the shared libraries of a program, with the loader.
func librariesOf(t *testing.T, program string) (libraries []string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ldd", program).CombinedOutput()
	if strings.Contains(string(out), "not a dynamic executable") {
		return nil
	}
	if err != nil {
		t.Fatalf("ldd %s: %v: %s", program, err, out)
	}
	for _, word := range strings.Fields(string(out)) {
		if filepath.IsAbs(word) {
			libraries = append(libraries, word)
		}
	}
	return libraries
}

func output(t *testing.T, dir, program string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", program, args, err, out)
	}
	return string(out)
}
