package cluster

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
)

var program string

func TestMain(m *testing.M) {
	Init()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	slog.SetDefault(slog.New(slog.DiscardHandler))
	flag.Parse()
	if !suite.All() { // several clusters run at a time and share the processors
		pace = 100 * time.Millisecond
	}
	set := false
	flag.Visit(func(f *flag.Flag) { set = set || f.Name == "test.parallel" })
	if !set { // the tests mostly wait
		_ = flag.Set("test.parallel", strconv.Itoa(together))
	}
	os.Exit(run(m))
}

// together is how many clusters run at a time.
const together = 3

// run builds the program once for all tests.
func run(m *testing.M) int {
	program = os.Getenv("DROVER_BINARY")
	if program == "" && !testing.Short() {
		dir, err := os.MkdirTemp("", "drover-program-")
		if err == nil {
			defer os.RemoveAll(dir)
			program = filepath.Join(dir, "drover")
			var out []byte
			if out, err = exec.Command("go", "build", "-o", program, "../..").CombinedOutput(); err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "build:", err)
			return 1
		}
	}
	return m.Run()
}

// start makes a cluster for a test that may run beside others.
func start(t *testing.T, o Options) *Cluster {
	t.Helper()
	t.Parallel()
	return startAlone(t, o)
}

// startAlone is start for a test that measures time.
func startAlone(t *testing.T, o Options) *Cluster {
	t.Helper()
	suite.System(t)
	o.Binary, o.Heartbeat = program, 3*time.Second
	c, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, m := range c.Machines() {
				t.Log(m.LogTail())
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// command runs the program's command line against the cluster.
func (c *Cluster) command(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.try(t, args...)
	if err != nil {
		t.Fatalf("drover %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return out
}

// attach attaches a volume to a node and waits for the device. The command `volume attach` does the same in a process
// of the program, whose start takes 80 ms of processor time.
func (c *Cluster) attach(t *testing.T, volume, node string) {
	t.Helper()
	c.patiently(t, "attach volume "+volume+" to "+node, func(ctx context.Context) error {
		a := &api.Attachment{Spec: api.AttachmentSpec{Volume: volume, Node: node, Purpose: "workload"}}
		a.Name = volume
		a.Labels = map[string]string{api.LabelVolume: api.LabelValue(volume), api.LabelNode: api.LabelValue(node)}
		if err := c.Objects.Create(ctx, a); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		a, err := await.Until(ctx, c.Objects, volume, func(a *api.Attachment) (bool, error) {
			return a.DeletionTimestamp == nil && a.Status.Ready && a.Status.Device != "", nil
		})
		if err == nil && a.Spec.Node != node {
			t.Fatalf("volume %s is attached to %s, not to %s", volume, a.Spec.Node, node)
		}
		return err
	})
}

// detach detaches a volume and waits until the device is gone.
func (c *Cluster) detach(t *testing.T, volume string) {
	t.Helper()
	c.patiently(t, "detach volume "+volume, func(ctx context.Context) error {
		var a api.Attachment
		err := c.Objects.Get(ctx, client.ObjectKey{Name: volume}, &a)
		if err == nil {
			err = c.Objects.Delete(ctx, &a, client.Preconditions{UID: &a.UID})
		}
		if err == nil {
			err = await.Gone(ctx, c.Objects, &a, nil)
		}
		return client.IgnoreNotFound(err)
	})
}

// patiently repeats a call until success, for an API server without time.
func (c *Cluster) patiently(t *testing.T, what string, do func(context.Context) error) {
	t.Helper()
	ctx := soon(t)
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		err := do(ctx)
		if err == nil {
			tick.Stop()
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		}
	}
}

// try is command for calls that may fail. Like a patient client, try repeats a call that the API server had no time
// for; then a late effect of the first call is no error.
func (c *Cluster) try(t *testing.T, args ...string) (string, error) {
	t.Helper()
	args = append(args, "--kubeconfig", c.Kubeconfig, "--timeout", readyTime.String())
	makes, ends := slices.Contains(args, "create"), slices.Contains(args, "delete") || slices.Contains(args, "detach")
	for began, again := time.Now(), false; ; again = true {
		b, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
		out := string(b)
		has := func(s string) bool { return strings.Contains(out, s) }
		switch {
		case err == nil || again && (makes && has(" exists already") || ends && has(" does not exist")):
			return out, nil
		case time.Since(began) > readyTime || t.Context().Err() != nil || !has("etcdserver") &&
			!has("timed out waiting") && !has("too many requests") && (!has("the API server") || !has("does not answer")):
			return out, err
		}
		t.Logf("drover %s: again after: %s", strings.Join(args, " "), out)
		time.Sleep(500 * time.Millisecond)
	}
}

// kill sends SIGKILL to the processes of a role, and waits for processes that are just being started again.
func kill(t *testing.T, m *Machine, role string) {
	t.Helper()
	eventually(t, role+" runs on "+m.Name, func() bool {
		err := m.Kill(role)
		if !errors.Is(err, errNobody) {
			must(t, err)
		}
		return err == nil
	})
}

// runs waits until a machine has one process of each role. A starting process looks like the process that starts it.
func runs(t *testing.T, m *Machine, roles ...string) {
	t.Helper()
	for _, role := range roles {
		eventually(t, "one process of "+role+" runs on "+m.Name, func() bool { return len(m.Pids(role)) == 1 })
	}
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), readyTime)
	t.Cleanup(cancel)
	return ctx
}

func nodeReady(n *api.Node) (bool, error) {
	return len(n.Status.Disks) > 0 && n.Status.Disks[0].Ready, nil
}

// TestMachines: the machines of a cluster are separate, and each fault of the harness has an effect.
func TestMachines(t *testing.T) {
	c := start(t, Options{Nodes: 2, Controllers: 1, Disks: []Disk{{}, {Size: 64 << 20}}})
	one, two := c.Nodes[0], c.Nodes[1]
	for _, m := range c.Nodes {
		n, err := await.Until(soon(t), c.Objects, m.Name, nodeReady)
		must(t, err)
		if len(n.Status.Addresses) != 1 || n.Status.Addresses[0] != m.IP {
			t.Errorf("%s has the addresses %v", m.Name, n.Status.Addresses)
		}
		runs(t, m, "serve", "data", "hold")
		_, err = await.Until(soon(t), c.Objects, m.Name, func(n *api.Node) (bool, error) {
			return len(n.Status.Disks) == 2 && n.Status.Disks[1].Ready, nil
		})
		must(t, err)
	}
	metrics := func(m *Machine) error {
		conn, err := net.DialTimeout("tcp", m.IP+":9100", 5*time.Second)
		if err == nil {
			err = conn.Close()
		}
		return err
	}
	answers := func() { eventually(t, one.Name+" answers", func() bool { return metrics(one) == nil }) }
	answers()
	owner := &Machine{}
	c.Net.Between(one, owner, Link{Cut: true})
	if err := metrics(one); err == nil {
		t.Error("a machine that is cut off answers")
	}
	c.Net.Between(one, owner, Link{Delay: 300 * time.Millisecond})
	began := time.Now()
	answers()
	if d := time.Since(began); d < 500*time.Millisecond {
		t.Errorf("with 300 ms each way a connection took %v", d)
	}
	c.Net.Heal()

	// A device works through kills and a change of the controller.
	c.command(t, "volume", "create", "v", "--size", "64Mi")
	var v api.Volume
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &v))
	var r api.Replica
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: v.Status.Members[0]}, &r))
	c.attach(t, "v", r.Spec.Node)
	at, other := one, two
	if r.Spec.Node == two.Name {
		at, other = two, one
	}
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "v"}, &a))
	write := func(what string) {
		t.Helper()
		f, err := os.OpenFile(a.Status.Device, os.O_RDWR|os.O_SYNC, 0)
		must(t, err)
		_, err = f.WriteAt([]byte(what), 0)
		must(t, errors.Join(err, f.Close()))
	}
	write("one")
	must(t, at.Kill("data"))
	write("two")
	must(t, at.Kill("serve"))
	at.Gone()
	must(t, at.Serve(t.Context()))
	write("three")
	must(t, other.PowerOff())
	must(t, other.PowerOn())
	must(t, other.Serve(t.Context()))

	// The API server is killed: an attached volume works; then the API server returns, and the other controller can
	// be elected.
	must(t, c.Control.Kill("serve"))
	c.Control.Gone()
	write("four")
	must(t, at.Kill("data"))
	write("five")
	must(t, c.Control.Serve(t.Context()))
	must(t, c.connect())
	c.command(t, "volume", "create", "w", "--size", "64Mi")
	c.detach(t, "v")

	small := c.Nodes[0].Disks[1]
	must(t, small.Fill())
	if err := os.WriteFile(small.View("x"), make([]byte, 1<<20), 0o600); err == nil {
		t.Error("a disk that was filled has room")
	}
	must(t, small.Free())
	must(t, small.Remove())
	_, err := await.Until(soon(t), c.Objects, c.Nodes[0].Name, func(n *api.Node) (bool, error) {
		return !n.Status.Disks[1].Ready, nil
	})
	must(t, err)
	must(t, small.Return())
	_, err = await.Until(soon(t), c.Objects, c.Nodes[0].Name, func(n *api.Node) (bool, error) {
		return n.Status.Disks[1].Ready, nil
	})
	must(t, err)
	must(t, small.ReadOnly())
	if err := os.WriteFile(small.View("x"), []byte("x"), 0o600); err == nil {
		t.Error("a read-only disk can be written")
	}
}

