package driver

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"drover.io/drover/api"
	"drover.io/drover/block/semaphore"
)

var csiSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
	Name:    "drover_csi_operation_seconds",
	Help:    "Time that CSI calls took, by method and gRPC code.",
	Buckets: []float64{.005, .02, .1, .5, 1, 2.5, 10, 60},
}, []string{"method", "code"})

func init() { metrics.Registry.MustRegister(csiSeconds) }

// doors are the CSI services of a process, nil for roles that the process lacks.
type doors struct {
	identity   csi.IdentityServer
	controller csi.ControllerServer
	node       csi.NodeServer
	metadata   csi.SnapshotMetadataServer
}

// newServer creates the gRPC server of all doors.
func newServer(d doors, log *slog.Logger) *grpc.Server {
	g := &guard{log: log}
	s := grpc.NewServer(grpc.UnaryInterceptor(g.interceptUnary), grpc.StreamInterceptor(g.interceptStream))
	csi.RegisterIdentityServer(s, d.identity)
	if d.controller != nil {
		csi.RegisterControllerServer(s, d.controller)
		if g, ok := d.controller.(csi.GroupControllerServer); ok {
			csi.RegisterGroupControllerServer(s, g)
		}
	}
	if d.metadata != nil {
		csi.RegisterSnapshotMetadataServer(s, d.metadata)
	}
	if d.node != nil {
		csi.RegisterNodeServer(s, d.node)
	}
	return s
}

// listenCSI opens the socket of a CSI endpoint (unix:///path or a path). listenCSI replaces a dead socket and refuses a
// socket that answers.
func listenCSI(endpoint string) (net.Listener, error) {
	file := strings.TrimPrefix(strings.TrimPrefix(endpoint, "unix://"), "unix:")
	if !filepath.IsAbs(file) || strings.Contains(endpoint, "://") && !strings.HasPrefix(endpoint, "unix://") {
		return nil, api.Errorf(api.Invalid, "CSI endpoint %q is not a unix socket: use unix:///path/to/csi.sock", endpoint)
	}
	if len(file) > 107 {
		return nil, api.Errorf(api.Invalid, "CSI socket %s: the path is longer than the 107 bytes that the kernel allows: "+
			"choose a shorter one with --csi-endpoint", file)
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return nil, api.Errorf(api.Unavailable, "CSI socket: %w", err)
	}
	if st, err := os.Lstat(file); err == nil {
		if st.Mode().Type() != os.ModeSocket {
			return nil, api.Errorf(api.Exists, "CSI socket %s exists and is not a socket: remove it", file)
		}
		conn, err := net.DialTimeout("unix", file, time.Second)
		if err == nil {
			_ = conn.Close()
			return nil, api.Errorf(api.InUse, "CSI socket %s is in use by another process: stop it, or choose another "+
				"one with --csi-endpoint", file)
		}
		if err := os.Remove(file); err != nil {
			return nil, api.Errorf(api.Unavailable, "stale CSI socket: %w", err)
		}
	}
	old := syscall.Umask(0o077)
	ln, err := net.Listen("unix", file)
	syscall.Umask(old)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "CSI socket %s: %w", file, err)
	}
	return ln, nil
}

// guard wraps every call: guard turns panics into errors and errors into codes, lets one call at a time change a
// volume, and logs the request without secrets.
type guard struct {
	log   *slog.Logger
	calls semaphore.Set[string] // one call at a time changes a volume
}

// changes lists the methods that change a volume. Methods of controller and node do not wait for each other, because an
// unpublish may wait for an unstage.
var changes = map[string]string{
	"CreateVolume": "c", "DeleteVolume": "c", "ControllerPublishVolume": "c", "ControllerUnpublishVolume": "c",
	"ControllerExpandVolume": "c", "ControllerModifyVolume": "c", "CreateSnapshot": "s", "DeleteSnapshot": "s",
	"CreateVolumeGroupSnapshot": "g", "DeleteVolumeGroupSnapshot": "g",
	"NodeStageVolume": "n", "NodeUnstageVolume": "n", "NodePublishVolume": "n", "NodeUnpublishVolume": "n",
	"NodeExpandVolume": "n",
}

func (g *guard) interceptUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any,
	error) {
	method, began := path.Base(info.FullMethod), time.Now()
	resp, err := g.callHandler(ctx, method, req, next)
	if err = g.reportCall(method, req, began, err); err != nil {
		return nil, err
	}
	return resp, nil
}

// interceptStream wraps the calls that answer with a stream.
func (g *guard) interceptStream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo,
	next grpc.StreamHandler) error {
	method, began := path.Base(info.FullMethod), time.Now()
	_, err := g.callHandler(s.Context(), method, nil, func(context.Context, any) (any, error) { return nil, next(srv, s) })
	return g.reportCall(method, nil, began, err)
}

// reportCall logs the end of a call, and gives the error a code.
func (g *guard) reportCall(method string, req any, began time.Time, err error) error {
	err = toStatus(err)
	took, code := time.Since(began), status.Code(err)
	csiSeconds.WithLabelValues(method, code.String()).Observe(took.Seconds())
	attrs := []any{"method", method, "request", sanitized{req}, "took", took}
	_, change := changes[method]
	switch {
	case code == codes.Internal || code == codes.DataLoss || code == codes.Unknown:
		g.log.Error("CSI call failed", append(attrs, "code", code.String(), "err", err)...)
	case err != nil:
		g.log.Warn("CSI call refused", append(attrs, "code", code.String(), "err", err)...)
	case change:
		g.log.Info("CSI call", attrs...)
	default:
		g.log.Debug("CSI call", attrs...)
	}
	return err
}

func (g *guard) callHandler(ctx context.Context, method string, req any, next grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		if p := recover(); p != nil {
			g.log.Error("CSI call panicked", "method", method, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("internal error in %s: %v", method, p)
		}
	}()
	if kind, ok := changes[method]; ok {
		if name := volumeOf(req); name != "" {
			done, err := g.calls.Acquire(ctx, kind+"/"+name, semaphore.Limit(1))
			if err != nil {
				return nil, api.Errorf(api.Busy, "volume %s: another operation is in progress: try again", name)
			}
			defer done()
		}
	}
	return next(ctx, req)
}

// volumeOf returns the volume id of a request, or the name of a volume without an id.
func volumeOf(req any) string {
	switch r := req.(type) {
	case interface{ GetVolumeId() string }:
		return r.GetVolumeId()
	case interface{ GetSnapshotId() string }:
		return r.GetSnapshotId()
	case interface{ GetGroupSnapshotId() string }:
		return r.GetGroupSnapshotId()
	case interface{ GetName() string }:
		return r.GetName()
	}
	return ""
}

// sanitized prints a request without secrets, and only when a log handler formats the record.
type sanitized struct{ req any }

func (s sanitized) LogValue() slog.Value {
	return slog.StringValue(protosanitizer.StripSecrets(s.req).String())
}
