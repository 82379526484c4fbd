package driver

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	ctrl "sigs.k8s.io/controller-runtime"

	"drover.io/drover/api"
	"drover.io/drover/backups"
	"drover.io/drover/imagestore"
	"drover.io/drover/replicas"
)

const leaseName = "drover-controller"

// needsElection reports whether this process must win an election before the process may run the controller's
// reconcilers, because other processes may have the role too. An embedded server that only this machine can reach has
// no second controller.
func (s *server) needsElection(ctx context.Context) (bool, error) {
	if !s.controller || s.kube != nil && s.apiListen == "" {
		return false, nil
	}
	d, err := discovery.NewDiscoveryClientForConfig(s.cfg)
	if err != nil {
		return false, err
	}
	if _, err := d.ServerResourcesForGroupVersion("coordination.k8s.io/v1"); err != nil {
		if ctx.Err() != nil || !isNotFound(err) {
			return false, api.Errorf(api.Unavailable, "API server %s: %w", s.cfg.Host, err)
		}
		return false, nil // a server without leases has no second controller
	}
	return true, nil
}

// leadController runs the controller's reconcilers while this process is elected. A lost lease, because the server was
// unreachable or another process took the lease, ends the reconcilers; the rest of the process continues.
func (s *server) leadController(ctx context.Context) error {
	for {
		mgr, err := s.newElectedManager()
		if err != nil {
			return err
		}
		err = mgr.Start(ctx)
		if ctx.Err() != nil {
			return nil
		}
		s.log.Warn("the controller's reconcilers ended and stand for election again", "err", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil
		}
	}
}

// newElectedManager returns the manager of the controller's reconcilers, which start with the lease.
func (s *server) newElectedManager() (ctrl.Manager, error) {
	o := managerOptions()
	cfg := rest.CopyConfig(s.cfg)
	cfg.Timeout = 5 * time.Second // one stalled request must not lose the lease
	// A server of custom resources has no protobuf encoding.
	cfg.ContentType, cfg.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON
	client, err := coordinationv1.NewForConfig(cfg)
	if err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	who, err := s.candidateName()
	if err != nil {
		return nil, err
	}
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, ourNamespace(s.leaseNamespace), leaseName, nil, client,
		resourcelock.ResourceLockConfig{Identity: who})
	if err != nil {
		return nil, fmt.Errorf("lease: %w", err)
	}
	o.LeaderElection, o.LeaderElectionReleaseOnCancel = true, true
	o.LeaderElectionID, o.LeaderElectionResourceLockInterface = leaseName, lock
	mgr, err := ctrl.NewManager(withEvents(s.cfg), o)
	if err != nil {
		return nil, fmt.Errorf("controller reconcilers: %w", err)
	}
	return mgr, s.setupController(mgr)
}

// candidateName returns the name of this process in the election, from the state folder: after a restart the process
// still holds the lease, and need not wait for the expiry.
func (s *server) candidateName() (string, error) {
	path := filepath.Join(s.stateDir, "run", "candidate")
	if b, err := os.ReadFile(path); err == nil && len(strings.TrimSpace(string(b))) > 0 {
		return strings.TrimSpace(string(b)), nil
	}
	raw := make([]byte, 8)
	_, _ = rand.Read(raw)
	who := s.node + "_" + hex.EncodeToString(raw)
	if err := os.WriteFile(path, []byte(who+"\n"), 0o600); err != nil {
		return "", api.Errorf(api.Unavailable, "%s: %w", path, err)
	}
	return who, nil
}

func (s *server) setupController(mgr ctrl.Manager) error {
	if err := errors.Join(imagestore.SetupController(mgr, s.log), replicas.SetupController(mgr, s.log),
		backups.SetupController(mgr, s.log), setupIssuer(mgr, ourNamespace(s.leaseNamespace), s.log)); err != nil {
		return fmt.Errorf("controller reconcilers: %w", err)
	}
	return nil
}
