package driver

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/backups"
	"drover.io/drover/block/wire"
	"drover.io/drover/controller"
	"drover.io/drover/driver/cli"
	"drover.io/drover/driver/kubeapi"
	"drover.io/drover/identity"
	"drover.io/drover/imagestore"
	"drover.io/drover/imagestore/host"
	"drover.io/drover/node"
	"drover.io/drover/replicas"
	"drover.io/drover/replicas/disks"
)

// notifyVariable is the environment variable in which systemd names the socket for sd_notify(3).
const notifyVariable = "NOTIFY_SOCKET"

// server is a run of serve.
type server struct {
	*serveOptions
	log   *slog.Logger
	out   func(format string, args ...any)
	began time.Time
	ready atomic.Bool
	// adopted is set if an earlier serve left the data and hold processes alive.
	adopted atomic.Bool
	cfg     *rest.Config
	client  client.WithWatch
	kube    *kubeapi.Server // nil with --kubeconfig
	disks   *disks.Registry // nil without the node role
	// identity authenticates this node to other nodes; nil without the node role.
	identity *wire.Identity
	// notifySocket is the socket on which systemd hears the state; empty elsewhere.
	notifySocket string

	apis, work, children *group // end in the order work, children, apis
	stop                 context.CancelCauseFunc
}

// collectAt sets the growth of the heap, in percent, that starts a garbage collection, unless GOGC says otherwise.
func collectAt(percent int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(percent)
	}
}

func (o *serveOptions) runServe(ctx context.Context, c *cobra.Command) (err error) {
	if os.Geteuid() != 0 && (o.onNode || o.data) {
		return api.Errorf(api.Denied, "devices and mounts need root: run this as root")
	}
	log, err := newLogger(c.ErrOrStderr(), o.logLevel, o.logFormat)
	if err != nil {
		return err
	}
	collectAt(400) // until ready: collections take a fifth of the start
	s := &server{serveOptions: o, log: log, began: time.Now(),
		out: func(format string, args ...any) { fmt.Fprintf(c.OutOrStdout(), format+"\n", args...) }}
	s.takeNotifySocket()
	lock, err := openState(o.stateDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	socket, err := listenCSI(o.csi)
	if err != nil {
		return err
	}
	defer func() { _ = socket.Close() }()

	ctx, s.stop = context.WithCancelCause(ctx)
	defer s.stop(nil)
	// The end has an order, so no group follows ctx by itself.
	s.apis, s.work = newGroup(context.Background()), newGroup(context.Background())
	s.children = newGroup(context.Background())
	gs, err := s.startParts(ctx, socket)
	if err == nil {
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
			err = cause
		}
		s.log.Info("stopping")
		stopping.Store(true)
		s.notifySystemd(daemon.SdNotifyStopping)
	}
	return errors.Join(err, s.stopParts(gs))
}

// startParts starts all parts in the order of their dependencies.
func (s *server) startParts(ctx context.Context, socket net.Listener) (gs *grpc.Server, err error) {
	if s.data {
		s.startChild(&child{role: "hold", output: "hold.log", args: []string{"--socket", holdSocket(s.stateDir)}})
	}
	kubeconfig, err := s.connectAPI(ctx)
	if err != nil {
		return nil, err
	}
	if s.client, err = newClient(s.cfg); err != nil {
		return nil, err
	}
	if s.data {
		s.startChild(&child{role: "data", output: "data.err", apiServer: s.cfg.Host, renew: true, inPath: true,
			anew: s.kube != nil && s.kube.WentBack,
			args: []string{"--state-dir", s.stateDir, "--kubeconfig", kubeconfig, "--node", s.node,
				"--listen", s.nodeAddress(), "--log-level", s.logLevel, "--log-format", s.logFormat}})
	}
	elected, err := s.needsElection(ctx)
	if err != nil {
		return nil, err
	}
	mgr, err := s.newManager(ctx, s.controller && !elected)
	if err != nil {
		return nil, err
	}
	s.runBackground(s.work, mgr.Start)
	if elected {
		s.runBackground(s.work, s.leadController)
	}

	d := doors{identity: identity.New(cli.BuildVersion(), s.ready.Load)}
	if s.controller {
		c := controller.New(s.client, mgr.GetEventRecorder("drover-csi"))
		d.controller, d.metadata = c, controller.NewMetadata(c, s.openChanges)
	}
	if s.onNode {
		d.node = node.New(s.client, s.node)
	}
	gs = newServer(d, s.log)
	s.runBackground(s.work, func(context.Context) error { return serveDoors(gs, socket) })
	address, err := s.listenMetrics()
	if err != nil {
		return gs, err
	}
	if err := s.awaitReady(ctx, mgr); err != nil {
		return gs, err
	}
	s.ready.Store(true)
	s.announceReady(kubeconfig, address)
	collectAt(50) // an idle process allocates little
	s.runBackground(s.work, releaseMemory)
	return gs, nil
}

