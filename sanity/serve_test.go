package sanity_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

var binary struct {
	once sync.Once
	dir  string
	path string
	err  error
}

// TestMain removes the binary that the tests of this package share.
func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	code := m.Run()
	if binary.dir != "" {
		os.RemoveAll(binary.dir)
	}
	os.Exit(code)
}

// drover is the program of DROVER_BINARY, or drover builds the program, once.
func drover(t *testing.T) string {
	t.Helper()
	suite.System(t)
	binary.once.Do(func() {
		if binary.path = os.Getenv("DROVER_BINARY"); binary.path != "" {
			return
		}
		if binary.dir, binary.err = os.MkdirTemp("", "drover-binary-"); binary.err != nil {
			return
		}
		binary.path = filepath.Join(binary.dir, "drover")
		cmd := exec.Command("go", "build", "-o", binary.path, "..")
		if out, err := cmd.CombinedOutput(); err != nil {
			binary.err = fmt.Errorf("go build: %w\n%s", err, out)
		}
	})
	if binary.err != nil {
		t.Fatal(binary.err)
	}
	return binary.path
}

// world is one `drover serve` with a state folder, a disk and clients: all the real thing.
type world struct {
	t    *testing.T
	dir  string // of everything
	cmd  *exec.Cmd
	done chan struct{} // closed when serve has ended
	err  error         // how; read after done
	log  *os.File

	conn       *grpc.ClientConn
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient
	objects    client.WithWatch
	name       string // of the node
	metrics    string // URL
}

const settle = 2 * time.Minute // above any duration here on a busy machine: seconds, ten times more at a load of 30

func newWorld(t *testing.T) *world {
	t.Helper()
	bin := drover(t)
	// Not t.TempDir: the path of a socket is at most 107 bytes long.
	dir, err := os.MkdirTemp("", "drover-")
	must(t, err)
	w := &world{t: t, dir: dir, name: "node-one"}
	must(t, os.Mkdir(w.path("disk"), 0o700))
	w.log, err = os.Create(w.path("log"))
	must(t, err)
	t.Cleanup(w.end)
	w.start(bin)
	return w
}

func (w *world) path(elem ...string) string {
	return filepath.Join(append([]string{w.dir}, elem...)...)
}

// start runs serve and returns when serve is ready and the node has its disk.
func (w *world) start(bin string) {
	w.t.Helper()
	w.serve(bin)
	// Thin volumes fit on the machine, however full.
	w.set("storage-minimal-available-percentage", "0")
	w.set("storage-over-provisioning-percentage", "100000")
	w.awaitDisk()
}

// serve runs serve and returns when serve is ready.
func (w *world) serve(bin string) {
	w.t.Helper()
	w.cmd = exec.Command(bin, "serve", "--state-dir", w.path("state"), "--disk", w.path("disk"), "--node-name", w.name)
	w.cmd.Env = append(os.Environ(), "GOGC=300") // memory for processor time: several worlds share the machine
	w.cmd.Stderr = w.log
	out, err := w.cmd.StdoutPipe()
	must(w.t, err)
	must(w.t, w.cmd.Start())
	ready := make(chan struct{})
	w.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) { // ends with the process
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if key, url, _ := strings.Cut(lines.Text(), " "); key == "metrics" {
				w.metrics = strings.TrimSpace(url)
			}
			if strings.HasPrefix(lines.Text(), "ready ") {
				close(ready)
			}
		}
		w.err = cmd.Wait()
		close(done)
	}(w.cmd, w.done)
	select {
	case <-ready:
	case <-w.done:
		w.fatal("serve ended before it was ready: %v", w.err)
	case <-time.After(2 * settle):
		w.fatal("serve is not ready")
	}
	if w.conn == nil {
		w.conn, err = grpc.NewClient("unix://"+w.path("state", "csi.sock"), grpc.WithAuthority("localhost"),
			grpc.WithTransportCredentials(insecure.NewCredentials()))
		must(w.t, err)
		w.identity, w.controller = csi.NewIdentityClient(w.conn), csi.NewControllerClient(w.conn)
		w.node = csi.NewNodeClient(w.conn)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", w.path("state", "kubeconfig"))
	must(w.t, err)
	scheme := runtime.NewScheme()
	must(w.t, api.AddToScheme(scheme))
	w.objects, err = client.NewWithWatch(cfg, client.Options{Scheme: scheme})
	must(w.t, err)
}

