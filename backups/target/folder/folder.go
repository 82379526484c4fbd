// Package folder is a store in a folder: a local one, or a mounted share of a file server. An object is a file of the
// same name below the folder.
//
// A Put writes a temporary file in the folder .tmp, past the page cache where body and file system allow direct I/O (on
// a share always), and renames the file. The order is: the content of the file durable, the folders above the name
// durable, the rename, the new name durable. A folder that exists may still be lost with a loss of power, because
// another process made the folder and has not synced its parent yet. Therefore the store syncs the parent of each
// folder once in its life.
//
// The store never makes its root: behind an empty mount point lies the disk of the node. The package starts no
// goroutines; the mutex of Store guards a map, and no I/O happens under the mutex. A call cannot end earlier than the
// system call that it is in, so a file server that hangs holds the call.
package folder

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
	"drover.io/drover/block"
	"drover.io/drover/block/file"
)

const (
	// tmpDir has the temporary files. No object has such a name, because of the dot.
	tmpDir = ".tmp"
	// abandonedAfter is the age at which nobody writes to a temporary file any more.
	abandonedAfter = 24 * time.Hour
	// writeLen bounds a write, so that the end of a context ends a Put of a large object.
	writeLen = 4 << 20
)

// Store is a store in a folder.
type Store struct {
	fsys file.FS
	root string
	name string // in errors

	mu      sync.Mutex
	durable map[string]bool // folders whose parents this store has synced
}

var _ target.Store = (*Store)(nil)

// Open opens the store in the folder root, which must exist, and removes abandoned temporary files.
func Open(ctx context.Context, root string) (*Store, error) { return openOn(ctx, file.OS, root) }

// OpenAs is Open for a folder that has another name in errors.
func OpenAs(ctx context.Context, root, name string) (*Store, error) {
	return openNamed(ctx, file.OS, root, name)
}

func openOn(ctx context.Context, fsys file.FS, root string) (*Store, error) {
	return openNamed(ctx, fsys, root, "folder store "+root)
}

func openNamed(ctx context.Context, fsys file.FS, root, name string) (*Store, error) {
	s := &Store{fsys: fsys, root: filepath.Clean(root), name: name, durable: map[string]bool{}}
	if err := s.checkRoot(); err != nil {
		return nil, err
	}
	err := s.removeAbandoned(ctx)
	if kind := kindOf(err); err != nil && kind != api.Denied && kind != api.Full { // else the store can still be read
		return nil, s.failed("remove abandoned files in "+tmpDir, err)
	}
	return s, nil
}

// checkRoot returns an error of kind unavailable unless the root is a folder.
func (s *Store) checkRoot() error {
	st, err := os.Stat(s.root)
	if err == nil && !st.IsDir() {
		err = unix.ENOTDIR
	}
	if err != nil {
		return api.Errorf(api.Unavailable, "%s: cannot open the folder: %w; make the folder, or mount its file system", s,
			cause(err))
	}
	return nil
}

func (s *Store) join(name string) string { return filepath.Join(s.root, filepath.FromSlash(name)) }

// Put implements target.Store.
func (s *Store) Put(ctx context.Context, name string, body []byte) error {
	if err := errors.Join(target.CheckName(name), s.checkRoot()); err != nil {
		return err
	}
	err := s.put(ctx, name, body)
	if errors.Is(err, fs.ErrNotExist) { // another program removed a folder that the store knew as durable
		s.forgetFolders()
		err = s.put(ctx, name, body)
	}
	if err != nil {
		return s.failed("write object "+name, err)
	}
	return nil
}

func (s *Store) put(ctx context.Context, name string, body []byte) error {
	path := s.join(name)
	for _, dir := range []string{filepath.Join(s.root, tmpDir), filepath.Dir(path)} {
		if err := s.makeFolder(ctx, dir); err != nil {
			return err
		}
	}
	tmp, err := s.writeTemporary(ctx, body)
	if err != nil {
		return err
	}
	if err = ctx.Err(); err == nil {
		err = s.fsys.Rename(tmp, path)
	}
	if err != nil {
		_ = s.fsys.Remove(tmp) // else Open removes the file
		return err
	}
	return s.fsys.SyncDir(filepath.Dir(path))
}

// writeTemporary makes a temporary file with body, durable.
func (s *Store) writeTemporary(ctx context.Context, body []byte) (string, error) {
	name := filepath.Join(s.root, tmpDir, rand.Text())
	// An SMB share writes past the page cache only if the file was opened so.
	h, err := s.fsys.Open(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) { // no direct I/O; the file may exist nevertheless
		h, err = s.fsys.Open(name, os.O_WRONLY|os.O_CREATE, 0o600)
	}
	if err != nil {
		return "", err
	}
	if err = writeBody(ctx, h, body); err == nil {
		err = h.Datasync()
	}
	if err = errors.Join(err, h.Close()); err != nil {
		_ = s.fsys.Remove(name) // else Open removes the file
		return "", err
	}
	return name, nil
}