// serveDoors serves until the server stops; the stop may come first.
func serveDoors(gs *grpc.Server, on net.Listener) error {
	if err := gs.Serve(on); !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

// connectAPI uses the given API server or starts the embedded server, and returns the path of the kubeconfig.
func (s *server) connectAPI(ctx context.Context) (kubeconfig string, err error) {
	if s.kubeconfig == "" {
		s.kube, err = kubeapi.Start(s.apis.ctx, kubeapi.Options{Dir: s.stateDir, Log: s.log, Listen: s.apiListen,
			Names: s.apiServerNames()})
		if err != nil {
			return "", err
		}
		s.apis.run(func(context.Context) error {
			err := s.kube.Wait()
			s.stop(err)
			return err
		})
		s.cfg = s.kube.Config
		return s.kube.Kubeconfig, nil
	}
	if s.cfg, err = loadConfig(s.kubeconfig); err != nil {
		return "", err
	}
	if s.controller {
		if err := kubeapi.InstallCRDs(ctx, s.cfg); err != nil {
			return "", fmt.Errorf("API server %s: %w", s.cfg.Host, err)
		}
	}
	return s.kubeconfig, nil
}

// apiServerNames returns the names under which other machines reach the embedded API server.
func (s *server) apiServerNames() []string {
	if s.apiListen == "" || len(s.apiNames) > 0 {
		return s.apiNames
	}
	host, _, err := net.SplitHostPort(s.apiListen)
	if err != nil {
		host = s.apiListen
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		return reachableAddresses()
	}
	return []string{host}
}

// newManager runs the reconcilers of this process's roles; the controller's only if no other process may be controller.
func (s *server) newManager(ctx context.Context, alone bool) (ctrl.Manager, error) {
	mgr, err := ctrl.NewManager(withEvents(s.cfg), managerOptions())
	if err != nil {
		return nil, fmt.Errorf("reconcilers: %w", err)
	}
	if alone {
		if err := s.setupController(mgr); err != nil {
			return nil, err
		}
	}
	if s.onNode || s.data {
		id, err := openNodeIdentity(s.stateDir, s.node)
		if err != nil {
			return nil, err
		}
		s.identity = id
		if err := setupApplicant(mgr, id); err != nil {
			return nil, fmt.Errorf("node reconcilers: %w", err)
		}
	}
	if s.onNode {
		if err := s.setupNode(ctx, mgr); err != nil {
			return nil, fmt.Errorf("node reconcilers: %w", err)
		}
	}
	return mgr, nil
}

func (s *server) setupNode(ctx context.Context, mgr ctrl.Manager) (err error) {
	list := s.parsed
	if len(list) == 0 {
		var n api.Node
		err := s.client.Get(ctx, client.ObjectKey{Name: s.node}, &n)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("node %s: %w", s.node, err)
		}
		if len(n.Spec.Disks) == 0 {
			list = []api.DiskSpec{{Path: filepath.Join(s.stateDir, "disk")}}
		}
	}
	layers, err := s.listenLayers()
	if err != nil {
		return err
	}
	s.disks, err = replicas.SetupNode(mgr, disks.Options{Name: s.node, Disks: list, Addresses: reachableAddresses(),
		LayerAddress: layers.Addr().String(),
		Version:      cli.BuildVersion(), Heartbeat: s.heartbeat, Log: s.log,
		Registry: disks.RegistryOptions{Instance: instanceName(s.node, s.cfg)}})
	if err != nil {
		return err
	}
	o := host.Options{Log: s.log, UploadListen: s.upload, Identity: s.identity, Layers: layers}
	if o.UploadHost, o.UploadCert, o.UploadCA, err = s.uploadServer(); err != nil {
		return err
	}
	if o.OpenBackup, err = backups.SetupNode(mgr, s.node, s.snapshotDisk, s.backupOptions()); err != nil {
		return err
	}
	return imagestore.SetupNode(mgr, s.node, s.disks.Layers, o)
}

