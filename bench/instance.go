package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// instance is a `drover serve` of the bench.
type instance struct {
	drover, disk, kubeconfig string
	state, metrics           string
	cmd                      *exec.Cmd
	ended                    chan error
	log                      string
	client                   client.WithWatch
	node                     string
}

// startInstance runs serve and returns when the node has a ready disk. more are further disks.
func startInstance(ctx context.Context, drover, dir string, more ...string) (in *instance, err error) {
	state := filepath.Join(dir, "state")
	in = &instance{drover: drover, state: state, disk: filepath.Join(dir, "disk"),
		kubeconfig: filepath.Join(state, "kubeconfig"), log: filepath.Join(dir, "serve.log"), ended: make(chan error, 1)}
	for _, d := range []string{state, in.disk} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	log, err := os.Create(in.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	args := []string{"serve", "--state-dir", state, "--disk", in.disk}
	for _, d := range more {
		args = append(args, "--disk", d)
	}
	in.cmd = exec.Command(drover, args...)
	in.cmd.Stderr = log
	in.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for bench, which detaches first
	out, err := in.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := in.cmd.Start(); err != nil {
		return nil, err
	}
	ready := make(chan bool, 1)
	go func() { // ends with the process
		s := bufio.NewScanner(out)
		for s.Scan() {
			if f := strings.Fields(s.Text()); len(f) == 2 && f[0] == "metrics" {
				in.metrics = f[1]
			}
			if strings.HasPrefix(s.Text(), "ready") {
				ready <- true
			}
		}
		close(ready)
		in.ended <- in.cmd.Wait()
	}()
	defer func() {
		if err != nil {
			err = errors.Join(err, in.stop(), in.logTail())
		}
	}()
	select {
	case ok := <-ready:
		if !ok {
			return nil, errors.New("drover serve ended")
		}
	case <-time.After(2 * time.Minute):
		return nil, errors.New("drover serve was not ready after 2 minutes")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return in, in.connect(ctx)
}

func (in *instance) logTail() error {
	raw, err := os.ReadFile(in.log)
	if err != nil {
		return err
	}
	return fmt.Errorf("log of serve: %s", raw[max(0, len(raw)-2000):])
}

func (in *instance) connect(ctx context.Context) error {
	ctrllog.SetLogger(logr.Discard())
	cfg, err := clientcmd.BuildConfigFromFlags("", in.kubeconfig)
	if err != nil {
		return err
	}
	cfg.QPS = -1
	s := runtime.NewScheme()
	if err := api.AddToScheme(s); err != nil {
		return err
	}
	if in.client, err = client.NewWithWatch(cfg, client.Options{Scheme: s}); err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	in.node = strings.ToLower(host)
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	_, err = await.Until(ctx, in.client, in.node, func(n *api.Node) (bool, error) {
		return len(n.Status.Disks) > 0 && n.Status.Disks[0].Ready, nil
	})
	return err
}

func (in *instance) pid(role string) (int, error) { return pidIn(in.state, role) }

// roleLog returns the last lines of a process's log.
func (in *instance) roleLog(role string) string {
	raw, err := os.ReadFile(filepath.Join(in.state, "log", role+".log"))
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-3000):])
}

// endTime bounds the end of serve.
const endTime = 4 * time.Minute

// stop detaches all volumes, so that the data path ends with serve, and waits for the end. If a detach fails, as
// without replicas, stop kills the data and hold processes and detaches the loop devices.
func (in *instance) stop() error {
	var errs []error
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	var left []api.UID
	if in.client != nil {
		var list api.AttachmentList
		errs = append(errs, in.client.List(ctx, &list))
		ready, end := context.WithTimeout(ctx, 30*time.Second)
		defer end()
		each := make([]error, len(list.Items))
		var g errgroup.Group
		g.SetLimit(8)
		for i, a := range list.Items {
			g.Go(func() error {
				each[i] = in.detach(ready, a.Name)
				return nil
			})
		}
		errs = append(errs, g.Wait())
		for i, err := range each {
			if err != nil {
				errs = append(errs, fmt.Errorf("volume %s is not detached: %w", list.Items[i].Name, err))
				var v api.Volume
				if err := in.client.Get(ctx, client.ObjectKey{Name: list.Items[i].Name}, &v); err == nil {
					left = append(left, v.Status.UID)
				}
			}
		}
	}
	errs = append(errs, in.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-in.ended:
		if err != nil && in.gracePeriodEnded() {
			err = nil // parts of serve exceed the grace period on a busy computer
		}
		errs = append(errs, err)
	case <-time.After(endTime):
		errs = append(errs, errors.New("drover serve did not stop"), in.cmd.Process.Kill(), <-in.ended)
	}
	if len(left) > 0 {
		for _, role := range []string{"data", "hold"} {
			if pid, err := in.pid(role); err == nil {
				errs = append(errs, syscall.Kill(pid, syscall.SIGKILL))
			}
		}
		for _, uid := range left {
			errs = append(errs, letGo(uid))
		}
	}
	return errors.Join(errs...)
}