// TestImagesTravel: a node copies an image from another node with a copy, and the source is read once. After a node's
// death the image has as many copies as wanted.
func TestImagesTravel(t *testing.T) {
	content := make([]byte, 48<<20)
	for i := range content { // neither holes nor the same everywhere
		content[i] = byte(i>>12) ^ byte(i*7)
	}
	var asked atomic.Int64
	var gone atomic.Bool
	c := start(t, Options{Nodes: 3})
	ln, err := net.Listen("tcp", c.OwnerIP()+":0")
	must(t, err)
	src := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			asked.Add(1)
		}
		if gone.Load() {
			http.Error(w, "it is gone", http.StatusNotFound)
			return
		}
		http.ServeContent(w, r, "golden.img", time.Time{}, bytes.NewReader(content))
	}))
	src.Listener = ln
	src.Start()
	defer src.Close()
	c.command(t, "image", "import", src.URL+"/golden.img", "--name", "golden")
	first := asked.Load()
	img := ready(t, c, "golden", 1)
	origin := img.Status.Copies[0].Node

	edit(t, c, img, func(img *api.BackingImage) { img.Spec.MinNumberOfCopies = 2 })
	ready(t, c, "golden", 2)

	// A volume on a node without a copy causes a copy there.
	bare := ""
	img = ready(t, c, "golden", 2)
	for _, m := range c.Nodes {
		if !slices.ContainsFunc(img.Status.Copies, func(s api.ImageCopySummary) bool { return s.Node == m.Name }) {
			bare = m.Name
		}
	}
	v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, BackingImage: "golden", Nodes: []string{bare}}}
	v.Name = "there"
	must(t, c.Objects.Create(t.Context(), v))
	_, err = await.Until(soon(t), c.Objects, "there", func(v *api.Volume) (bool, error) {
		return len(v.Status.Members) == 1, nil
	})
	must(t, err)
	ready(t, c, "golden", 3)
	c.attach(t, "there", bare)
	var a api.Attachment
	must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "there"}, &a))
	got := make([]byte, len(content))
	dev, err := os.Open(a.Status.Device)
	must(t, err)
	_, err = io.ReadFull(dev, got)
	must(t, errors.Join(err, dev.Close()))
	if !bytes.Equal(got, content) {
		t.Error("the volume does not read what the image holds")
	}
	c.detach(t, "there")
	if n := asked.Load(); n != first {
		t.Errorf("the source was asked %d times more", n-first)
	}

	// The first copy's node dies for good: the other nodes have enough copies, and repair a damaged copy from the
	// other copy.
	var left *Machine
	for _, m := range c.Nodes {
		switch m.Name {
		case origin:
			must(t, m.PowerOff())
		case bare:
		default:
			left = m
		}
	}
	gone.Store(true) // the source, too: a node may read the source while the dead node seems to have a copy
	n, err := left.Disks[0].Corrupt("layers/*/data", 4<<20, 512)
	must(t, err)
	if n == 0 {
		t.Fatal("no layer to corrupt")
	}
	c.command(t, "image", "verify", "golden", "--background")
	whole := func() bool {
		files, _ := filepath.Glob(left.Disks[0].View("layers/*/data"))
		if len(files) != 1 {
			return false
		}
		got, err := os.ReadFile(files[0])
		return err == nil && len(got) >= len(content) && bytes.Equal(got[:len(content)], content)
	}
	eventually(t, "the damaged copy is mended", func() bool {
		var i api.BackingImage
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: "golden"}, &i))
		at := slices.IndexFunc(i.Status.Copies, func(s api.ImageCopySummary) bool { return s.Node == left.Name })
		return at >= 0 && i.Status.Copies[at].State == api.ImageReady && whole()
	})
}

// ready waits until an image has as many copies.
func ready(t *testing.T, c *Cluster, image string, copies int32) *api.BackingImage {
	t.Helper()
	i, err := await.Until(soon(t), c.Objects, image, func(i *api.BackingImage) (bool, error) {
		return i.Status.State == api.ImageReady && i.Status.ReadyCopies >= copies, nil
	})
	if err != nil {
		t.Fatalf("image %s: %v", image, err)
	}
	return i
}
