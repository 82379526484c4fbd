package targets

import (
	"context"
	"log/slog"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/address"
	"drover.io/drover/backups/target/limited"
	"drover.io/drover/backups/target/share"
)

// connection is an open store with the password of its repository.
type connection struct {
	store     writeStore
	passwords repo.Passwords
	encrypted bool // the password is the user's, not the published one
	options   repo.Options
	log       *slog.Logger
}

// connect opens the store of a target with the credentials of secret. The caller closes the connection. Errors are
// faults, unless ctx ended.
func (r *Repositories) connect(ctx context.Context, t *api.BackupTarget, secret *corev1.Secret) (*connection, error) {
	password, own, err := address.Password(secret.Data)
	if err != nil {
		return nil, &fault{api.ReasonBadSecret, err}
	}
	store, err := r.openStore(ctx, t.Spec.BackupTargetURL, secret.Data)
	if err != nil {
		return nil, storeFault(ctx, err)
	}
	old, recovery := address.OtherPasswords(secret.Data)
	rates := r.ratesOf(t)
	return &connection{store: writeStore{limited.New(store, rates), t.UID},
		passwords: repo.Passwords{Current: password, Old: old, Recovery: recovery}, encrypted: own,
		options: repo.Options{Cache: r.cacheOf(t), Hostname: r.node, Owner: string(t.UID), Reads: r.memory.Reads,
			Urgent: r.memory.Readers, Moves: r.memory.Moves, LargestPack: rates.LargestPut}, log: r.log}, nil
}

// ratesOf are the rates of a target, as its spec says now.
func (r *Repositories) ratesOf(t *api.BackupTarget) *limited.Rates {
	r.mu.Lock()
	defer r.mu.Unlock()
	rates := r.rates[t.Name]
	if rates == nil {
		rates = &limited.Rates{}
		r.rates[t.Name] = rates
	}
	rates.Set(t.Spec.MaxUploadRate, t.Spec.MaxDownloadRate)
	return rates
}

// cacheOf is the folder for the index tables of a target.
func (r *Repositories) cacheOf(t *api.BackupTarget) string {
	return filepath.Join(r.cache, string(t.UID))
}

// addressOpener is the default of Options.OpenStore. Shares are mounted below the folder mounts.
func addressOpener(mounts *share.Mounts, log *slog.Logger) func(context.Context, string, map[string][]byte) (
	target.Store, error) {
	return func(ctx context.Context, url string, secret map[string][]byte) (target.Store, error) {
		a, err := address.Parse(url)
		if err != nil {
			return nil, &fault{api.ReasonBadURL, err}
		}
		if why := a.ExplainStale(); why != "" {
			log.Warn("sweeps of a backup target may delete packs that backups of other nodes need", "url", url, "cause", why)
		}
		store, err := a.Open(ctx, secret, mounts)
		if api.Is(err, api.Invalid) {
			err = &fault{api.ReasonBadSecret, err}
		}
		return store, err
	}
}

func (c *connection) close() error { return c.store.Close() }

// open opens the repository and compares it with the known one. If none is known, a store without a repository is an
// error of kind NotFound and no fault.
func (c *connection) open(ctx context.Context, known string) (*repo.Repository, error) {
	r, err := repo.OpenAny(ctx, c.store, c.passwords, c.options)
	switch {
	case api.Is(err, api.NotFound) && known == "":
		return nil, err
	case api.Is(err, api.NotFound):
		return nil, faultf(api.ReasonLostRepository, "repository %.8s: %w; mount or restore the folder or bucket, or, if "+
			"the backups are lost, make the BackupTarget again", known, err)
	case err != nil:
		return nil, storeFault(ctx, err)
	case known != "" && r.ID() != known:
		return nil, faultf(api.ReasonOtherRepository, "repository %.8s: the store has another repository, %.8s; correct "+
			"backupTargetURL or the mount, or make the BackupTarget again to use the other repository", known, r.ID())
	}
	// The locks of a killed process of this node would block restic and sweeps for half an hour.
	released, err := r.ReleaseLeftLocks(ctx)
	if err != nil {
		c.log.Warn("locks of an ended process are left in a backup target", "err", err)
	}
	if released > 0 {
		c.log.Info("locks of an ended process were deleted in a backup target", "repository", r.ID(), "sessions", released)
	}
	return r, nil
}

// readSecret reads the Secret of a target; an empty one if the target names none.
func (r *Repositories) readSecret(ctx context.Context, t *api.BackupTarget) (*corev1.Secret, error) {
	s, ref := &corev1.Secret{}, t.Spec.CredentialSecret
	if ref == nil {
		return s, nil
	}
	err := r.live.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, s)
	if client.IgnoreNotFound(err) != nil {
		return nil, api.Explain(err, "Secret %s in namespace %s", ref.Name, ref.Namespace)
	}
	if err != nil {
		return nil, faultf(api.ReasonBadSecret, "Secret %s in namespace %s: does not exist; create the Secret", ref.Name,
			ref.Namespace)
	}
	return s, nil
}
