package share

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/targettest"
	"drover.io/drover/block/suite"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world has a ramfs in place of the file server, and a program in place of mount(8) that binds the ramfs.
type world struct {
	server, dir string // folders
	log         string // file: the calls of mount
	mounts      *Mounts
}

// newWorld makes a world. The mount program runs script after it has noted its arguments and environment; script has
// the mount point in $point, the options in $options and the file server in $server.
func newWorld(t *testing.T, script string) *world {
	t.Helper()
	suite.System(t)
	root := t.TempDir()
	w := &world{server: filepath.Join(root, "server"), dir: filepath.Join(root, "shares"), log: filepath.Join(root, "log")}
	must(t, os.Mkdir(w.server, 0o700))
	must(t, unix.Mount("test", w.server, "ramfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(w.server, unix.MNT_DETACH)) })
	bin := filepath.Join(root, "bin")
	must(t, os.Mkdir(bin, 0o700))
	program := fmt.Sprintf("#!/bin/sh\nserver=%s log=%s options=$4 point=$6\n"+
		"echo \"$*\" >>$log\nenv >>$log\nPATH=/usr/bin:/bin\n%s\n",
		w.server, w.log, script)
	must(t, os.WriteFile(filepath.Join(bin, "mount"), []byte(program), 0o700))
	t.Setenv("PATH", bin)
	w.mounts = NewMounts(w.dir)
	w.mounts.fileSystems = map[Kind][]int64{NFS: {unix.RAMFS_MAGIC}, CIFS: {unix.RAMFS_MAGIC}}
	return w
}

const bind = `exec mount --bind $server $point`

func (w *world) open(t *testing.T, share Share) *Store {
	t.Helper()
	s, err := w.mounts.Open(t.Context(), share, Credentials{})
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// calls are the notes of the mount program.
func (w *world) calls(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(w.log)
	must(t, err)
	return string(text)
}

// mustBeClean fails the test if the folder of the mounts has a file or a mount.
func (w *world) mustBeClean(t *testing.T) {
	t.Helper()
	entries, err := os.ReadDir(w.dir)
	must(t, err)
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(w.dir))
	must(t, err)
	if len(entries) > 0 || len(left) > 0 {
		t.Errorf("the folder of the mounts has %v and the mounts %v", entries, left)
	}
}

func newShare(t *testing.T, kind Kind, options string) Share {
	t.Helper()
	s, err := New(kind, "server", "/backups", options)
	must(t, err)
	return s
}

// TestShareKeepsTheContract: a store on a share passes the contract of stores.
func TestShareKeepsTheContract(t *testing.T) {
	targettest.Run(t, func(t *testing.T) target.Store { return newWorld(t, bind).open(t, newShare(t, NFS, "")) })
}

// TestMountIsTheStoresAlone: after Open the node has no mount of the share, and the store reaches the share until
// Close, whatever others close and unmount.
func TestMountIsTheStoresAlone(t *testing.T) {
	w := newWorld(t, bind)
	second := w.open(t, newShare(t, NFS, ""))
	first, err := w.mounts.Open(t.Context(), newShare(t, NFS, ""), Credentials{})
	must(t, err)
	w.mustBeClean(t)
	must(t, first.Put(t.Context(), "data/a", []byte("a")))
	must(t, first.Close())
	if err := first.Put(t.Context(), "data/b", []byte("b")); err == nil {
		t.Error("a closed store takes objects")
	}
	if text, err := os.ReadFile(filepath.Join(w.server, "data/a")); err != nil || string(text) != "a" {
		t.Errorf("the share has %q, %v", text, err)
	}
	must(t, unix.Unmount(w.server, 0)) // the folder of the server, not the mount of the store
	body, err := second.Get(t.Context(), "data/a", 0, -1)
	if string(body) != "a" || err != nil || second.String() != "NFS share server:/backups" {
		t.Errorf("%s has %q, %v", second, body, err)
	}
	must(t, unix.Mount("test", w.server, "ramfs", 0, "")) // for the cleanup
}

// TestShareThatIsNotMountedIsRefused: the success of mount(8) proves nothing. Without the share's file system there is
// no store, and nothing is written into the folder of the mounts.
func TestShareThatIsNotMountedIsRefused(t *testing.T) {
	w := newWorld(t, "exit 0")
	s, err := w.mounts.Open(t.Context(), newShare(t, NFS, ""), Credentials{})
	if s != nil || !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "the share is not mounted") {
		t.Errorf("open: %v, %v", s, err)
	}
	w.mustBeClean(t)
}

// TestVersionsOfNFSAreTriedInTurn: Open mounts an export in the newest version that the server has, or in the version
// of the URL alone.
func TestVersionsOfNFSAreTriedInTurn(t *testing.T) {
	w := newWorld(t, `case $options in *vers=4.2*) echo mount.nfs: Protocol not supported; exit 32;; esac; `+bind)
	w.open(t, newShare(t, NFS, ""))
	if got := strings.Count(w.calls(t), "-t nfs"); got != 2 || !strings.Contains(w.calls(t),
		"-o actimeo=1,timeo=300,soft,retry=0,vers=4.1,nosuid,nodev,noexec server:/backups") {
		t.Errorf("%d calls of mount: %s", got, w.calls(t))
	}
	must(t, os.Remove(w.log))
	_, err := w.mounts.Open(t.Context(), newShare(t, NFS, "vers=4.2,hard,nconnect=4"), Credentials{})
	if !api.Is(err, api.Unavailable) || !strings.Contains(err.Error(), "Protocol not supported") {
		t.Errorf("open: %v", err)
	}
	if got := strings.Count(w.calls(t), "-t nfs"); got != 1 || !strings.Contains(w.calls(t),
		"-o actimeo=1,vers=4.2,hard,nconnect=4,retry=0,nosuid,nodev,noexec server:/backups") {
		t.Errorf("%d calls of mount: %s", got, w.calls(t))
	}
	w.mustBeClean(t)
}

// TestPasswordIsInAFileAlone: mount.cifs finds the credentials in a file of a tmpfs that root alone reads and that is
// deleted after the mount. Neither the command line nor the environment has the password, nor does an error.
func TestPasswordIsInAFileAlone(t *testing.T) {
	w := newWorld(t, `file=${options##*credentials=}; file=${file%%,*}; stat -f -c %T "$file" >"$server/file"
stat -c %a "$file" >>"$server/file"; cat "$file" >>"$server/file"
test -e "$server/fail" && { echo "mount error(13): Permission denied for hush"; exit 32; }; `+bind)
	t.Setenv("HUSH", "hush")
	login := Credentials{User: "me", Password: "hush"}
	s, err := w.mounts.Open(t.Context(), newShare(t, CIFS, "vers=3.1.1,seal"), login)
	must(t, err)
	must(t, s.Close())
	text, err := os.ReadFile(filepath.Join(w.server, "file"))
	must(t, err)
	if string(text) != "tmpfs\n600\nusername=me\npassword=hush\n" {
		t.Errorf("the file of the credentials: %q", text)
	}
	must(t, os.WriteFile(filepath.Join(w.server, "fail"), nil, 0o600))
	_, err = w.mounts.Open(t.Context(), newShare(t, CIFS, ""), login)
	if !api.Is(err, api.Denied) || !strings.Contains(err.Error(), "mount error(13): Permission denied for (secret)") {
		t.Errorf("open: %v", err)
	}
	if calls := w.calls(t); strings.Contains(calls, "hush") || !strings.Contains(calls,
		",nosuid,nodev,noexec //server/backups ") {
		t.Errorf("the calls of mount: %s", calls)
	}
	if text := fmt.Sprintf("%v %+v %#v", login, login, login); strings.Contains(text, "hush") {
		t.Errorf("a format shows the credentials: %s", text)
	}
	w.mustBeClean(t)
	must(t, os.Remove(filepath.Join(w.server, "fail")))
	must(t, os.Remove(w.log))
	w.open(t, newShare(t, CIFS, ""))
	if calls := w.calls(t); !strings.Contains(calls, "-o soft,guest,nosuid,nodev,noexec //server/backups") {
		t.Errorf("without credentials: %s", calls)
	}
}

// TestMountThatHangsEndsWithTheContext: the end of the context ends mount(8) and its helper, and leaves no mount.
func TestMountThatHangsEndsWithTheContext(t *testing.T) {
	w := newWorld(t, `sleep 1000 & echo $! >$server/fifo; wait`)
	fifo := filepath.Join(w.server, "fifo")
	must(t, unix.Mkfifo(fifo, 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	pid := make(chan int, 1)
	go func() {
		var n int
		text, err := os.ReadFile(fifo)
		if _, scan := fmt.Sscan(string(text), &n); err != nil || scan != nil {
			t.Error(err, scan)
		}
		pid <- n
		cancel()
	}()
	_, err := w.mounts.Open(ctx, newShare(t, NFS, ""), Credentials{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("open: %v", err)
	}
	// The helper is a child of nobody here: its reaper may be slow, but the helper sleeps no more.
	state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", <-pid))
	if err == nil && strings.Contains(string(state), ") S ") {
		t.Errorf("the helper still runs: %s", state)
	}
	w.mustBeClean(t)
}

// TestMountsOfADeadProcessAreDetached: the first Open detaches the mounts of a process that died while it mounted.
func TestMountsOfADeadProcessAreDetached(t *testing.T) {
	w := newWorld(t, bind)
	place, err := w.mounts.makePlace()
	must(t, err)
	must(t, os.Mkdir(filepath.Join(place, "share"), 0o700))
	must(t, unix.Mount(w.server, filepath.Join(place, "share"), "", unix.MS_BIND, ""))
	must(t, os.Mkdir(filepath.Join(w.dir, "mount-unused"), 0o700))
	next := NewMounts(w.dir)
	next.fileSystems = w.mounts.fileSystems
	s, err := next.Open(t.Context(), newShare(t, NFS, ""), Credentials{})
	must(t, err)
	must(t, s.Close())
	w.mustBeClean(t)
}

// TestMissingToolsAreNamed: an error of a node without mount tools names the package to install.
func TestMissingToolsAreNamed(t *testing.T) {
	w := newWorld(t, `echo "mount: $point: bad option; for several filesystems (e.g. nfs, cifs) you might" >&2
echo "need a /sbin/mount.<type> helper program." >&2; exit 32`)
	for kind, want := range map[Kind]string{NFS: "nfs-common", CIFS: "cifs-utils"} {
		_, err := w.mounts.Open(t.Context(), newShare(t, kind, ""), Credentials{})
		if !api.Is(err, api.Unsupported) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	t.Setenv("PATH", w.server)
	_, err := w.mounts.Open(t.Context(), newShare(t, NFS, ""), Credentials{})
	if !api.Is(err, api.Unsupported) || !strings.Contains(err.Error(), "util-linux") {
		t.Errorf("without mount: %v", err)
	}
	w.mustBeClean(t)
}
