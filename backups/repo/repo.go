package repo

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/cache"
	"drover.io/drover/backups/repo/keys"
	"drover.io/drover/backups/target"
	"drover.io/drover/block/budget"
)

// formatVersion is the only version of the format that this package reads and writes.
const formatVersion = 2

// keyFilesLimit is how many key files Open tries: each one costs a tenth of a second.
const keyFilesLimit = 32

// Options of a repository on this machine.
type Options struct {
	// Cache is the folder for what can be read again from the stores, and for the records of sessions. An administrator
	// may delete the folder while no repository is open. Empty: sessions have no records, and nothing reads the index.
	Cache    string
	Hostname string // who locks and adds passwords; empty: the name of the machine
	Username string // empty: drover
	Owner    string // whom the sessions work for; see RestoredByOthers
	// Reads bounds the memory of the requests of ReadMany, Sweep and Verify for parts of packs; nil: no bound but the
	// bound of each call.
	Reads *budget.Part
	// Urgent replaces Reads in calls with UrgentContext, Moves in calls with MoveContext and sweeps.
	Urgent, Moves *budget.Part
	// LargestPack bounds, in bytes, a pack that a Writer begins, besides WriterOptions.PackSize. A single larger blob has
	// room in a pack nevertheless. nil, or a result of 0: no bound.
	LargestPack func() int64
}

// Repository is an open repository. Methods are safe for concurrent use.
type Repository struct {
	store   target.Store
	secret  blob.Secret
	key     *blob.Key
	config  config
	options Options

	shared    *sharedTable
	trees     *cache.Folder // parts of packs with trees; nil without a cache
	snapshots *cache.Folder
}

type config struct {
	Version    int    `json:"version"`
	ID         string `json:"id"`
	Polynomial string `json:"chunker_polynomial"`
}

func (o Options) withDefaults() Options {
	if o.Hostname == "" {
		o.Hostname, _ = os.Hostname() // a lock without a name still locks
	}
	if o.Username == "" {
		o.Username = "drover"
	}
	return o
}

// Init makes a repository in store. Init continues where an interrupted Init ended, and refuses a store that has a
// repository with an error of kind Exists. Only one process may call Init for a store.
func Init(ctx context.Context, store target.Store, password string, o Options) error {
	if password == "" {
		return api.Errorf(api.Invalid, "repository: the password is empty; set BACKUP_PASSWORD")
	}
	if _, err := store.Stat(ctx, configName); err == nil {
		return api.Errorf(api.Exists, "repository: the store already has a config")
	} else if !api.Is(err, api.NotFound) {
		return api.Errorf(api.KindOf(err), "repository: %w", err)
	}
	secret, err := firstSecret(ctx, store, password, o.withDefaults())
	if err != nil {
		return err
	}
	id := blob.NewSecret() // random bytes
	content, err := json.Marshal(config{formatVersion, blob.ID(id.Encrypt).String(),
		strconv.FormatUint(uint64(randomPolynomial()), 16)})
	if err != nil {
		return err
	}
	if err := store.Put(ctx, configName, blob.NewKey(secret).Seal(nil, content)); err != nil {
		return api.Errorf(api.KindOf(err), "repository: the config cannot be written: %w", err)
	}
	return nil
}

// firstSecret returns the key of a repository without a config: that of an interrupted Init, or a new one, whose key
// file is then durable. A new key belongs to a new repository, which has no snapshots.
func firstSecret(ctx context.Context, store target.Store, password string, o Options) (secret blob.Secret, err error) {
	found := false
	tried, err := tryKeyFiles(ctx, store, password, func(s blob.Secret) bool {
		secret, found = s, true
		return true
	})
	switch {
	case tried > 0 && (api.Is(err, api.Denied) || api.Is(err, api.Corrupt) || api.Is(err, api.Unsupported)):
		return secret, api.Errorf(api.Exists, "repository: the store has %d key files and no config: %w; "+
			"restore the config, or empty the store", tried, err)
	case err != nil:
		return secret, err
	case !found:
		secret = blob.NewSecret()
		r := &Repository{store: store, key: blob.NewKey(secret)}
		if err := r.saveRecord(ctx, snapshotRecord{First: sinceInit, Snapshots: []blob.ID{}}); err != nil {
			return secret, api.Errorf(api.KindOf(err), "repository: the snapshot record cannot be written: %w", err)
		}
		err = putKeyFile(ctx, store, secret, password, o)
	}
	return secret, err
}

// Open opens a repository. A missing repository is an error of kind NotFound, a wrong password one of kind Denied, and
// a version that this package does not know one of kind Unsupported.
func Open(ctx context.Context, store target.Store, password string, o Options) (*Repository, error) {
	sealed, err := readFixed(ctx, store, configName)
	if api.Is(err, api.NotFound) {
		return nil, api.Errorf(api.NotFound, "repository: the store has no config, so no repository: %w", err)
	} else if err != nil {
		return nil, api.Errorf(api.KindOf(err), "repository: %w", err)
	}
	r := &Repository{store: store, options: o.withDefaults()}
	var content []byte
	tried, err := tryKeyFiles(ctx, store, password, func(s blob.Secret) bool {
		key := blob.NewKey(s)
		opened, err := key.Open(sealed)
		if err == nil {
			r.secret, r.key, content = s, key, opened
		}
		return err == nil
	})
	switch {
	case err != nil:
		return nil, err
	case tried == 0:
		return nil, api.Errorf(api.Corrupt, "repository: the store has a config, but no key file; restore keys/ from a copy")
	case r.key == nil:
		return nil, api.Errorf(api.Corrupt, "repository: the config is damaged: a key file opens, the config does not; "+
			"restore the config from a copy")
	}
	if err := r.readConfig(content); err != nil {
		return nil, err
	}
	r.openCache()
	return r, nil
}

