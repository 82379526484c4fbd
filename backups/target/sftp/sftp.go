// Package sftp is a store in a folder of an SSH server. An object is a file of the same name below the folder.
//
// A Put writes a temporary file in the folder .tmp and renames the file onto the name by posix-rename@openssh.com,
// without which a server is refused: SFTP's own rename replaces no file. If the server has fsync@openssh.com, the
// content is durable before the rename; a second fsync of the same file after the rename makes the name durable on the
// usual file systems. SFTP has no fsync of a folder.
//
// Each operation has a connection alone, at most maxConnections at once, and a deadline on the socket: the end of the
// caller's context closes the connection, which ends the operation. Idle connections are used again. The key of the
// server must be known: there is no trust on first use.
//
// The mutex of Store guards the idle connections and a map; no I/O happens under the mutex. The goroutines of the SSH
// library end with their connection, at the latest with Close.
package sftp

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/pkg/sftp"
	"golang.org/x/crypto/ssh"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/backups/target/web"
)

const (
	// tmpDir has the temporary files. No object has such a name, because of the dot.
	tmpDir = ".tmp"
	// abandonedAfter is the age at which nobody writes to a temporary file any more.
	abandonedAfter = 24 * time.Hour
	// maxObject bounds the memory for an object whose length the server tells.
	maxObject = 1 << 30
	// maxList bounds what the server sends for the list of a folder, together with the lists of the folders above, which
	// stay in memory meanwhile: the library returns a folder whole. It is room for some 300,000 names.
	maxList = 64 << 20
	// maxConnections bounds the connections of a store; OpenSSH admits ten that are not logged in yet.
	maxConnections = 4
	// The extensions of OpenSSH that the store uses.
	renameExtension = "posix-rename@openssh.com"
	syncExtension   = "fsync@openssh.com"
)

// Config says where a store is.
type Config struct {
	Host string // name or IP address, without brackets
	Port string // empty: 22
	User string
	Root string // absolute path of the folder, which must exist

	// Password and PrivateKey (PEM) are ways to log in; one of them is needed. Passphrase opens an encrypted key.
	Password, PrivateKey, Passphrase web.Secret
	// KnownHosts has lines as in the file known_hosts.
	KnownHosts []byte

	// AnswerTime is how long the server may take to answer. Default: a minute.
	AnswerTime time.Duration
}

// Store is a store on an SSH server.
type Store struct {
	cfg   Config
	login ssh.ClientConfig
	slots chan struct{} // one for each connection
	most  int64         // maxList, or less for a test

	mu     sync.Mutex
	closed bool
	idle   []*connection
	made   map[string]bool // folders that exist
}

var _ target.Store = (*Store)(nil)

// Open opens the store: it connects, and removes abandoned temporary files. The caller closes the store after the last
// call has returned.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	if cfg.Port == "" {
		cfg.Port = "22"
	}
	cfg.AnswerTime = web.Network{AnswerTime: cfg.AnswerTime}.WithDefaults().AnswerTime
	s := &Store{cfg: cfg, slots: make(chan struct{}, maxConnections), most: maxList,
		made: map[string]bool{}}
	var err error
	if s.login, err = s.clientConfig(); err != nil {
		return nil, err
	}
	err = s.run(ctx, "open the store", 0, func(op *operation) error {
		if err := op.checkRoot(); err != nil {
			return err
		}
		if _, has := op.HasExtension(renameExtension); !has {
			return api.Errorf(api.Unsupported, "the server has no %s; use another server", renameExtension)
		}
		return op.removeAbandoned()
	})
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close closes the connections. Close implements io.Closer and never fails.
func (s *Store) Close() error {
	s.mu.Lock()
	idle := s.idle
	s.idle, s.closed = nil, true
	s.mu.Unlock()
	for _, c := range idle {
		c.close()
	}
	return nil
}

func (s *Store) address() string { return net.JoinHostPort(s.cfg.Host, s.cfg.Port) }

// String names the store in errors.
func (s *Store) String() string { return "SFTP store " + s.address() + s.cfg.Root }

func (s *Store) join(name string) string { return path.Join(s.cfg.Root, name) }

// Put implements target.Store.
func (s *Store) Put(ctx context.Context, name string, body []byte) error {
	if err := target.CheckName(name); err != nil {
		return err
	}
	return s.run(ctx, "write object "+name, int64(len(body)), func(op *operation) error {
		err := op.put(name, body)
		if errors.Is(err, fs.ErrNotExist) { // another program removed a folder that the store knew
			if err := op.checkRoot(); err != nil {
				return err
			}
			s.forgetFolders()
			err = op.put(name, body)
		}
		return err
	})
}

