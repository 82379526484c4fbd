package targets

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/recorder"

	"drover.io/drover/api"
	"drover.io/drover/backups/longhorn"
	"drover.io/drover/backups/longhorn/digests"
	"drover.io/drover/backups/repo"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/limited"
)

// Repositories opens the repositories of BackupTargets. All callers of Open share the repository of a target while the
// target's URL, Secret and repository stay the same.
type Repositories struct {
	client    client.Client
	live      client.Reader // without a cache
	events    recorder.EventRecorder
	node      string
	cache     string // folder
	openStore func(ctx context.Context, url string, secret map[string][]byte) (target.Store, error)
	images    *longhorn.Images
	digests   func() *digests.Table // of the chunks in Longhorn's stores, of all targets
	blocks    *longhorn.Memory      // of Longhorn's backups that are read on demand
	memory    *Memory
	log       *slog.Logger

	mu      sync.Mutex
	entries map[string]*repositoryEntry // by name of the target
	rates   map[string]*limited.Rates   // by name of the target
}

// Opened is a repository in use. The user closes it.
type Opened struct {
	Repository *repo.Repository
	Target     *api.BackupTarget

	repositories *Repositories
	release      func()
}

// Close ends the use; further calls do nothing. The store of a changed or deleted target is closed after the last use.
func (o *Opened) Close() { o.release() }

// entryKey has all that a repository depends on.
type entryKey struct {
	uid                              types.UID
	url, secret, version, repository string
}

// repositoryEntry is the shared repository of a target.
type repositoryEntry struct {
	key  entryKey
	turn chan struct{} // held by the caller that opens the repository; guards opened and repository

	opened     *connection
	repository *repo.Repository // nil: not open yet

	// Guarded by Repositories.mu.
	users    int
	replaced bool // no longer in entries
	failures int  // attempts to open that failed, not counting those whose caller went away
	failure  error
}

// Open opens the repository of the BackupTarget name, or shares the one in use. Errors have the kinds NotFound (no such
// target), Invalid and Denied (a person has to correct the target or its Secret), or Unavailable.
func (r *Repositories) Open(ctx context.Context, name string) (*Opened, error) {
	t := &api.BackupTarget{}
	if err := r.live.Get(ctx, client.ObjectKey{Name: name}, t); err != nil {
		return nil, api.Explain(err, "backup target %s", name)
	}
	if t.Status.Format == api.FormatLonghorn {
		return nil, api.Errorf(api.Invalid, "backup target %s: %s", name, t.ExplainReadOnly())
	}
	if t.Status.RepositoryID == "" {
		return nil, api.Errorf(api.Unavailable, "backup target %s: the repository is not known yet; wait until the target "+
			"is available", name)
	}
	r.ratesOf(t)
	secret, err := r.readSecret(ctx, t)
	if err != nil {
		return nil, openError(t, err)
	}
	e, failures := r.use(t, entryKey{t.UID, t.Spec.BackupTargetURL, secret.Namespace + "/" + secret.Name,
		secret.ResourceVersion, t.Status.RepositoryID})
	if err := r.openEntry(ctx, e, failures, t, secret); err != nil {
		r.release(e)
		return nil, openError(t, err)
	}
	return &Opened{Repository: e.repository, Target: t, repositories: r,
		release: sync.OnceFunc(func() { r.release(e) })}, nil
}

// OpenToWrite is Open for new snapshots and deletions. A target that a person has to correct, and a target to which
// Drover writes nothing, are errors of kind Unavailable: the caller tries again later.
func (r *Repositories) OpenToWrite(ctx context.Context, name string) (*Opened, error) {
	opened, err := r.Open(ctx, name)
	switch {
	case api.Is(err, api.Denied) || api.Is(err, api.Invalid):
		return nil, api.Errorf(api.Unavailable, "%w", err)
	case err != nil:
		return nil, err
	case opened.Target.ExplainReadOnly() != "":
		opened.Close()
		return nil, api.Errorf(api.Unavailable, "backup target %s: %s", name, opened.Target.ExplainReadOnly())
	}
	return opened, nil
}

// openError is an error of Open.
func openError(t *api.BackupTarget, err error) error {
	kind := api.KindOf(err)
	var f *fault
	if errors.As(err, &f) {
		kind = f.kind()
	} else if kind == api.Other {
		kind = api.Unavailable
	}
	return api.Errorf(kind, "backup target %s: %w", t.Name, err)
}