func (w *world) set(name, value string) {
	w.t.Helper()
	s := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}
	err := w.objects.Create(w.t.Context(), s)
	if apierrors.IsAlreadyExists(err) {
		_, err = await.Edit(w.t.Context(), w.objects, name, func(s *api.Setting) (bool, error) {
			differs := s.Value != value
			s.Value = value
			return differs, nil
		})
	}
	must(w.t, err)
}

// comes polls a state that has no notification, until so returns true.
func comes(so func() bool) bool {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(settle); !so(); <-tick.C {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func (w *world) awaitDisk() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), settle)
	defer cancel()
	_, err := await.Until(ctx, w.objects, w.name, func(n *api.Node) (bool, error) {
		return len(n.Status.Disks) > 0 && n.Status.Disks[0].Ready, nil
	})
	if err != nil {
		w.fatal("the disk is not ready: %v", err)
	}
}

// fatal ends the test with the last words of the log.
func (w *world) fatal(format string, args ...any) {
	w.t.Helper()
	b, _ := os.ReadFile(w.log.Name())
	if len(b) > 8000 {
		b = b[len(b)-8000:]
	}
	w.t.Fatalf(format+"\nlog:\n%s", append(args, b)...)
}

// signal sends serve a signal and waits for the end of serve.
func (w *world) signal(s syscall.Signal) {
	w.t.Helper()
	must(w.t, w.cmd.Process.Signal(s))
	select {
	case <-w.done:
	case <-time.After(2 * settle):
		w.fatal("serve does not end after %v", s)
	}
	if s == syscall.SIGTERM && w.err != nil {
		if b, _ := os.ReadFile(w.log.Name()); bytes.Contains(b[max(0, len(b)-4000):], []byte("grace period")) {
			return // on a busy computer some work outlasts the grace period
		}
		w.fatal("serve ended with %v", w.err)
	}
}

// child is the number of the data or hold process, 0 without such a process.
func (w *world) child(role string) int {
	w.t.Helper()
	b, err := os.ReadFile(w.path("state", "run", role+".pid"))
	if err != nil {
		return 0
	}
	var p struct{ Pid int }
	if json.Unmarshal(b, &p) != nil || p.Pid <= 0 {
		return 0
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.Pid))
	if err != nil || !strings.Contains(string(args), w.dir) { // gone, or another process has the number
		return 0
	}
	return p.Pid
}

// kill ends the data or hold process, and returns its number.
func (w *world) kill(role string) (pid int) {
	w.t.Helper()
	return w.send(role, syscall.SIGKILL)
}

// send sends a signal to the data or hold process.
func (w *world) send(role string, s syscall.Signal) (pid int) {
	w.t.Helper()
	if !comes(func() bool { pid = w.child(role); return pid != 0 }) { // 0 would be the test's own group
		w.fatal("there is no %s process for %v", role, s)
	}
	must(w.t, syscall.Kill(pid, s))
	return pid
}

// end ends serve and checks for mounts and processes left behind.
func (w *world) end() {
	if w.cmd != nil && w.cmd.Process != nil {
		select {
		case <-w.done:
		default:
			_ = w.cmd.Process.Signal(syscall.SIGTERM)
			select {
			case <-w.done:
			case <-time.After(2 * settle):
				w.t.Error("serve does not end")
				_ = w.cmd.Process.Kill()
				<-w.done
			}
		}
	}
	if w.conn != nil {
		w.conn.Close()
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	if n := strings.Count(string(mounts), w.dir); n > 0 && !w.t.Failed() {
		w.t.Errorf("%d mounts stay behind", n)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], w.dir) {
			_ = exec.Command("umount", "-l", f[4]).Run()
		}
	}
	for _, role := range []string{"data", "hold"} {
		if pid := w.child(role); pid != 0 {
			if !w.t.Failed() {
				w.t.Errorf("process %d (%s) stays behind", pid, role)
			}
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	if w.t.Failed() {
		if b, err := os.ReadFile(w.log.Name()); err == nil {
			var errs []string
			for line := range strings.Lines(string(b)) {
				if strings.Contains(line, "level=ERROR") || strings.Contains(line, `"level":"ERROR"`) {
					errs = append(errs, line)
				}
			}
			w.t.Logf("the errors in the log:\n%s", strings.Join(errs[:min(len(errs), 50)], ""))
			w.t.Logf("the end of the log:\n%s", b[max(0, len(b)-6000):])
		}
		if b, err := exec.Command("dmesg").Output(); err == nil { // the log tells a file system's damage from Drover's
			w.t.Logf("the kernel's last words:\n%s", b[max(0, len(b)-3000):])
		}
	}
	w.log.Close()
	if err := os.RemoveAll(w.dir); err != nil {
		w.t.Errorf("%v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
