package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// Options describe a cluster.
type Options struct {
	Binary string // path of drover
	Nodes  int    // machines with the roles node and data; 0: 3
	// Disks of each node; none: one folder.
	Disks []Disk
	// AllRoles also gives the control machine the roles of a node, with a folder as disk.
	AllRoles bool
	// Controllers is the number of further machines with the controller role. All controllers stand for election.
	Controllers int
	// Settings are Drover's settings. By default a cluster takes any disk, however full.
	Settings map[string]string
	// Heartbeat is the interval of the nodes' heartbeats; a node is silent after four intervals; 0: Drover's default.
	Heartbeat time.Duration
	// Off has the caller run drover: the cluster only creates its machines.
	Off bool
	// Args are further arguments of every `serve`.
	Args []string
	Log  io.Writer // nil: none
}

// Disk describes a disk of a node.
type Disk struct {
	Size int64  // of a file system of its own; 0: a folder of the machine
	FS   string // ext4 (default) or xfs
	Tags []string
}

// Cluster is a control machine with the API server and the controller, and nodes.
type Cluster struct {
	Dir     string
	Control *Machine
	Nodes   []*Machine
	Others  []*Machine // further controllers
	Net     *Network
	Objects client.WithWatch
	// Kubeconfig works on this machine, for kubectl and drover.
	Kubeconfig string

	opts   Options
	lock   *os.File
	subnet net.IP
	births chan func() // run on a thread that lives as long as the cluster
	wg     sync.WaitGroup
}

// prefix of the folders of all clusters.
const prefix = "drover-c-"

// Start creates a cluster and returns when all machines are ready.
func Start(ctx context.Context, o Options) (_ *Cluster, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a cluster has networks, mounts and devices of its own: run this as root")
	}
	if o.Nodes == 0 {
		o.Nodes = 3
	}
	if len(o.Disks) == 0 {
		o.Disks = []Disk{{}}
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	c := &Cluster{opts: o, Net: newNetwork(), births: make(chan func())}
	if err := c.begin(); err != nil {
		return nil, err
	}
	c.wg.Add(1)
	alone := make(chan error, 1)
	go func() {
		defer c.wg.Done()
		runtime.LockOSThread() // without an unlock: the thread does nothing else, and ends with this goroutine
		alone <- ownMounts()
		for f := range c.births {
			f()
		}
	}()
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := <-alone; err != nil {
		return nil, err
	}
	if err := c.connectOwner(); err != nil {
		return nil, err
	}
	return c, c.bringUp(ctx)
}

// beginning serialises the start of clusters in this process, so that a cluster neither sweeps up an unfinished cluster
// nor takes its network.
var beginning sync.Mutex

// begin creates the cluster's folder.
func (c *Cluster) begin() (err error) {
	beginning.Lock()
	defer beginning.Unlock()
	Sweep(c.opts.Log)
	for {
		if c.Dir, err = os.MkdirTemp("", prefix); err != nil {
			return err
		}
		// The sweep of another process may lock and remove the new folder first.
		if c.lock, err = lockDir(c.Dir, os.O_CREATE); !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
	}
}

// connectOwner finds a network. A new card has the mask of its class for a moment, which covers every candidate, so
// connectOwner holds beginning.
func (c *Cluster) connectOwner() (err error) {
	beginning.Lock()
	defer beginning.Unlock()
	if c.subnet, err = freeSubnet(); err != nil {
		return err
	}
	return c.plugOwner()
}

// plugOwner gives this process an address in the cluster's network.
func (c *Cluster) plugOwner() error {
	name := "dr" + strings.TrimPrefix(filepath.Base(c.Dir), prefix)
	fd, err := newTap(name[:min(len(name), unix.IFNAMSIZ-1)], c.address(254), [4]byte{255, 255, 255, 0})
	if err != nil {
		return err
	}
	c.Net.plug("", fd)
	return nil
}

func (c *Cluster) address(host byte) [4]byte {
	return [4]byte{c.subnet[0], c.subnet[1], c.subnet[2], host}
}

// OwnerIP returns this process's address in the cluster's network.
func (c *Cluster) OwnerIP() string {
	a := c.address(254)
	return net.IP(a[:]).String()
}