// use returns the entry of a target for one more user, with the number of its failures so far, and replaces an entry
// whose key changed.
func (r *Repositories) use(t *api.BackupTarget, key entryKey) (e *repositoryEntry, failures int) {
	r.mu.Lock()
	e = r.entries[t.Name]
	var unused *connection
	if e != nil && e.key != key {
		unused = r.replace(t.Name)
		e = nil
	}
	if e == nil {
		e = &repositoryEntry{key: key, turn: make(chan struct{}, 1)}
		r.entries[t.Name] = e
	}
	e.users++
	failures = e.failures
	r.mu.Unlock()
	r.closeConnection(unused)
	return e, failures
}

// replace takes the entry of a target away, and returns its connection for the caller to close unless the entry has
// users. The caller holds mu.
func (r *Repositories) replace(name string) (unused *connection) {
	e := r.entries[name]
	if e == nil {
		return nil
	}
	delete(r.entries, name)
	e.replaced = true
	return e.unused()
}

// unused returns the connection of a replaced entry without users: no caller holds turn then. The caller holds mu.
func (e *repositoryEntry) unused() *connection {
	if !e.replaced || e.users > 0 {
		return nil
	}
	c := e.opened
	e.opened = nil
	return c
}

func (r *Repositories) release(e *repositoryEntry) {
	r.mu.Lock()
	e.users--
	unused := e.unused()
	r.mu.Unlock()
	r.closeConnection(unused)
}

// forget closes the repository of a target after its last use.
func (r *Repositories) forget(name string) {
	r.mu.Lock()
	unused := r.replace(name)
	delete(r.rates, name) // uses in progress have the pointer
	r.mu.Unlock()
	r.closeConnection(unused)
}

func (r *Repositories) closeConnection(c *connection) {
	if c == nil {
		return
	}
	if err := c.close(); err != nil {
		r.log.Warn("the store of a backup target cannot be closed", "err", err)
	}
}

// openEntry opens the repository of an entry, unless another caller did. A caller that waited for another caller, whose
// attempt is not among the failures seen before, shares its failure; the next call tries again.
func (r *Repositories) openEntry(ctx context.Context, e *repositoryEntry, seen int, t *api.BackupTarget,
	secret *corev1.Secret) error {
	select {
	case e.turn <- struct{}{}:
		defer func() { <-e.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	r.mu.Lock()
	failures, failure := e.failures, e.failure
	r.mu.Unlock()
	switch {
	case e.repository != nil: // a mount may be gone, or the bucket made again: what is written there is lost
		return storeFault(ctx, e.repository.CheckStore(ctx))
	case failures > seen:
		return failure
	}
	c, err := r.connect(ctx, t, secret)
	if err == nil {
		if e.repository, err = c.open(ctx, t.Status.RepositoryID); err == nil {
			e.opened = c
			return nil
		}
		r.closeConnection(c)
	}
	if ctx.Err() == nil {
		r.mu.Lock()
		e.failures, e.failure = e.failures+1, err
		r.mu.Unlock()
	}
	return err
}

// removeCaches removes the index tables of targets that do not exist.
func (r *Repositories) removeCaches(ctx context.Context) error {
	entries, err := os.ReadDir(r.cache)
	if len(entries) == 0 {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	var list api.BackupTargetList
	if err := r.live.List(ctx, &list); err != nil {
		return api.Explain(err, "list backup targets")
	}
	keep := map[string]bool{}
	for i := range list.Items {
		keep[string(list.Items[i].UID)] = true
		keep[digestsFile] = keep[digestsFile] || list.Items[i].Status.Format == api.FormatLonghorn
	}
	if !keep[digestsFile] {
		if err := os.Remove(filepath.Join(r.cache, digestsFile)); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	for _, e := range entries {
		if api.UID(e.Name()).Validate() == nil && !keep[e.Name()] {
			err = errors.Join(err, os.RemoveAll(filepath.Join(r.cache, e.Name())))
		}
	}
	return err
}

// releaseLocks deletes the locks that killed processes of this node left in stores, because the node may have no other
// reason to open these targets.
func (r *Repositories) releaseLocks(ctx context.Context) error {
	var list api.BackupTargetList
	if err := r.live.List(ctx, &list); err != nil {
		return api.Explain(err, "list backup targets")
	}
	var failed error
	for i := range list.Items {
		t := &list.Items[i]
		if t.Status.RepositoryID == "" || !repo.HasLockRecords(r.cacheOf(t), t.Status.RepositoryID) {
			continue
		}
		opened, err := r.Open(ctx, t.Name)
		if err == nil {
			opened.Close()
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// Memory of the node's works.
func (r *Repositories) Memory() *Memory { return r.memory }