func (o *operation) put(name string, body []byte) error {
	file := o.store.join(name)
	for _, dir := range []string{o.store.join(tmpDir), path.Dir(file)} {
		if err := o.makeFolder(dir); err != nil {
			return err
		}
	}
	tmp := o.store.join(tmpDir + "/" + rand.Text())
	f, err := o.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return err
	}
	_, err = f.ReadFrom(bytes.NewReader(body))
	if err == nil {
		err = o.sync(f)
	}
	if err == nil {
		err = o.Ctx.Err()
	}
	if err == nil {
		err = o.PosixRename(tmp, file)
	}
	if err == nil {
		err = o.sync(f)
	} else {
		_ = o.Remove(tmp) // else Open removes the file
	}
	return errors.Join(err, f.Close())
}

func (o *operation) sync(f *sftp.File) error {
	if _, has := o.HasExtension(syncExtension); !has {
		return nil
	}
	return f.Sync()
}

// makeFolder makes dir and the folders above dir, as far as they are missing.
func (o *operation) makeFolder(dir string) error {
	s := o.store
	s.mu.Lock()
	known := s.made[dir]
	s.mu.Unlock()
	if known || dir == s.cfg.Root {
		return nil
	}
	if err := o.makeFolder(path.Dir(dir)); err != nil {
		return err
	}
	if err := o.Mkdir(dir); err != nil {
		if st, e := o.Client.Stat(dir); e != nil || !st.IsDir() {
			return err
		}
	}
	s.mu.Lock()
	s.made[dir] = true
	s.mu.Unlock()
	return nil
}

func (s *Store) forgetFolders() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.made)
}

