package repo

import (
	"context"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/keys"
	"drover.io/drover/backups/target"
)

// Passwords are the passwords that a repository should have.
type Passwords struct {
	Current  string   // opens the repository from now on
	Old      []string // open the repository until Current does, and no longer
	Recovery string   // opens the repository, too; empty: none
}

// OpenAny opens a repository with the current password, or with an old one.
func OpenAny(ctx context.Context, store target.Store, p Passwords, o Options) (r *Repository, err error) {
	if r, err = Open(ctx, store, p.Current, o); !IsWrongPassword(err) {
		return r, err
	}
	for _, old := range p.Old {
		other, e := Open(ctx, store, old, o)
		if !IsWrongPassword(e) {
			return other, e
		}
	}
	return nil, err // that of the current password
}

// UpdateKeys makes key files for the current and the recovery password, and then deletes those of old passwords. At
// each moment a key file opens with the current or with an old password: UpdateKeys deletes the old file after it has
// read the new file back from the store. Key files of other passwords, and damaged ones, stay. UpdateKeys returns the
// number of key files afterwards.
func (r *Repository) UpdateKeys(ctx context.Context, p Passwords) (count int, err error) {
	for _, password := range []string{p.Current, p.Recovery} {
		if err := r.ensureKey(ctx, password); err != nil {
			return 0, err
		}
	}
	var names []string
	for _, old := range p.Old {
		if old == "" || old == p.Current || old == p.Recovery {
			continue
		}
		opened, err := r.keyFilesOf(ctx, old)
		if err != nil {
			return 0, err
		}
		for _, f := range opened {
			names = append(names, f.Name)
		}
	}
	if len(names) > 0 {
		if err := r.store.Delete(ctx, names...); err != nil {
			return 0, api.Errorf(api.KindOf(err), "repository %.8s: %d key files of old passwords cannot be deleted: %w", r.ID(),
				len(names), err)
		}
		// Another cluster may change the passwords the other way round, and delete the key file of the current one. Each
		// cluster looks after its own deletion, so the later one sees both.
		if err := r.ensureKey(ctx, p.Current); err != nil {
			return 0, err
		}
	}
	files, err := listFolder(ctx, r.store, keysFolder)
	return len(files), err
}

// ensureKey makes a key file for a password, unless one exists or the password is empty, and reads the file back.
func (r *Repository) ensureKey(ctx context.Context, password string) error {
	if password == "" {
		return nil
	}
	opened, err := r.keyFilesOf(ctx, password)
	if err == nil && len(opened) == 0 {
		if err = r.AddPassword(ctx, password); err == nil {
			opened, err = r.keyFilesOf(ctx, password)
		}
		if err == nil && len(opened) == 0 {
			err = api.Errorf(api.Unavailable, "repository %.8s: the store does not list a new key file yet; try again", r.ID())
		}
	}
	return err
}

// KeyFile returns a key file that opens with a password, and its name in the folder keys. Written back there, the key
// file opens the repository also after the loss of all others.
func (r *Repository) KeyFile(ctx context.Context, password string) (name string, content []byte, err error) {
	opened, err := r.keyFilesOf(ctx, password)
	if err != nil {
		return "", nil, err
	}
	if len(opened) == 0 {
		return "", nil, api.Errorf(api.NotFound, "repository %.8s: no key file opens with the password", r.ID())
	}
	content, err = readNamed(ctx, r.store, opened[0], keys.FileLimit)
	return opened[0].id.String(), content, err
}

// KeyNames returns a digest of the names of all key files, which changes when a key file is made or deleted.
func (r *Repository) KeyNames(ctx context.Context) (sum blob.ID, err error) {
	files, err := listFolder(ctx, r.store, keysFolder)
	if err != nil {
		return sum, err
	}
	for _, f := range files { // in any order
		for i := range sum {
			sum[i] ^= f.id[i]
		}
	}
	return sum, nil
}

// keyFilesOf are the key files that open with a password and have the key of the repository.
func (r *Repository) keyFilesOf(ctx context.Context, password string) (opened []namedFile, err error) {
	files, err := listFolder(ctx, r.store, keysFolder)
	if err != nil {
		return nil, err
	}
	if len(files) > keyFilesLimit {
		return nil, api.Errorf(api.Unsupported, "repository %.8s: %d key files are too many, at most %d are allowed; "+
			"remove some with `restic key remove`", r.ID(), len(files), keyFilesLimit)
	}
	for _, f := range files {
		content, err := readNamed(ctx, r.store, f, keys.FileLimit)
		if IsDamage(err) {
			continue // verification names the object
		} else if err != nil {
			return nil, api.Errorf(api.KindOf(err), "repository %.8s: key file %.8s: %w", r.ID(), f.id, err)
		}
		if secret, err := keys.Unwrap(content, password); err == nil && secret == r.secret {
			opened = append(opened, f)
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	return opened, nil
}
