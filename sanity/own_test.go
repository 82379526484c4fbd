package sanity_test

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// notOnItself: Drover refuses to keep state or data on a volume, directly or through a loop device on a file of a
// volume. Each side would wait for the other.
func notOnItself(t *testing.T, w *world) {
	p, err := w.create("under", 512*mib, mountCap("ext4"))
	must(t, err)
	must(t, p.up())
	state, disk, img, through := p.file("state"), p.file("disk"), p.file("img"), w.path("through")
	for _, dir := range []string{disk, through} {
		must(t, os.Mkdir(dir, 0o700))
	}
	must(t, os.WriteFile(img, nil, 0o600))
	must(t, os.Truncate(img, 128*mib))
	for _, argv := range [][]string{{"mkfs.ext4", "-q", "-F", "-b4096", img}, {"mount", "-o", "loop", img, through}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() { _ = syscall.Unmount(through, syscall.MNT_DETACH) })

	// The volume's name in /dev/drover may belong to another instance beside this instance, or to an instance that
	// was killed.
	ctx, cancel := timeout(t)
	defer cancel()
	out, err := exec.CommandContext(ctx, drover(t), "serve", "--state-dir", state).CombinedOutput()
	if err == nil || !strings.Contains(string(out), ", a Drover volume: choose a folder") {
		t.Errorf("serve with its state on a volume: %v: %s", err, out)
	}
	for _, dir := range []string{disk, through} {
		out, code := w.command("disk", "add", dir)
		if code == 0 || !strings.Contains(out, ", a Drover volume: choose a folder") {
			t.Errorf("disk add %s: %d: %s", dir, code, out)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 1 || len(left) == 1 && left[0].Name() != "lost+found" {
			t.Errorf("what a refused disk leaves: %v, %v", left, err)
		}
	}
	if out := w.must("disk", "list"); strings.Contains(out, disk) || strings.Contains(out, through) {
		t.Errorf("a refused disk is listed: %s", out)
	}
	unmount(t, through)
	do(t, p.down, p.remove)
}