// removeAbandoned removes old temporary files of processes that died. The age is by the clock of the server: the time
// of a new file is now.
func (o *operation) removeAbandoned() error {
	dir := o.store.join(tmpDir)
	entries, _, err := o.readFolder(dir, o.store.most)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return nil
	} else if err != nil {
		return err
	}
	tmp := dir + "/" + rand.Text()
	f, err := o.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if errors.Is(err, fs.ErrPermission) { // a server to read from
		return nil
	} else if err != nil {
		return err
	}
	now, err := f.Stat()
	if err := errors.Join(err, f.Close(), o.Remove(tmp)); err != nil {
		return err
	}
	for _, e := range entries {
		if now.ModTime().Sub(e.ModTime()) <= abandonedAfter || strings.Contains(e.Name(), "/") {
			continue
		}
		if err := o.Remove(dir + "/" + e.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Get implements target.Store.
func (s *Store) Get(ctx context.Context, name string, off, n int64) (body []byte, err error) {
	if err := errors.Join(target.CheckName(name), target.CheckRange(name, off, n)); err != nil {
		return nil, err
	}
	var short error
	err = s.run(ctx, "read object "+name, max(n, 0), func(op *operation) error {
		f, size, err := op.openObject(name)
		if err != nil {
			return err
		}
		defer f.Close() //nolint:errcheck // a file that is only read
		length := n
		if n < 0 {
			length = size - off
		}
		switch {
		case length < 0 || off+length > size:
			short = target.Short(s.String(), name, off, n, size)
			return short
		case length > maxObject:
			return api.Errorf(api.Unavailable, "the server gives the length %d, at most %d are allowed", length, maxObject)
		}
		op.Extend(length)
		body = make([]byte, length)
		if got, err := f.ReadAt(body, off); got < len(body) {
			return fmt.Errorf("the file ended after %d of %d bytes: %w", got, length, err)
		}
		return nil
	})
	if short != nil {
		return nil, short
	} else if err != nil {
		return nil, err
	}
	return body, nil
}

// openObject opens the file of an object. Only a regular file is an object.
func (o *operation) openObject(name string) (*sftp.File, int64, error) {
	f, err := o.Client.Open(o.store.join(name))
	if err != nil {
		return nil, 0, o.notFound(name, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, 0, errors.Join(o.notFound(name, err), f.Close())
	}
	return f, st.Size(), nil
}

// Stat implements target.Store.
func (s *Store) Stat(ctx context.Context, name string) (object target.Object, err error) {
	if err := target.CheckName(name); err != nil {
		return object, err
	}
	err = s.run(ctx, "look up object "+name, 0, func(op *operation) error {
		st, err := op.Client.Stat(s.join(name))
		if err == nil && !st.Mode().IsRegular() {
			err = fs.ErrNotExist
		}
		if err != nil {
			return op.notFound(name, err)
		}
		object = target.NewObject(name, st.Size(), st.ModTime())
		return nil
	})
	return object, err
}

// List implements target.Store.
func (s *Store) List(ctx context.Context, prefix string, each func(target.Object) error) error {
	if err := target.CheckPrefix(prefix); err != nil {
		return err
	}
	dir := ""
	if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
		dir = prefix[:i]
	}
	var stop error // of each
	err := s.run(ctx, fmt.Sprintf("list objects %q", prefix), 0, func(op *operation) error {
		return op.list(dir, prefix, s.most, func(o target.Object) error {
			op.Pause()
			defer op.Extend(0)
			stop = each(o)
			return stop
		})
	})
	if stop != nil {
		return stop
	}
	return err
}

// readFolder reads the list of a folder, for which the server may send most bytes, and returns how many it sent.
func (o *operation) readFolder(dir string, most int64) (entries []fs.FileInfo, sent int64, err error) {
	sent, tooLong := o.conn.limit(most, func() { entries, err = o.ReadDirContext(o.Ctx, dir) })
	if tooLong != nil {
		return nil, sent, fmt.Errorf("list of folder %s: %w; remove foreign files from the folder", dir, tooLong)
	}
	return entries, sent, err
}

// list lists the objects below the folder dir, which is empty for the root. The server may send most bytes for a folder
// and the folders above it.
func (o *operation) list(dir, prefix string, most int64, each func(target.Object) error) error {
	entries, sent, err := o.readFolder(o.store.join(dir), most)
	if err != nil && o.isMissing(o.store.join(dir), err) {
		return o.checkRoot()
	} else if err != nil {
		return err
	}
	for _, e := range entries {
		if err := o.Ctx.Err(); err != nil {
			return err
		}
		name := e.Name()
		if dir != "" {
			name = dir + "/" + name
		}
		if target.CheckName(name) != nil || strings.Contains(e.Name(), "/") || !strings.HasPrefix(name, prefix) {
			continue
		}
		switch {
		case e.IsDir():
			o.Extend(0)
			err = o.list(name, prefix, most-sent, each)
		case e.Mode().IsRegular():
			err = each(target.NewObject(name, e.Size(), e.ModTime()))
		case e.Mode()&fs.ModeSymlink != 0: // Put and Get would follow the link
			err = api.Errorf(api.Unsupported, "%s is a symbolic link; remove the link", name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Delete implements target.Store.
func (s *Store) Delete(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := target.CheckName(name); err != nil {
			return err
		}
	}
	return s.run(ctx, "delete objects", 0, func(op *operation) error {
		if err := op.checkRoot(); err != nil {
			return err
		}
		for _, name := range names {
			op.Extend(0)
			err := op.Ctx.Err()
			if err == nil {
				err = op.deleteFile(s.join(name))
			}
			if err != nil {
				return fmt.Errorf("object %s: %w", name, err)
			}
		}
		return nil
	})
}

// deleteFile deletes a regular file; the library's Remove would delete an empty folder, too.
func (o *operation) deleteFile(file string) error {
	st, err := o.Lstat(file)
	if err == nil && st.IsDir() || err != nil && o.isMissing(file, err) {
		return nil
	} else if err != nil {
		return err
	}
	if err := o.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// isMissing reports whether err means that a file does not exist: a server may name no reason if a folder of the path
// is a file.
func (o *operation) isMissing(file string, err error) bool {
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	var status *sftp.StatusError
	if !errors.As(err, &status) {
		return false
	}
	for len(file) > len(o.store.cfg.Root) {
		if st, err := o.Client.Stat(file); err == nil {
			return !st.IsDir()
		}
		file = path.Dir(file)
	}
	return false
}

// notFound is err, but of kind not found if the root exists and the object does not.
func (o *operation) notFound(name string, err error) error {
	st, e := o.Client.Stat(o.store.join(name))
	if e == nil && st.Mode().IsRegular() || e != nil && !o.isMissing(o.store.join(name), e) {
		return err
	}
	if err := o.checkRoot(); err != nil {
		return err
	}
	return api.Errorf(api.NotFound, "does not exist")
}

// checkRoot returns an error of kind unavailable unless the root is a folder.
func (o *operation) checkRoot() error {
	st, err := o.Client.Stat(o.store.cfg.Root)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && !st.IsDir():
		return api.Errorf(api.Unavailable, "the folder does not exist; make the folder on the server")
	}
	return err
}
