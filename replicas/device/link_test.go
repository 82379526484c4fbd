package device

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestStaleLinks: a name in /dev/drover never leads to a later loop device with the number of a removed device.
func TestStaleLinks(t *testing.T) {
	img := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(img, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(img, mib); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "-f", "--show", img).Output()
	if err != nil {
		t.Fatal(err)
	}
	foreign := strings.TrimSpace(string(out))
	t.Cleanup(func() { _ = exec.Command("losetup", "-d", foreign).Run() })
	if err := os.MkdirAll(linkDir, 0o755); err != nil {
		t.Fatal(err)
	}
	link := func(name, to string) string {
		t.Helper()
		path := filepath.Join(linkDir, name)
		if err := os.Symlink(to, path); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
		return path
	}
	left := func(path string) bool {
		_, err := os.Lstat(path)
		return err == nil
	}

	at := link(testKey("stale-start"), foreign)
	h, l := openHost(t, runHolder(t)), runLoop(t)
	if left(at) {
		t.Error("a link to a device of somebody else outlived a start")
	}
	link(testKey("stale-own"), foreign)
	d, _ := attach(t, h, l, "stale-own", 64*mib)
	if to, err := os.Readlink(d.Link()); err != nil || to != d.Path() {
		t.Errorf("link: %s, %v; want %s", to, err, d.Path())
	}
	below := func(dev string) string { return ownVolume(filepath.Join("/sys/block", filepath.Base(dev)), 0) }
	if on := below(d.Path()); on != d.Link() {
		t.Errorf("what is on %s is on volume %q", d.Path(), on)
	}
	if err := os.Remove(d.Link()); err != nil { // as if another volume had the name
		t.Fatal(err)
	}
	if on := below(d.Path()); on != d.Path() {
		t.Errorf("without its name, what is on %s is on volume %q", d.Path(), on)
	}
	if on := below(foreign); on != "" {
		t.Errorf("what is on a device of somebody else is on volume %s", on)
	}
	at = link(testKey("stale-name"), d.Path())
	if err := d.makeLink(); err != nil {
		t.Fatal(err)
	}
	if left(at) {
		t.Error("a device has two names")
	}
	if to, err := os.Readlink(d.Link()); err != nil || to != d.Path() {
		t.Errorf("link: %s, %v; want %s", to, err, d.Path())
	}
}