// writeBody writes body past the page cache as far as the file system takes it: NFS and SMB take all of it, others the
// whole blocks of aligned memory. Bytes of a share in the page cache would be a hazard for the whole node: to start any
// program, the kernel closes a copy of each descriptor, and writes such bytes out before. While the server hangs, the
// process could start no program, such as mkfs or mount for a volume.
func writeBody(ctx context.Context, h file.Handle, body []byte) error {
	done, err := writeFrom(ctx, h, body, 0)
	if !errors.Is(err, unix.EINVAL) { // EINVAL: the file system wants larger blocks, or other memory
		return err
	}
	if err := setDirect(h, false); err != nil {
		return err
	}
	_, err = writeFrom(ctx, h, body, done)
	return err
}

// writeFrom writes p, from off on, the incomplete block at the end alone, and returns how far it came.
func writeFrom(ctx context.Context, h file.Handle, p []byte, off int) (int, error) {
	for {
		if err := ctx.Err(); err != nil || off == len(p) {
			return off, err
		}
		n := min(len(p)-off, writeLen)
		if n > block.Size {
			n &^= block.Size - 1
		}
		if _, err := h.WriteAt(p[off:off+n], int64(off)); err != nil {
			return off, err
		}
		off += n
	}
}

func setDirect(h file.Handle, on bool) error {
	flags, err := unix.FcntlInt(h.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	if flags &^= unix.O_DIRECT; on {
		flags |= unix.O_DIRECT
	}
	_, err = unix.FcntlInt(h.Fd(), unix.F_SETFL, flags)
	return err
}

// makeFolder makes dir and the folders above dir, as far as they are missing, and makes their names durable.
func (s *Store) makeFolder(ctx context.Context, dir string) error {
	if dir == s.root || s.isDurable(dir) {
		return ctx.Err()
	}
	parent := filepath.Dir(dir)
	if err := s.makeFolder(ctx, parent); err != nil {
		return err
	}
	if err := s.fsys.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := s.fsys.SyncDir(parent); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.durable[dir] = true
	return nil
}

func (s *Store) isDurable(dir string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.durable[dir]
}

func (s *Store) forgetFolders() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.durable)
}

// removeAbandoned removes old temporary files of processes that died. The age is by the clock of the file system,
// which may be a server's: the time of a new file is now.
func (s *Store) removeAbandoned(ctx context.Context) error {
	dir := filepath.Join(s.root, tmpDir)
	entries, err := s.fsys.ReadDir(dir)
	if len(entries) == 0 && (err == nil || errors.Is(err, fs.ErrNotExist)) {
		return nil
	} else if err != nil {
		return err
	}
	tmp, err := s.writeTemporary(ctx, nil)
	if err != nil {
		return err
	}
	now, err := os.Lstat(tmp)
	if err := errors.Join(err, s.fsys.Remove(tmp)); err != nil {
		return err
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		st, err := e.Info()
		if err == nil && now.ModTime().Sub(st.ModTime()) > abandonedAfter {
			err = s.fsys.Remove(filepath.Join(dir, e.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // another process removed the file
			return err
		}
	}
	return nil
}

// Get implements target.Store.
func (s *Store) Get(ctx context.Context, name string, off, n int64) ([]byte, error) {
	if err := errors.Join(target.CheckName(name), target.CheckRange(name, off, n)); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, s.failed("read object "+name, err)
	}
	h, st, err := s.openObject(name)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if n < 0 {
		n = st.Size() - off
	}
	if n < 0 || off+n > st.Size() {
		return nil, target.Short(s.String(), name, off, n, st.Size())
	}
	body, err := readBody(h, off, n)
	if err != nil {
		return nil, s.failed("read object "+name, err)
	}
	return body, nil
}

// directFrom is the size from which a read is faster past the page cache. Few objects are read twice.
const directFrom = 256 << 10

// readBody reads n bytes of a file that has them, large reads past the page cache if the file system allows it.
func readBody(h file.Handle, off, n int64) ([]byte, error) {
	if n >= directFrom && setDirect(h, true) == nil {
		from := off &^ (block.Size - 1)
		whole := block.AlignedBuffer(int((off+n+block.Size-1)&^(block.Size-1) - from))
		have, err := h.ReadAt(whole, from)
		if int64(have) >= off+n-from { // the file may end within the last block
			return whole[off-from:][:n:n], nil
		}
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, io.EOF) { // EINVAL: larger blocks, as above
			return nil, err
		}
		if err := setDirect(h, false); err != nil {
			return nil, err
		}
	}
	body := make([]byte, n)
	have, err := h.ReadAt(body, off)
	if int64(have) == n {
		return body, nil
	}
	return nil, err
}

// openObject opens the file of an object. Only a regular file is an object; O_NONBLOCK, because a pipe waits.
func (s *Store) openObject(name string) (file.Handle, fs.FileInfo, error) {
	h, err := s.fsys.Open(s.join(name), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, s.failedObject("open", name, err)
	}
	st, err := h.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, nil, errors.Join(s.failedObject("open", name, err), h.Close())
	}
	return h, st, nil
}