// gracePeriodEnded reports whether serve logged the end of the grace period.
func (in *instance) gracePeriodEnded() bool {
	raw, err := os.ReadFile(in.log)
	return err == nil && bytes.Contains(raw[max(0, len(raw)-4000):], []byte("grace period"))
}

// letGo detaches the orphaned loop devices of a volume. The number of a loop device may belong to another program by
// now; an open device keeps its file, so letGo checks the file after the open.
func letGo(volume api.UID) error {
	dirs, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	errs := []error{err}
	for _, d := range dirs {
		stands := func() bool {
			b, err := os.ReadFile(d)
			return err == nil && strings.Contains(string(b), "drover-"+string(volume))
		}
		if !stands() {
			continue
		}
		dev := "/dev/" + strings.Split(d, "/")[3]
		f, err := os.Open(dev)
		if err == nil && stands() {
			err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
		}
		if f != nil {
			_ = f.Close()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// metric returns a counter of a volume with a further label.
func (in *instance) metric(ctx context.Context, name, volume, label string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, in.metrics, nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	for s := bufio.NewScanner(resp.Body); s.Scan(); {
		line := s.Text()
		if strings.HasPrefix(line, name+"{") && strings.Contains(line, `volume="`+volume+`"`) &&
			strings.Contains(line, `="`+label+`"`) {
			return strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		}
	}
	return 0, fmt.Errorf("%s of volume %s is not among the metrics", name, volume)
}

func (in *instance) attachNew(ctx context.Context, name, image string, size int64) (string, error) {
	v := &api.Volume{Spec: api.VolumeSpec{Size: size, BackingImage: image}}
	v.Name = name
	if err := in.client.Create(ctx, v); err != nil {
		return "", err
	}
	return in.attach(ctx, name)
}

func (in *instance) attach(ctx context.Context, name string) (string, error) {
	a := &api.Attachment{Spec: api.AttachmentSpec{Volume: name, Node: in.node}}
	a.Name, a.Labels = name, map[string]string{api.LabelVolume: api.LabelValue(name),
		api.LabelNode: api.LabelValue(in.node)}
	if err := in.client.Create(ctx, a); err != nil {
		return "", err
	}
	a, err := await.Until(ctx, in.client, name, func(a *api.Attachment) (bool, error) {
		return a.Status.Ready && a.Status.Device != "", nil
	})
	if err != nil {
		return "", fmt.Errorf("attach %s: %w", name, err)
	}
	return a.Status.Device, nil
}

func (in *instance) detach(ctx context.Context, name string) error {
	var a api.Attachment
	if err := in.client.Get(ctx, client.ObjectKey{Name: name}, &a); err != nil {
		return client.IgnoreNotFound(err)
	}
	if err := in.client.Delete(ctx, &a); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return await.Gone(ctx, in.client, &a, nil)
}

func (in *instance) deleteVolume(ctx context.Context, name string) error {
	if err := in.detach(ctx, name); err != nil {
		return err
	}
	var v api.Volume
	if err := in.client.Get(ctx, client.ObjectKey{Name: name}, &v); err != nil {
		return err
	}
	if err := in.client.Delete(ctx, &v); err != nil {
		return err
	}
	return await.Gone(ctx, in.client, &v, nil)
}

// importFile creates a backing image from a file and waits for the import.
func (in *instance) importFile(ctx context.Context, name, path string) error {
	return in.importFrom(ctx, name, api.SourceFile, map[string]string{"path": path})
}

func (in *instance) importFrom(ctx context.Context, name string, t api.SourceType, params map[string]string) error {
	i := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: t, SourceParameters: params}}
	i.Name = name
	if err := in.client.Create(ctx, i); err != nil {
		return err
	}
	_, err := await.Until(ctx, in.client, name, func(i *api.BackingImage) (bool, error) {
		if i.Status.State == api.ImageFailed {
			return true, fmt.Errorf("image %s: %s", name, i.Status.Message)
		}
		return i.Status.State == api.ImageReady, nil
	})
	return err
}

func (in *instance) deleteImage(ctx context.Context, name string) error {
	var i api.BackingImage
	if err := in.client.Get(ctx, client.ObjectKey{Name: name}, &i); err != nil {
		return err
	}
	if err := in.client.Delete(ctx, &i); err != nil {
		return err
	}
	return await.Gone(ctx, in.client, &i, nil)
}

// runTool runs a program. The error carries the program's output.
func runTool(ctx context.Context, name string, args ...string) (string, error) {
	var said strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, said.String())
	}
	return string(out), nil
}

// randomFile writes a file of size bytes. With holes every other run of 8 MiB is a hole, and the rest is random.
func randomFile(path string, size int64, holes bool) error {
	src, err := os.Open("/dev/urandom")
	if err != nil {
		return err
	}
	defer src.Close()
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	const run = 8 << 20
	for off := int64(0); off < size; off += run {
		if holes && off/run%2 == 1 {
			continue
		}
		n := min(run, size-off)
		if _, err := io.CopyN(io.NewOffsetWriter(f, off), src, n); err != nil {
			return err
		}
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Sync()
}
