package device

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

func dial(t *testing.T, runDir string) *client {
	t.Helper()
	c, err := dialHolder(t.Context(), filepath.Join(runDir, "hold.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.close() })
	return c
}

// TestHolder: descriptors outlive the client that gave them; blobs change without new descriptors; a delete closes the
// descriptors.
func TestHolder(t *testing.T) {
	runDir := runHolder(t)
	a := dial(t, runDir)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := a.putRecord("k", []byte("one"), int(w.Fd())); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	_ = a.close() // as a death would
	b := dial(t, runDir)
	if err := b.putRecord("k", []byte("two")); err != nil {
		t.Fatal(err)
	}
	blob, fds, err := b.getRecord("k")
	if err != nil || string(blob) != "two" || len(fds) != 1 {
		t.Fatalf("%q, %v, %v", blob, fds, err)
	}
	if n, err := unix.Write(fds[0], []byte("x")); n != 1 || err != nil {
		t.Fatalf("the kept descriptor does not work: %d, %v", n, err)
	}
	closeFds(fds)
	if err := b.putRecord("unknown", []byte("x")); !api.Is(err, api.NotFound) {
		t.Errorf("a blob without descriptors: %v, want kind not found", err)
	}
	if err := b.putRecord("k", make([]byte, maxBlob+1), fds...); !api.Is(err, api.OutOfRange) {
		t.Errorf("too large a blob: %v, want kind out of range", err)
	}
	if err := b.putRecord("large", bytes.Repeat([]byte("x"), maxBlob), int(r.Fd())); err != nil {
		t.Error(err)
	}
	if blob, fds, err := b.getRecord("large"); err != nil || len(blob) != maxBlob {
		t.Errorf("a large blob: %d bytes, %v", len(blob), err)
	} else {
		closeFds(fds)
	}
	for range 2 {
		if err := b.deleteRecord("k"); err != nil {
			t.Error(err)
		}
	}
	if _, err := unix.Read(int(r.Fd()), make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Read(int(r.Fd()), make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("the pipe's other end is still open somewhere: %d, %v", n, err)
	}
	first, err := b.beginIncarnation()
	if err != nil {
		t.Fatal(err)
	}
	if next, err := dial(t, runDir).beginIncarnation(); err != nil || next != first+1 {
		t.Errorf("incarnation %d after %d, %v", next, first, err)
	}
	if err := RunHolder(t.Context(), filepath.Join(runDir, "hold.sock")); !api.Is(err, api.Exists) {
		t.Errorf("a second holder: %v, want kind exists", err)
	}
}

func TestHolderList(t *testing.T) {
	runDir := runHolder(t)
	c := dial(t, runDir)
	for i := range 1000 {
		if err := c.putRecord(fmt.Sprintf("k%04d", i), nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	keys, err := c.listKeys()
	if err != nil || len(keys) != 1000 || keys[0] != "k0000" || keys[999] != "k0999" {
		t.Fatalf("%d keys, %v", len(keys), err)
	}
}

// TestHolderHostile: rubbish ends the sender's connection, not the holder; and the holder serves only root.
func TestHolderHostile(t *testing.T) {
	runDir := runHolder(t)
	sock := filepath.Join(runDir, "hold.sock")
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: sock, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("rubbish")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 100)); err == nil && n > 0 {
		t.Error("rubbish was answered")
	}
	_ = c.Close()
	if _, _, err := dial(t, runDir).askHolder(ask{Op: "nonsense"}, nil); !api.Is(err, api.Invalid) {
		t.Errorf("an unknown ask: %v, want kind invalid", err)
	}

	if err := os.Chmod(sock, 0o666); err != nil { // so only the credentials are in the way
		t.Fatal(err)
	}
	for dir := runDir; dir != "/"; dir = filepath.Dir(dir) {
		if st, err := os.Stat(dir); err == nil && strings.HasPrefix(dir, os.TempDir()) && st.Mode().Perm()&1 == 0 {
			if err := os.Chmod(dir, st.Mode()|0o111); err != nil {
				t.Fatal(err)
			}
		}
	}
	exe := filepath.Join(t.TempDir(), "dial")
	if err := os.Link(os.Args[0], exe); err != nil {
		if out, err := exec.Command("cp", os.Args[0], exe).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for dir := filepath.Dir(exe); strings.HasPrefix(dir, os.TempDir()); dir = filepath.Dir(dir) {
		if dir != os.TempDir() {
			_ = os.Chmod(dir, 0o755)
		}
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "DROVER_TEST_DIAL="+sock)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "refused") {
		t.Errorf("a client that is not root: %v: %s", err, out)
	}
}

// dialAsNobody is a process of TestHolderHostile.
func dialAsNobody(sock string) {
	c, err := dialHolder(context.Background(), sock)
	if err == nil {
		_, err = c.beginIncarnation()
	} else {
		fmt.Println("not even a connection:", err)
		return
	}
	if err != nil {
		fmt.Println("refused:", err)
		return
	}
	fmt.Println("served")
}