// Bounds of the cache in bytes. Ten thousand snapshots have 40 MiB.
const (
	treesLimit     = 256 << 20
	snapshotsLimit = 64 << 20
)

func (r *Repository) openCache() {
	r.shared = newSharedTable()
	if r.options.Cache == "" {
		return
	}
	r.trees = cache.New(filepath.Join(r.cacheFolder(), "trees"), treesLimit)
	r.snapshots = cache.New(filepath.Join(r.cacheFolder(), "snapshots"), snapshotsLimit)
}

// withoutCache returns r for a caller that looks for damage in the store: a cached copy may hide the damage.
func (r *Repository) withoutCache() *Repository {
	c := *r
	c.trees, c.snapshots = nil, nil
	return &c
}

// cacheFolder is the local folder of the repository.
func (r *Repository) cacheFolder() string { return filepath.Join(r.options.Cache, r.ID()) }

// CheckStore returns an error if the store no longer has the repository, of kind Unavailable if the store has none.
func (r *Repository) CheckStore(ctx context.Context) error {
	sealed, err := readFixed(ctx, r.store, configName)
	switch {
	case api.Is(err, api.NotFound):
		return api.Errorf(api.Unavailable, "repository %.8s: the store has no config; mount or restore the folder or "+
			"bucket: %w", r.ID(), err)
	case err != nil:
		return api.Errorf(api.KindOf(err), "repository %.8s: %w", r.ID(), err)
	}
	if _, err := r.key.Open(sealed); err != nil {
		return api.Errorf(api.Corrupt, "repository %.8s: the store has a damaged config, or another repository; mount or "+
			"restore the folder or bucket: %w", r.ID(), err)
	}
	return nil
}

func (r *Repository) readConfig(content []byte) error {
	if err := json.Unmarshal(content, &r.config); err != nil {
		return api.Errorf(api.Corrupt, "repository: the config is damaged: %w", err)
	}
	if r.config.Version != formatVersion {
		remedy := "only a newer Drover or restic may know it"
		if r.config.Version == 1 {
			remedy = "`restic migrate upgrade_repo_v2` upgrades the repository"
		}
		return api.Errorf(api.Unsupported, "repository %.8s: format version %d is not supported, only version %d is; %s",
			r.config.ID, r.config.Version, formatVersion, remedy)
	}
	if _, err := blob.Parse(r.config.ID); err != nil {
		return api.Errorf(api.Corrupt, "repository: the config is damaged: %w", err)
	}
	return nil
}

// ID names the repository, for life.
func (r *Repository) ID() string { return r.config.ID }

// AddPassword lets another password open the repository.
func (r *Repository) AddPassword(ctx context.Context, password string) error {
	if password == "" {
		return api.Errorf(api.Invalid, "repository %.8s: the new password is empty", r.ID())
	}
	return putKeyFile(ctx, r.store, r.secret, password, r.options)
}

func putKeyFile(ctx context.Context, store target.Store, secret blob.Secret, password string, o Options) error {
	content, err := keys.Wrap(secret, password, o.Hostname, o.Username)
	if err != nil {
		return err
	}
	if err := store.Put(ctx, keysFolder+blob.Sum(content).String(), content); err != nil {
		return api.Errorf(api.KindOf(err), "repository: a key file cannot be written: %w", err)
	}
	return nil
}

// tryKeyFiles calls accept with the secret of each key file that opens with password, until accept returns true. tried
// is how many key files the store has. An error of kind Denied says that no file opens.
func tryKeyFiles(ctx context.Context, store target.Store, password string, accept func(blob.Secret) bool) (
	tried int, err error) {
	files, err := listFolder(ctx, store, keysFolder)
	if err != nil {
		return 0, err
	}
	if len(files) > keyFilesLimit {
		return len(files), api.Errorf(api.Unsupported, "repository: %d key files are too many, at most %d are allowed; "+
			"remove some with `restic key remove`", len(files), keyFilesLimit)
	}
	var damaged error
	opened := false
	for _, f := range files {
		content, err := readNamed(ctx, store, f, keys.FileLimit)
		if err != nil && !api.Is(err, api.Corrupt) && !api.Is(err, api.NotFound) {
			return len(files), api.Errorf(api.KindOf(err), "key file %.8s: %w", f.id, err)
		}
		var secret blob.Secret
		if err == nil {
			secret, err = keys.Unwrap(content, password)
		}
		switch {
		case ctx.Err() != nil:
			return len(files), context.Cause(ctx)
		case api.Is(err, api.Denied), api.Is(err, api.NotFound):
		case err != nil:
			damaged = api.Errorf(api.KindOf(err), "key file %.8s: %w", f.id, err)
		default:
			if opened = true; accept(secret) {
				return len(files), nil
			}
		}
	}
	switch {
	case opened || len(files) == 0:
		return len(files), nil
	case damaged != nil:
		return len(files), api.Errorf(api.KindOf(damaged), "repository: no key file opens with this password: %w",
			damaged)
	}
	return len(files), api.Errorf(api.Denied, "repository: %w: none of %d key files opens with this password; "+
		"correct BACKUP_PASSWORD in the target's Secret", errWrongPassword, len(files))
}

var errWrongPassword = errors.New("wrong password")

// IsWrongPassword tells a wrong password from a store that denies the access; both are errors of kind Denied.
func IsWrongPassword(err error) bool { return errors.Is(err, errWrongPassword) }
