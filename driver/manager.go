package driver

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"drover.io/drover/api"
	"drover.io/drover/block/wire"
)

// inCluster stands for the kubeconfig of the pod's service account.
const inCluster = "in-cluster"

func loadConfig(path string) (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if path == inCluster {
		cfg, err = rest.InClusterConfig()
	} else {
		cfg, err = clientcmd.BuildConfigFromFlags("", path)
	}
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "kubeconfig %s: %w", path, err)
	}
	cfg.QPS = -1 // the server limits the rate
	cfg.UserAgent = "drover"
	cfg.Dial = wire.NewDialer().DialContext
	return cfg, nil
}

// instanceName identifies a Drover on the machine. All processes of a node have the same instance.
func instanceName(node string, cfg *rest.Config) string { return "node " + node + " of " + cfg.Host }

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	// Events need types for references; leases need their own type.
	if err := errors.Join(api.AddToScheme(s), clientscheme.AddToScheme(s)); err != nil {
		panic(err) // a kind registered twice, which every test would find
	}
	return s
}()

// newRESTMapper knows Drover's kinds and the kinds of their references. So no start needs a discovery, or a reachable
// server.
func newRESTMapper(*rest.Config, *http.Client) (meta.RESTMapper, error) {
	m := meta.NewDefaultRESTMapper(nil)
	for kind := range scheme.KnownTypes(api.GroupVersion) {
		m.Add(api.GroupVersion.WithKind(kind), meta.RESTScopeRoot)
	}
	for _, kind := range []string{"Secret", "PersistentVolumeClaim"} {
		m.Add(corev1.SchemeGroupVersion.WithKind(kind), meta.RESTScopeNamespace)
	}
	return m, nil
}

// newClient creates a client without a cache.
func newClient(cfg *rest.Config) (client.WithWatch, error) {
	m, err := newRESTMapper(nil, nil)
	if err != nil {
		return nil, err
	}
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme, Mapper: m})
	if err != nil {
		return nil, fmt.Errorf("client of %s: %w", cfg.Host, err)
	}
	return c, nil
}

// eventPatches changes the patch type with which the recorder counts a repeated event to a type of custom resources.
// Both types mean the same for an event.
type eventPatches struct{ http.RoundTripper }

func (e eventPatches) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/events/") &&
		r.Header.Get("Content-Type") == string(types.StrategicMergePatchType) {
		r = r.Clone(r.Context())
		r.Header.Set("Content-Type", string(types.MergePatchType))
	}
	return e.RoundTripper.RoundTrip(r)
}

// withEvents returns cfg for a manager that records events.
func withEvents(cfg *rest.Config) *rest.Config {
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return eventPatches{rt} })
	return cfg
}

// managerOptions are common to the managers of all roles. This package serves metrics once, for the whole process.
func managerOptions() ctrl.Options {
	yes, grace := true, 15*time.Second
	return ctrl.Options{
		Scheme:                  scheme,
		MapperProvider:          newRESTMapper,
		Metrics:                 metricsserver.Options{BindAddress: "0"},
		GracefulShutdownTimeout: &grace,
		// Managed fields are half the size of an object, and no reconciler reads managed fields.
		Cache: cache.Options{DefaultTransform: cache.TransformStripManagedFields()},
		Controller: config.Controller{
			SkipNameValidation: &yes,
			// Attached volumes keep working while the server is unreachable, however long.
			CacheSyncTimeout: 10 * 365 * 24 * time.Hour,
		},
	}
}
