// Package released builds the released program whose volumes, devices and peers later versions take over, for the tests
// of upgrades. The package starts no goroutine.
package released

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

// Commit is the commit whose devices every later binary takes over.
const Commit = "116c2029b65b8591f11af0b77419f10cfc1c402c"

// Binary returns the path of the program of Commit, which Binary builds outside of the module and keeps in the user's
// cache. A clone without the commit skips the test, but in CI.
func Binary(t *testing.T) string {
	t.Helper()
	const commit = Commit
	out, err := exec.Command("git", "cat-file", "-t", commit).CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "commit" {
		why := fmt.Sprintf("commit %s is not in the history of this clone (%s): fetch it with git fetch --unshallow",
			commit, bytes.TrimSpace(out))
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	// The source is that of the history, in one place, so that Go's own cache, which goes by content, has its packages.
	cache, err := os.UserCacheDir()
	must(t, err)
	source := filepath.Join(cache, "drover-tests", commit)
	bin := source + "-" + runtime.Version() + "-" + runtime.GOARCH
	must(t, os.MkdirAll(filepath.Dir(source), 0o700))
	lock, err := os.Create(source + ".lock") // another test may build the commit now
	must(t, err)
	defer lock.Close()
	must(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	if _, err := os.Stat(bin); err == nil {
		return bin
	}
	must(t, os.RemoveAll(source))
	must(t, os.Mkdir(source, 0o700))
	tree, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	must(t, err)
	archive := exec.Command("git", "-C", strings.TrimSpace(string(tree)), "archive", "--format=tar", commit)
	unpack := exec.Command("tar", "-x", "-C", source)
	unpack.Stdin, err = archive.StdoutPipe()
	must(t, err)
	must(t, archive.Start())
	out, err = unpack.CombinedOutput()
	if err = errors.Join(err, archive.Wait()); err != nil {
		t.Fatalf("source of commit %s: %v\n%s", commit, err, out)
	}
	build := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-s -w", "-o", bin+".part", ".")
	build.Dir, build.Env = source, append(os.Environ(), "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build commit %s: %v\n%s", commit, err, out)
	}
	must(t, os.RemoveAll(source))
	must(t, os.Rename(bin+".part", bin))
	return bin
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
