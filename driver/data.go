package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"
	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/replicas"
	"drover.io/drover/replicas/device"
)

type dataOptions struct {
	stateDir, kubeconfig, node string
	listen                     string
	logLevel, logFormat        string
}

func dataCommand() *cobra.Command {
	o := dataOptions{}
	c := &cobra.Command{
		Use: "data", Hidden: true, Args: cobra.NoArgs,
		Short: "Serve replicas, engines and devices of this machine (started by serve)",
		RunE:  func(c *cobra.Command, _ []string) error { return o.runData(c.Context()) },
	}
	f := c.Flags()
	f.StringVar(&o.stateDir, "state-dir", cliDefaultState, "folder that serve keeps its state in")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig of the API server")
	f.StringVar(&o.node, "node", "", "name of this node")
	f.StringVar(&o.listen, "listen", "", "address for engines of other nodes that reach this node's replicas "+
		"(default: none)")
	addLogFlags(f, &o.logLevel, &o.logFormat)
	return c
}

// runData is the data process. First runData resumes the devices of the predecessor; the API comes after.
func (o dataOptions) runData(ctx context.Context) (err error) {
	file := openLogFile(filepath.Join(o.stateDir, "log", "data.log"))
	defer file.Close()
	log, err := newLogger(file, o.logLevel, o.logFormat)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			log.Error("the data process ends", "err", err)
		}
	}()
	log = log.With("role", "data", "pid", os.Getpid())
	slog.SetDefault(log)
	cfg, err := loadConfig(o.kubeconfig)
	if err != nil {
		return err
	}
	lock, err := claimRole(o.stateDir, "data", cfg.Host)
	if err != nil {
		return err
	}
	defer lock.Close()
	data, err := o.resumeDevices(ctx, log, instanceName(o.node, cfg))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	debug.SetGCPercent(50) // the parent disabled garbage collection for a fast resume

	mgr, err := ctrl.NewManager(withEvents(cfg), managerOptions())
	if err != nil {
		return fmt.Errorf("data reconcilers: %w", err)
	}
	if err := replicas.SetupData(mgr, data); err != nil {
		return fmt.Errorf("data reconcilers: %w", err)
	}
	ln, err := listenUnix(dataSocket(o.stateDir))
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metricsHandler(log))
	mux.HandleFunc("GET "+guestsPath, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(data.GuestIO())
	})
	g := newGroup(ctx)
	g.run(func(ctx context.Context) error { return serveHTTP(ctx, ln, mux) })
	g.run(mgr.Start)
	g.run(func(ctx context.Context) error {
		if !mgr.GetCache().WaitForCacheSync(ctx) {
			return nil
		}
		return releaseMemory(ctx)
	})
	return g.wait()
}

// resumeDevices takes over the devices of the predecessor.
func (o dataOptions) resumeDevices(ctx context.Context, log *slog.Logger, instance string) (*replicas.Data, error) {
	runDir := filepath.Join(o.stateDir, "run")
	if err := awaitSocket(ctx, "unixpacket", holdSocket(o.stateDir)); err != nil {
		return nil, fmt.Errorf("the hold process: %w", err)
	}
	host, err := device.Open(ctx, runDir)
	if err != nil {
		return nil, fmt.Errorf("devices: %w", err)
	}
	peers, err := o.peerOptions()
	if err != nil {
		return nil, errors.Join(err, host.Close())
	}
	data, err := replicas.NewData(replicas.DataOptions{Node: o.node, Host: host, Instance: instance, Log: log,
		Peers: peers})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("data role: %w", err), host.Close())
	}
	if err := data.Resume(ctx); err != nil {
		log.Error("not every device was resumed yet", "err", err)
	}
	return data, nil
}

// peerOptions returns the address and identity for connections between data processes of nodes.
func (o dataOptions) peerOptions() (p replicas.PeerOptions, err error) {
	if p.Identity, err = openNodeIdentity(o.stateDir, o.node); err != nil {
		return p, err
	}
	p.State = filepath.Join(o.stateDir, "run", "peers.json")
	if o.listen != "" {
		p.Listener, err = replicas.ListenPeers(o.listen, filepath.Join(o.stateDir, "run"))
	}
	return p, err
}

// awaitSocket returns when a process accepts connections on a socket: serve may have started the process a moment ago,
// after the end of another process.
func awaitSocket(ctx context.Context, network, path string) error {
	ctx, cancel := context.WithTimeout(ctx, stopGrace+10*time.Second)
	defer cancel()
	retry := time.NewTicker(10 * time.Millisecond)
	defer retry.Stop()
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, network, path)
		if err == nil {
			return c.Close()
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return api.Errorf(api.Unavailable, "no process answers at %s: %w", path, err)
		}
	}
}

func holdSocket(stateDir string) string { return filepath.Join(stateDir, "run", "hold.sock") }
func dataSocket(stateDir string) string { return filepath.Join(stateDir, "run", "data.sock") }

// listenUnix opens a socket for this user alone. One process of each role owns the folder, so an existing socket is
// stale.
func listenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.Unavailable, "stale socket: %w", err)
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "socket %s: %w", path, err)
	}
	return ln, nil
}