// nodeAddress returns the address for other nodes, or "" without other nodes.
func (s *server) nodeAddress() string {
	switch all := reachableAddresses(); {
	case s.address != "":
		return s.address
	case s.kube != nil && s.apiListen == "" || len(all) == 0:
		return ""
	default:
		return all[0]
	}
}

// listenLayers opens the socket that serves layers to other nodes; without other nodes, to the data process of this
// node, which reads the layers of restores there.
func (s *server) listenLayers() (net.Listener, error) {
	at := cmp.Or(s.nodeAddress(), "127.0.0.1")
	ln, err := wire.Listen(net.JoinHostPort(at, "0"))
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "--node-address %s: %w", at, err)
	}
	return ln, nil
}

// uploadServer returns the name and the certificate for uploads to this node. With an embedded API server, the
// authority of the kubeconfig signs the certificate.
func (s *server) uploadServer() (host string, cert *tls.Certificate, ca []byte, err error) {
	all := reachableAddresses()
	if h, _, err := net.SplitHostPort(s.upload); err == nil {
		if host = h; host == "" || net.ParseIP(host).IsUnspecified() {
			if host = "127.0.0.1"; len(all) > 0 {
				host = all[0]
			}
		}
	}
	make := kubeapi.NewCertificate
	if s.kube != nil {
		make = s.kube.Certificate
	}
	c, ca, err := make(append([]string{host, s.node, "localhost", "127.0.0.1", "::1"}, all...)...)
	return host, &c, ca, err
}

// reachableAddresses returns the addresses of this machine that other machines may reach.
func reachableAddresses() []string {
	var out []string
	all, _ := net.InterfaceAddrs() // serve also works without known addresses
	for _, a := range all {
		if ip, ok := a.(*net.IPNet); ok && ip.IP.IsGlobalUnicast() {
			out = append(out, ip.IP.String())
		}
	}
	return out
}

// runBackground runs f in g. A failure of f stops serve.
func (s *server) runBackground(g *group, f func(context.Context) error) {
	g.run(func(ctx context.Context) error {
		err := f(ctx)
		if err != nil && ctx.Err() == nil {
			s.stop(err)
		}
		return err
	})
}

func (s *server) startChild(c *child) {
	c.stateDir, c.log, c.keep, c.adopted = s.stateDir, s.log, s.hasAttachments, &s.adopted
	s.runBackground(s.children, c.superviseProcess)
}

