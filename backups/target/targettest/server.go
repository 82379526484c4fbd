package targettest

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Server is a program of others that serves a store, with its children in a process group of its own.
type Server struct {
	tb    testing.TB
	cmd   *exec.Cmd
	ended chan struct{} // closed after the end of the program
}

// StartServer runs a program until the end of the test, and returns when the program accepts connections on a port of
// 127.0.0.1.
func StartServer(tb testing.TB, port int, program string, args ...string) *Server {
	tb.Helper()
	log, err := os.Create(filepath.Join(tb.TempDir(), "log"))
	if err != nil {
		tb.Fatal(err)
	}
	s := &Server{tb: tb, cmd: exec.Command(program, args...), ended: make(chan struct{})}
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go func() { _ = s.cmd.Wait(); close(s.ended) }()
	tb.Cleanup(func() {
		_ = unix.Kill(-s.cmd.Process.Pid, unix.SIGKILL)
		<-s.ended
		_ = log.Close()
	})
	for {
		conn, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err == nil {
			_ = conn.Close()
			return s
		}
		select {
		case <-s.ended:
			text, _ := os.ReadFile(log.Name())
			tb.Fatalf("%s ended: %v: %s", program, s.cmd.ProcessState, text)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Signal sends a signal to the program and its children.
func (s *Server) Signal(signal unix.Signal) {
	if err := unix.Kill(-s.cmd.Process.Pid, signal); err != nil {
		s.tb.Errorf("%s: %v: %v", s.cmd.Path, signal, err)
	}
}

// FreePort is a port of 127.0.0.1 that no program uses now.
func FreePort(tb testing.TB) int {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}

// Install builds the program of a Go module at a version, and returns the program's path.
func Install(tb testing.TB, module string) string {
	tb.Helper()
	name, _, _ := strings.Cut(filepath.Base(module), "@")
	bin := tb.TempDir()
	cmd := exec.CommandContext(tb.Context(), "go", "install", "-ldflags=-s -w", module)
	cmd.Env = append(os.Environ(), "GOBIN="+bin, "GOFLAGS=-trimpath", "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("go install %s: %v: %.2000s", module, err, out)
	}
	return filepath.Join(bin, name)
}

// Versity is a server of S3 with files behind it, and a bucket.
type Versity struct{ Endpoint, Region, Bucket, AccessKey, SecretKey string }

// StartVersity builds and starts versitygw, which takes a minute of a processor.
func StartVersity(tb testing.TB) Versity {
	tb.Helper()
	v := Versity{Region: "us-east-1", Bucket: "backups", AccessKey: "key", SecretKey: "hush-hush"}
	program, port, files := Install(tb, "github.com/versity/versitygw/cmd/versitygw@v1.8.0"), FreePort(tb), tb.TempDir()
	if err := os.Mkdir(filepath.Join(files, v.Bucket), 0o700); err != nil {
		tb.Fatal(err)
	}
	address := "127.0.0.1:" + strconv.Itoa(port)
	v.Endpoint = "http://" + address
	// A file system without extended attributes, such as a tmpfs, needs the folder for metadata.
	StartServer(tb, port, program, "--port", address, "--access", v.AccessKey, "--secret", v.SecretKey,
		"--region", v.Region, "--quiet", "posix", "--sidecar", tb.TempDir(), files)
	return v
}
