// Package kubeapi is the API server inside Drover: k8s.io/apiextensions-apiserver over an embedded etcd, for machines
// without Kubernetes and for tests. Package kubeapi owns <dir>/pki, <dir>/etcd, <dir>/etcd-snapshots,
// <dir>/etcd-lineage.json, <dir>/kubeconfig and <dir>/join.kubeconfig.
//
// Invariants: by default the server listens on loopback alone. Every request carries the token of <dir>/pki/token.
// Port, token and authority survive restarts, so that kubeconfigs and clients stay valid. A flock keeps other processes
// out of the folder. Every answered write is on disk (etcd syncs every commit). A server for several machines has a
// watch cache, which decodes a change once instead of once for each watch; for one machine the cache would cost more
// memory than the cache saves work.
//
// Goroutines: Start's context owns all goroutines; Server.Wait returns after the last.
package kubeapi

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	noopoteltrace "go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sys/unix"
	apixv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apiserver"
	crdopts "k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	generatedopenapi "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/apiserver/pkg/util/openapi"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/kubernetes/scheme"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"

	"drover.io/drover/api"
)

// Options configure the server.
type Options struct {
	// Dir is the state folder, on a local file system. Start creates the folder.
	Dir string
	// Listen is the address, or address:port, for other machines; empty: loopback alone. Without a port the server
	// picks a free port once and keeps the port. Names are the names and addresses in the certificate for other
	// machines; the first appears in JoinKubeconfig.
	Listen string
	Names  []string
	// Log is the server's log; nil means slog.Default().
	Log *slog.Logger
	// QuotaBytes bounds the database; 0 means 1 GiB.
	QuotaBytes int64
	// KeepEvents and MaxEvents bound the stored events; 0 means 24 h and 2000.
	KeepEvents time.Duration
	MaxEvents  int
	// MaintainEvery is the interval in which the server prunes events, checks the quota and takes due snapshots;
	// 0 means 10 min.
	MaintainEvery time.Duration
	// Compact is the interval of compactions of the history; 0 means 5 min. Watches may start within the last interval.
	Compact time.Duration
	// Volatile leaves writes in the page cache: writes survive the process, but no power loss. Tests make a thousand
	// small changes and keep nothing.
	Volatile bool
}

// Server is a running API server.
type Server struct {
	// Config is for clients on this machine, also in this process. Config has no client-side rate limit.
	Config *rest.Config
	// Kubeconfig is the path of the kubeconfig file, readable by its owner alone.
	Kubeconfig string
	// JoinKubeconfig is the path of the kubeconfig for other machines; empty if the server listens on loopback alone.
	JoinKubeconfig string
	// WentBack is set if the state is older than the state that this folder served last, or another state. Older
	// clients must start again, because their watches ask for missing revisions.
	WentBack bool

	id    *identity
	store *store
	log   *slog.Logger
	wg    sync.WaitGroup
	stop  context.CancelFunc
	once  sync.Once
	err   error
	lock  *os.File
}

// services refuses webhooks that point at Services, because the server has no Services.
type services struct{}

func (services) ResolveEndpoint(namespace, name string, _ int32) (*url.URL, error) {
	return nil, fmt.Errorf("no Service %s/%s: the embedded API server has no Services", namespace, name)
}