func (c *Cluster) bringUp(ctx context.Context) (err error) {
	if c.Control, err = c.machine("control", 1); err != nil {
		return err
	}
	args := []string{"--roles", "controller", "--api-listen", c.Control.IP + ":6443"}
	if c.opts.AllRoles {
		if err := c.Control.addDisk(Disk{}); err != nil {
			return err
		}
		args = []string{"--api-listen", c.Control.IP + ":6443", "--disk", c.Control.Disks[0].Path}
	}
	c.Kubeconfig = filepath.Join(c.Control.Dir, "state", "kubeconfig")
	if c.opts.Off {
		return c.createNodes()
	}
	if err := c.Control.Serve(ctx, args...); err != nil {
		return err
	}
	if err := c.connect(); err != nil {
		return err
	}
	settings := map[string]string{"storage-minimal-available-percentage": "0",
		"storage-over-provisioning-percentage": "100000", "allow-private-image-sources": "true"}
	for k, v := range c.opts.Settings {
		settings[k] = v
	}
	for k, v := range settings {
		if err := c.Set(ctx, k, v); err != nil {
			return err
		}
	}
	for i := range c.opts.Controllers {
		m, err := c.machine(fmt.Sprintf("control-%d", i+2), byte(100+i))
		if err != nil {
			return err
		}
		c.Others = append(c.Others, m)
		if err := m.Serve(ctx, "--roles", "controller", "--kubeconfig", c.join()); err != nil {
			return err
		}
	}
	if err := c.createNodes(); err != nil {
		return err
	}
	errs := make([]error, len(c.Nodes))
	var all sync.WaitGroup
	for i, m := range c.Nodes {
		all.Add(1)
		go func() {
			defer all.Done()
			errs[i] = c.ServeNode(ctx, m)
		}()
	}
	all.Wait()
	return errors.Join(errs...)
}

// createNodes creates the machines of the nodes, with their disks, without drover.
func (c *Cluster) createNodes() error {
	for i := range c.opts.Nodes {
		m, err := c.machine(fmt.Sprintf("node-%d", i+1), byte(11+i))
		if err != nil {
			return err
		}
		c.Nodes = append(c.Nodes, m)
		for _, d := range c.opts.Disks {
			if err := m.addDisk(d); err != nil {
				return err
			}
		}
	}
	return nil
}

// join returns the kubeconfig for all machines except the control machine.
func (c *Cluster) join() string { return filepath.Join(c.Control.Dir, "state", "join.kubeconfig") }

// ServeNode runs drover on a node and waits until the node's disks are ready.
func (c *Cluster) ServeNode(ctx context.Context, m *Machine) error {
	args := []string{"--roles", "node,data", "--kubeconfig", c.join()}
	if c.opts.Heartbeat > 0 {
		args = append(args, "--heartbeat", c.opts.Heartbeat.String())
	}
	for _, d := range m.Disks {
		args = append(args, "--disk", strings.Join(append([]string{d.Path}, d.Tags...), ","))
	}
	if err := m.Serve(ctx, args...); err != nil {
		return err
	}
	if c.Objects == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	_, err := await.Until(ctx, c.Objects, m.Name, func(n *api.Node) (bool, error) {
		ready := 0
		for _, d := range n.Status.Disks {
			if d.Ready {
				ready++
			}
		}
		return ready >= len(m.Disks), nil
	})
	if err != nil {
		return fmt.Errorf("the disks of %s are not ready: %w\n%s", m.Name, err, m.LogTail())
	}
	return nil
}

// connect creates the owner's client.
func (c *Cluster) connect() error {
	cfg, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return err
	}
	cfg.QPS = -1
	s := kruntime.NewScheme()
	if err := errors.Join(api.AddToScheme(s), clientscheme.AddToScheme(s)); err != nil {
		return err
	}
	objects, err := client.NewWithWatch(cfg, client.Options{Scheme: s})
	if err == nil {
		c.Objects = patient(objects)
	}
	return err
}

// Set changes a setting of Drover.
func (c *Cluster) Set(ctx context.Context, name, value string) error {
	s := &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}
	err := c.Objects.Create(ctx, s)
	if apierrors.IsAlreadyExists(err) {
		_, err = await.Edit(ctx, c.Objects, name, func(s *api.Setting) (bool, error) { s.Value = value; return true, nil })
	}
	if err != nil {
		return fmt.Errorf("setting %s: %w", name, err)
	}
	return nil
}

// Machines returns all machines, first the control machine.
func (c *Cluster) Machines() []*Machine {
	var all []*Machine
	if c.Control != nil {
		all = append(all, c.Control)
	}
	return append(append(all, c.Others...), c.Nodes...)
}

// Close stops all machines as if by power loss, and removes the files of the cluster.
func (c *Cluster) Close() error {
	var errs []error
	for _, m := range c.Machines() {
		errs = append(errs, m.PowerOff())
	}
	c.Net.close()
	close(c.births)
	c.wg.Wait()
	errs = append(errs, remove(c.Dir), c.lock.Close())
	return errors.Join(errs...)
}

// lockDir marks a cluster's folder as alive, and fails if another process holds the mark.
func lockDir(dir string, flags int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "alive"), os.O_RDWR|flags, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// readyTime exceeds the start of a machine on a computer with ten times its load.
const readyTime = 5 * time.Minute