// hasAttachments reports whether a volume is attached here or may be. Then serve leaves the data path running.
func (s *server) hasAttachments() bool {
	if s.client == nil {
		return s.adopted.Load() // serve stops before the API was reachable
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var list api.AttachmentList
	if err := s.client.List(ctx, &list); err != nil {
		s.log.Warn("the data path stays: attachments cannot be listed", "err", err)
		return true
	}
	return slices.ContainsFunc(list.Items, func(a api.Attachment) bool {
		return a.Spec.Node == s.node && (a.Status.Device != "" || len(a.Finalizers) > 0)
	})
}

func (s *server) listenMetrics() (address string, err error) {
	if s.metrics == "off" {
		return "", nil
	}
	ln, err := net.Listen("tcp", s.metrics)
	if err != nil {
		return "", api.Errorf(api.Unavailable, "--metrics-listen %s: %w", s.metrics, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metricsHandler(s.log, gatherData(dataSocket(s.stateDir))))
	mux.Handle("GET /healthz", healthHandler(func() error { return nil }))
	mux.Handle("GET /readyz", healthHandler(s.checkHealth))
	s.runBackground(s.work, func(ctx context.Context) error { return serveHTTP(ctx, ln, mux) })
	return ln.Addr().String(), nil
}

func (s *server) checkHealth() error {
	switch {
	case !s.ready.Load():
		return errors.New("starting or stopping")
	case s.kube != nil:
		return s.kube.Healthy()
	}
	return nil
}

// awaitReady returns when the doors can serve requests: the caches of the reconcilers are filled.
func (s *server) awaitReady(ctx context.Context, mgr ctrl.Manager) error {
	if !mgr.GetCache().WaitForCacheSync(ctx) {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return api.Errorf(api.Unavailable, "API server %s: the objects cannot be read", s.cfg.Host)
	}
	if s.data {
		if err := awaitSocket(ctx, "unix", dataSocket(s.stateDir)); err != nil {
			return fmt.Errorf("the data process, see %s and data.err beside it: %w",
				filepath.Join(s.stateDir, "log", "data.log"), err)
		}
	}
	if s.onNode {
		return s.awaitNode(ctx)
	}
	return nil
}

// awaitNode returns when the node has reported its disks, so that the first volume finds a disk. An unusable disk does
// not stop serve.
func (s *server) awaitNode(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // on a busy machine
	defer cancel()
	looked := func(n *api.Node) (bool, error) {
		return !n.Status.Heartbeat.Time.Before(s.began.Truncate(time.Second)) &&
			len(n.Status.Disks) == len(n.Spec.Disks), nil
	}
	for {
		n, err := await.Until(ctx, s.client, s.node, looked)
		switch {
		case err == nil:
			for _, d := range n.Status.Disks {
				if !d.Ready {
					s.log.Error("a disk cannot be used", "path", d.Path, "why", d.Message)
				}
			}
			return nil
		case !isNotFound(err):
			return api.Errorf(api.Unavailable, "node %s does not become ready: %w", s.node, err)
		}
		select {
		case <-ctx.Done():
			return api.Errorf(api.Unavailable, "node %s does not register: %w", s.node, err)
		case <-time.After(20 * time.Millisecond): // the API cannot watch by name before the object exists
		}
	}
}

func (s *server) announceReady(kubeconfig, metrics string) {
	s.out("kubeconfig  %s", kubeconfig)
	if s.kube != nil && s.kube.JoinKubeconfig != "" {
		s.out("to join     %s", s.kube.JoinKubeconfig)
	}
	s.out("CSI socket  %s", s.csi)
	if metrics != "" {
		s.out("metrics     http://%s/metrics", metrics)
	}
	s.out("ready in %.1f s: node %s, roles %s", time.Since(s.began).Seconds(), s.node, strings.Join(s.roles, ","))
	s.notifySystemd(daemon.SdNotifyReady)
}

// takeNotifySocket keeps the socket of systemd from the API server, which would report itself as ready, and from the
// children, which outlive serve.
func (s *server) takeNotifySocket() {
	s.notifySocket = os.Getenv(notifyVariable)
	_ = os.Unsetenv(notifyVariable)
}

// notifySystemd tells systemd the state of a service with Type=notify. Elsewhere notifySystemd does nothing.
func (s *server) notifySystemd(state string) {
	if s.notifySocket == "" {
		return
	}
	err := os.Setenv(notifyVariable, s.notifySocket)
	if err == nil {
		_, err = daemon.SdNotify(true, state)
	}
	if err != nil {
		s.log.Warn("systemd was not notified", "state", state, "error", err)
	}
}

// stopParts stops the parts in order: new requests, the reconcilers, the data path, and the API last.
func (s *server) stopParts(gs *grpc.Server) error {
	s.ready.Store(false)
	if gs != nil {
		force := time.AfterFunc(5*time.Second, gs.Stop)
		gs.GracefulStop()
		force.Stop()
	}
	s.work.cancel()
	err := s.work.wait()
	if s.disks != nil {
		err = errors.Join(err, s.disks.Close())
	}
	s.children.cancel()
	err = errors.Join(err, s.children.wait())
	s.apis.cancel()
	return errors.Join(err, s.apis.wait())
}

func isNotFound(err error) bool { return apierrors.IsNotFound(err) }