// Stat implements target.Store.
func (s *Store) Stat(ctx context.Context, name string) (target.Object, error) {
	if err := target.CheckName(name); err != nil {
		return target.Object{}, err
	}
	if err := ctx.Err(); err != nil {
		return target.Object{}, s.failed("open object "+name, err)
	}
	h, st, err := s.openObject(name)
	if err != nil {
		return target.Object{}, err
	}
	return target.NewObject(name, st.Size(), st.ModTime()), h.Close()
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
	return s.list(ctx, dir, prefix, each)
}

// list lists the objects below the folder dir, which is empty for the root.
func (s *Store) list(ctx context.Context, dir, prefix string, each func(target.Object) error) error {
	entries, err := s.fsys.ReadDir(s.join(dir))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return s.checkRoot()
	} else if err != nil {
		return s.failed(fmt.Sprintf("list folder %q", dir), err)
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return s.failed(fmt.Sprintf("list folder %q", dir), err)
		}
		name := e.Name()
		if dir != "" {
			name = dir + "/" + name
		}
		if target.CheckName(name) != nil || !strings.HasPrefix(name, prefix) {
			continue
		}
		switch {
		case e.IsDir():
			err = s.list(ctx, name, prefix, each)
		case e.Type().IsRegular():
			err = s.listFile(name, e, each)
		case e.Type()&fs.ModeSymlink != 0: // Put and Get would follow the link
			err = api.Errorf(api.Unsupported, "%s: cannot list %s: a symbolic link; mount the other folder there", s, name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// ListFolders implements target.FolderLister. A folder without objects is listed, too.
func (s *Store) ListFolders(ctx context.Context, prefix string, each func(string) error) error {
	if err := target.CheckPrefix(prefix); err != nil {
		return err
	}
	entries, err := s.fsys.ReadDir(s.join(prefix))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return s.checkRoot()
	} else if err != nil {
		return s.failed(fmt.Sprintf("list folder %q", prefix), err)
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return s.failed(fmt.Sprintf("list folder %q", prefix), err)
		}
		if e.Type()&fs.ModeSymlink != 0 {
			return api.Errorf(api.Unsupported, "%s: cannot list %s%s: a symbolic link; mount the other folder there", s, prefix,
				e.Name())
		}
		if !e.IsDir() || target.CheckName(prefix+e.Name()) != nil {
			continue
		}
		if err := each(e.Name()); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) listFile(name string, e fs.DirEntry, each func(target.Object) error) error {
	st, err := e.Info()
	if errors.Is(err, fs.ErrNotExist) { // deleted meanwhile
		return nil
	} else if err != nil {
		return s.failed("list object "+name, err)
	}
	return each(target.NewObject(name, st.Size(), st.ModTime()))
}

// Delete implements target.Store.
func (s *Store) Delete(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := target.CheckName(name); err != nil {
			return err
		}
	}
	if err := s.checkRoot(); err != nil {
		return err
	}
	changed := map[string]bool{}
	for _, name := range names {
		err := ctx.Err()
		if err == nil {
			err = s.fsys.Remove(s.join(name))
		}
		switch {
		case err == nil:
			changed[filepath.Dir(s.join(name))] = true
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ENOTEMPTY):
			return s.failed("delete object "+name, err)
		}
	}
	for dir := range changed {
		if err := s.fsys.SyncDir(dir); err != nil {
			return s.failed("delete objects durably", err)
		}
	}
	return nil
}

// String names the store in errors.
func (s *Store) String() string { return s.name }

// failedObject is failed, but of kind not found if the root exists and the object does not.
func (s *Store) failedObject(action, name string, err error) error {
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return s.failed(action+" object "+name, err)
	}
	if err := s.checkRoot(); err != nil {
		return err
	}
	return api.Errorf(api.NotFound, "%s: object %s does not exist", s, name)
}

// failed is the error of an action on the store, with the kind of its cause.
func (s *Store) failed(action string, err error) error {
	return api.Errorf(kindOf(err), "%s: cannot %s: %w", s, action, cause(err))
}

// cause takes the path from the error of a file, because the caller names the object.
func cause(err error) error {
	var path *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &link):
		return link.Err
	}
	return err
}

func kindOf(err error) api.Kind {
	for _, k := range []struct {
		kind  api.Kind
		errno []unix.Errno
	}{
		{api.Full, []unix.Errno{unix.ENOSPC, unix.EDQUOT}},
		{api.Denied, []unix.Errno{unix.EACCES, unix.EPERM, unix.EROFS}},
		{api.Unavailable, []unix.Errno{unix.EIO, unix.ESTALE, unix.ETIMEDOUT, unix.ENOTCONN, unix.EHOSTDOWN,
			unix.EHOSTUNREACH, unix.ECONNREFUSED, unix.ECONNRESET}},
	} {
		for _, errno := range k.errno {
			if errors.Is(err, errno) {
				return k.kind
			}
		}
	}
	return api.Other
}
