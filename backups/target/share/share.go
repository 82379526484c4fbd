// Package share is a store on a file server: in an NFS export or an SMB share, which the package mounts itself.
//
// Invariants. A mount belongs to one Store, and nothing else reaches the mount: mount(8) mounts the share in a new
// tmpfs, which no other mount namespace sees; the package opens the root of the share there, compares the file system
// with the wanted one, and detaches the tmpfs at once. From then on the descriptor of the root is the only way to the
// share. Therefore an object never lands in the folder below a mount point, no other program unmounts the share under
// the Store, and the kernel unmounts the share when the descriptor is closed, also with the death of the process. Only
// a process that dies while it mounts leaves a mount behind: the next one finds the mount in the mount table and
// detaches it.
//
// The password of a share is in no command line and no environment: mount.cifs reads it from a file in the tmpfs.
// Options of a URL are names of a list; nosuid, nodev and noexec come last in any case.
//
// The package starts no goroutines. System calls on a share hang while the server does not answer, so callers use a
// Store behind package bounded, which also ends Open: a child process and the open of the root have deadlines or hang
// in the abandoned call alone.
package share

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/folder"
)

// mountTime is how long mount(8) may take; less than the time of a call of package bounded.
const mountTime = 40 * time.Second

// fileSystems has the magic numbers of the file systems that a share of a kind may have.
var fileSystems = map[Kind][]int64{
	NFS:  {unix.NFS_SUPER_MAGIC},
	CIFS: {unix.CIFS_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC},
}

// Mounts mounts shares below a folder of the node.
type Mounts struct {
	dir         string
	fileSystems map[Kind][]int64

	mu    sync.Mutex
	clean bool // no mount of another process is left
}

// NewMounts mounts shares below dir. No other process uses dir at the same time.
func NewMounts(dir string) *Mounts { return &Mounts{dir: dir, fileSystems: fileSystems} }

// Credentials of an SMB share. The zero value stands for a guest.
type Credentials struct{ User, Password string }

// String hides the credentials from formats and logs.
func (Credentials) String() string { return "(secret)" }

// GoString implements fmt.GoStringer.
func (Credentials) GoString() string { return "(secret)" }

// Store is a store in a mounted share.
type Store struct {
	*folder.Store
	root *os.File
}

// Open mounts a share and opens the store in its root folder. The caller closes the Store after its last call has
// returned.
func (m *Mounts) Open(ctx context.Context, share Share, login Credentials) (*Store, error) {
	root, err := m.mount(ctx, share, login)
	if err != nil {
		return nil, err
	}
	s, err := folder.OpenAs(ctx, fmt.Sprintf("/proc/self/fd/%d", root.Fd()), share.String())
	if err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return &Store{Store: s, root: root}, nil
}

// Close unmounts the share.
func (s *Store) Close() error { return s.root.Close() }

// mount returns the root of the mounted share, which is detached from all folders.
func (m *Mounts) mount(ctx context.Context, share Share, login Credentials) (root *os.File, err error) {
	place, err := m.makePlace()
	if err != nil {
		kind := api.Other
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
			kind = api.Denied
		}
		return nil, api.Errorf(kind, "%s: cannot make a private place for the mount: %w; run the node role as root, with "+
			"the right to mount", share, err)
	}
	defer func() {
		if e := removePlace(place); e != nil && err == nil {
			err = api.Errorf(api.Other, "%s: cannot remove the place of the mount: %w", share, errors.Join(e, root.Close()))
			root = nil
		}
	}()
	point := filepath.Join(place, "share")
	if err := os.Mkdir(point, 0o700); err != nil {
		return nil, api.Errorf(api.Other, "%s: cannot make the mount point: %w", share, err)
	}
	if err := mountAny(ctx, share, login, place, point); err != nil {
		return nil, err
	}
	return m.openRoot(share, point)
}

// openRoot opens the root of a share, if the file system there is one of the kind's: the success of mount(8) proves
// nothing.
func (m *Mounts) openRoot(share Share, point string) (*os.File, error) {
	fd, err := unix.Open(point, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, api.Errorf(api.Unavailable, "%s: cannot open the mounted share: %w", share, err)
	}
	root := os.NewFile(uintptr(fd), share.String())
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, api.Errorf(api.Unavailable, "%s: cannot examine the mounted share: %w", share,
			errors.Join(err, root.Close()))
	}
	if !slices.Contains(m.fileSystems[share.kind], int64(fs.Type)) { //nolint:unconvert // int32 on some machines
		_ = root.Close()
		return nil, api.Errorf(api.Unavailable, "%s: mount reported success, but the share is not mounted (file system "+
			"%#x); check the mount tools of this node", share, fs.Type)
	}
	return root, nil
}

// makePlace makes a folder with a tmpfs that no other mount namespace sees.
func (m *Mounts) makePlace() (string, error) {
	if err := m.detachLeft(); err != nil {
		return "", err
	}
	place, err := os.MkdirTemp(m.dir, "mount-")
	if err != nil {
		return "", err
	}
	err = unix.Mount("drover", place, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700,size=64k")
	if err != nil {
		return "", errors.Join(err, os.Remove(place))
	}
	if err := unix.Mount("", place, "", unix.MS_UNBINDABLE, ""); err != nil {
		return "", errors.Join(err, removePlace(place))
	}
	return place, nil
}

// removePlace detaches the tmpfs with all mounts in it, without a wait for their users or servers.
func removePlace(place string) error {
	if err := unix.Unmount(place, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", place, err)
	}
	return os.Remove(place)
}

// detachLeft makes the folder of the mounts and, once in the life of m, detaches the mounts of a process that died.
func (m *Mounts) detachLeft() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.clean {
		return nil
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return err
	}
	dir, err := filepath.EvalSymlinks(m.dir) // the mount table has no symbolic links
	if err != nil {
		return err
	}
	left, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return filepath.Dir(i.Mountpoint) != dir, false
	})
	if err != nil {
		return err
	}
	for _, l := range left {
		if err := removePlace(l.Mountpoint); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(m.dir)
	for _, e := range entries { // folders whose tmpfs was never mounted
		if strings.HasPrefix(e.Name(), "mount-") {
			err = errors.Join(err, os.Remove(filepath.Join(m.dir, e.Name())))
		}
	}
	m.clean = err == nil
	return err
}