// Start runs the server until ctx ends and returns once the server serves every kind of Drover. The caller cancels ctx
// and then calls Wait.
func Start(ctx context.Context, o Options) (_ *Server, err error) {
	o = o.withDefaults()
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, api.Errorf(api.Unavailable, "state folder: %w", err)
	}
	lock, err := takeLock(o.Dir)
	if err != nil {
		return nil, err
	}
	run, stop := context.WithCancel(ctx)
	s := &Server{log: o.Log, stop: stop, lock: lock, Kubeconfig: filepath.Join(o.Dir, "kubeconfig")}
	defer func() {
		if err != nil {
			stop()
			_ = s.Wait()
			err = fmt.Errorf("embedded API server in %s: %w", o.Dir, err)
		}
	}()

	id, err := openIdentity(o.Dir, o.Listen, o.Names)
	if err != nil {
		return nil, err
	}
	s.id = id
	ln, err := id.listenPort()
	if err != nil {
		return nil, err
	}
	s.store, err = openStore(ctx, o)
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	if s.WentBack, err = s.store.checkLineage(ctx, o.Dir); err != nil {
		_ = ln.Close()
		return nil, err
	}
	if s.WentBack {
		o.Log.Warn("the state of the API is empty, or older than the last state that was served from this folder: " +
			"`drover recover` compares the state with the disks")
	}
	if err := s.store.moveGroup(ctx); err != nil {
		_ = ln.Close()
		return nil, err
	}

	rc := genericapiserver.NewRecommendedConfig(apiserver.Codecs)
	rc.EffectiveVersion = compatibility.DefaultBuildEffectiveVersion()
	rc.SecureServing = &genericapiserver.SecureServingInfo{Listener: ln, Cert: id.serving, MinTLSVersion: 0x0304}
	s.Config = id.clientConfig()
	loopback := rest.CopyConfig(s.Config)
	loopback.BearerToken = randomToken()
	rc.LoopbackClientConfig = loopback
	rc.Authentication.Authenticator = bearertoken.New(id)
	rc.Authorization.Authorizer = authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)
	rc.AdmissionControl = untracked{}
	rc.EnableProfiling = false
	defs := openapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(withCore(generatedopenapi.GetOpenAPIDefinitions))
	namer := openapinamer.NewDefinitionNamer(apiserver.Scheme, scheme.Scheme)
	rc.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(defs, namer)
	rc.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(defs, namer)
	rc.MergedResourceConfig = apiserver.DefaultAPIResourceConfigSource()

	storage := genericoptions.NewEtcdOptions(storagebackend.NewDefaultConfig("/registry",
		apiserver.Codecs.LegacyCodec(apixv1.SchemeGroupVersion)))
	storage.StorageConfig.Transport.ServerList = []string{s.store.endpoint}
	// Nothing reads the metric of object counts, and its polling is idle load.
	storage.StorageConfig.CountMetricPollPeriod = 0
	storage.StorageConfig.CompactionInterval = o.Compact
	storage.EnableWatchCache = o.Listen != ""
	if err := storage.ApplyTo(&rc.Config); err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	disc := &finder{}
	if disc.uploads, err = newUploads(s.Config); err != nil {
		_ = ln.Close()
		return nil, err
	}
	rc.LongRunningFunc = longRunning(rc.LongRunningFunc)
	chain := rc.BuildHandlerChainFunc
	rc.BuildHandlerChainFunc = func(h http.Handler, c *genericapiserver.Config) http.Handler {
		disc.next = h
		return chain(disc, c)
	}
	cfg := &apiserver.Config{GenericConfig: rc, ExtraConfig: apiserver.ExtraConfig{
		CRDRESTOptionsGetter: crdopts.NewCRDRESTOptionsGetter(*storage, nil, rc.StorageObjectCountTracker),
		MasterCount:          1,
		ServiceResolver:      services{},
		AuthResolverWrapper: webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, loopback,
			noopoteltrace.NewTracerProvider()),
	}}
	srv, err := cfg.Complete().New(genericapiserver.NewEmptyDelegate())
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	events, err := eventsclient.NewForConfig(s.Config)
	if err == nil {
		err = installCore(srv.GenericAPIServer, s.store.endpoint, eventView{events})
	}
	if err != nil {
		_ = ln.Close()
		return nil, err
	}
	disc.groups = srv.GenericAPIServer.AggregatedDiscoveryGroupManager
	// Watches never end by themselves, so a stop does not wait for watches.
	srv.GenericAPIServer.ShutdownTimeout = 300 * time.Millisecond

	prepared := srv.GenericAPIServer.PrepareRun()
	s.wg.Go(func() {
		if err := prepared.RunWithContext(run); err != nil {
			s.recordFailure(fmt.Errorf("API server: %w", err))
		}
		stop()
	})
	if err := InstallCRDs(run, s.Config); err != nil {
		return nil, err
	}
	if err := id.writeKubeconfig(s.Kubeconfig, id.localURL()); err != nil {
		return nil, err
	}
	if url := id.joinURL(); url != "" {
		s.JoinKubeconfig = filepath.Join(o.Dir, "join.kubeconfig")
		if err := id.writeKubeconfig(s.JoinKubeconfig, url); err != nil {
			return nil, err
		}
	}
	s.wg.Go(func() { s.maintainState(run, o) })
	return s, nil
}

// Wait returns after the server's end: nil after a requested stop, otherwise the cause.
func (s *Server) Wait() error {
	s.wg.Wait()
	s.stop()
	s.once.Do(func() {
		if s.store != nil {
			s.store.close()
		}
		_ = s.lock.Close()
	})
	return s.err
}

// recordFailure records the first error. Only the server's goroutine calls recordFailure, before Wait can return.
func (s *Server) recordFailure(err error) {
	s.err = err
	s.log.Error("embedded API server failed", "err", err)
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.QuotaBytes == 0 {
		o.QuotaBytes = 1 << 30
	}
	if o.KeepEvents == 0 {
		o.KeepEvents = 24 * time.Hour
	}
	if o.MaxEvents == 0 {
		o.MaxEvents = 2000
	}
	if o.Compact == 0 {
		o.Compact = storagebackend.DefaultCompactInterval
	}
	if o.MaintainEvery == 0 {
		o.MaintainEvery = 10 * time.Minute
	}
	return o
}

// takeLock makes this process the only process in the folder. The kernel releases the lock at the end of the process.
func takeLock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "kubeapi.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "state folder: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, api.Errorf(api.InUse,
			"state folder %s is in use by another process: stop it, or choose another folder", dir)
	}
	return f, nil
}

func randomToken() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}
