package driver

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"drover.io/drover/api"
	"drover.io/drover/api/backlog"
	"drover.io/drover/block/wire"
)

// ourNamespace returns the namespace of the lease and of the nodes' authority: the pod's namespace, or default.
func ourNamespace(wish string) string {
	if wish != "" {
		return wish
	}
	if b, err := os.ReadFile("/var/run/secrets/kubernetes.io/serviceaccount/namespace"); err == nil {
		return strings.TrimSpace(string(b))
	}
	return metav1.NamespaceDefault
}

// openNodeIdentity opens the identity of this node. All processes of the node share the identity.
func openNodeIdentity(stateDir, node string) (*wire.Identity, error) {
	id, err := wire.OpenIdentity(filepath.Join(stateDir, "pki"), node)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "%w", err)
	}
	return id, nil
}

// issuer signs the requests of NodeCertificates. The controller role runs this reconciler.
type issuer struct {
	client    client.Client
	reader    client.Reader // the cache has no Secrets
	namespace string
	log       *slog.Logger
	seen      string // authority of all certificates at the last check
}

func setupIssuer(mgr ctrl.Manager, namespace string, log *slog.Logger) error {
	i := &issuer{client: mgr.GetClient(), reader: mgr.GetAPIReader(), namespace: namespace, log: log}
	return ctrl.NewControllerManagedBy(mgr).Named("certificate").For(&api.NodeCertificate{}).
		WithOptions(controller.Options{NewQueue: backlog.New}).Complete(i)
}

// Reconcile issues a certificate, or renews a certificate in time. A new authority makes Reconcile issue all
// certificates again, because nodes of two authorities refuse each other.
func (i *issuer) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	a, err := i.ensureAuthority(ctx)
	if err != nil {
		return reconcile.Result{}, err
	}
	if i.seen != string(a.PEM()) {
		var list api.NodeCertificateList
		if err := i.client.List(ctx, &list); err != nil {
			return reconcile.Result{}, err
		}
		for k := range list.Items {
			if _, err := i.issueCertificate(ctx, a, &list.Items[k]); err != nil {
				return reconcile.Result{}, err
			}
		}
		i.seen = string(a.PEM())
	}
	var c api.NodeCertificate
	if err := i.client.Get(ctx, req.NamespacedName, &c); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	return i.issueCertificate(ctx, a, &c)
}

func (i *issuer) issueCertificate(ctx context.Context, a *wire.Authority, c *api.NodeCertificate) (reconcile.Result,
	error) {
	if until, ok := a.Signed([]byte(c.Status.Certificate)); ok {
		if left := time.Until(until) - wire.CertificateLife/3; left > 0 {
			return reconcile.Result{RequeueAfter: left}, nil
		}
	}
	st := api.NodeCertificateStatus{}
	cert, until, err := a.Sign([]byte(c.Spec.Request), c.Spec.Node, wire.CertificateLife)
	if err != nil {
		if st.Message = err.Error(); st.Message == c.Status.Message {
			return reconcile.Result{}, nil
		}
	} else {
		st.Certificate, st.Authorities, st.NotAfter = string(cert), string(a.PEM()), metav1.NewTime(until)
		i.log.Info("certificate issued", "node", c.Spec.Node, "until", until)
	}
	c.Status = st
	if err := i.client.Status().Update(ctx, c); apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 50 * time.Millisecond}, nil
	} else if client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("certificate of node %s: %w", c.Spec.Node, err)
	}
	return reconcile.Result{RequeueAfter: wire.CertificateLife / 2}, nil
}

// ensureAuthority returns the authority of all nodes. The first call creates the authority.
func (i *issuer) ensureAuthority(ctx context.Context) (*wire.Authority, error) {
	key := client.ObjectKey{Namespace: i.namespace, Name: api.AuthoritySecret}
	var s corev1.Secret
	err := i.reader.Get(ctx, key, &s)
	if apierrors.IsNotFound(err) {
		both, nerr := wire.NewAuthority()
		if nerr != nil {
			return nil, nerr
		}
		s = corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name},
			Data: map[string][]byte{api.AuthorityKey: both}}
		if err = i.client.Create(ctx, &s); apierrors.IsAlreadyExists(err) {
			err = i.reader.Get(ctx, key, &s)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("secret %s: %w", key, err)
	}
	return wire.LoadAuthority(s.Data[api.AuthorityKey])
}

// applicant requests the certificate of this node, and stores renewed certificates.
type applicant struct {
	client client.Client
	id     *wire.Identity
	name   string
}

func setupApplicant(mgr ctrl.Manager, id *wire.Identity) error {
	a := &applicant{client: mgr.GetClient(), id: id, name: id.Node() + "." + id.Fingerprint()}
	mine := predicate.NewPredicateFuncs(func(o client.Object) bool { return o.GetName() == a.name })
	return ctrl.NewControllerManagedBy(mgr).Named("own-certificate").
		For(&api.NodeCertificate{}, builder.WithPredicates(mine)).
		WatchesRawSource(source.Func(
			func(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
				q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: a.name}}) // may not exist yet
				return nil
			})).
		WithOptions(controller.Options{NeedLeaderElection: new(bool), NewQueue: backlog.New}).
		Complete(a)
}

// Reconcile requests a certificate, or stores the issued certificate in the state folder for the node's processes.
func (a *applicant) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var c api.NodeCertificate
	err := a.client.Get(ctx, req.NamespacedName, &c)
	if apierrors.IsNotFound(err) {
		request, err := a.id.Request()
		if err != nil {
			return reconcile.Result{}, err
		}
		c = api.NodeCertificate{ObjectMeta: metav1.ObjectMeta{Name: a.name},
			Spec: api.NodeCertificateSpec{Node: a.id.Node(), Request: string(request)}}
		if err := a.client.Create(ctx, &c); err != nil && !apierrors.IsAlreadyExists(err) {
			return reconcile.Result{}, fmt.Errorf("certificate of node %s: %w", a.id.Node(), err)
		}
		return reconcile.Result{}, nil
	}
	if err != nil || c.Status.Certificate == "" {
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, a.id.Put([]byte(c.Status.Certificate), []byte(c.Status.Authorities))
}
