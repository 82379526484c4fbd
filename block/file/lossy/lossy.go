// Package lossy is a back end of the file seam for tests: lossy simulates a disk that loses power. A folder holds the
// files that running programs see. Beside the folder the FS knows the durable state, by the letter of the seam:
// content after Datasync, names after SyncDir. Crash writes out a state that a power loss could leave: everything
// durable, and of all other changes, data and names alike, a random part, in sectors of 512 bytes and in any order.
// Only a rename stays whole, and a change of a name comes with the earlier changes of the same name.
//
// Changes past the seam, such as writes to Handle.Fd, are seen as well: the FS compares content with the durable
// content. A caller reports a sync past the seam with Synced. The package starts no goroutines.
package lossy

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"drover.io/drover/block/file"
)

// ErrKilled is returned by every change after the kill of KillAfter.
var ErrKilled = errors.New("lossy: the process is dead")

const (
	blockLen  = 4096
	sectorLen = 512
)

// FS is one folder on a disk that can lose power.
type FS struct {
	root string

	mu      sync.Mutex
	top     *inode
	pending []*change // of names, not durable yet, in order
	open    map[int]*handle
	files   []*os.File // of all inodes
	left    int        // changes until the kill; negative: no kill
	dead    bool
	steps   int
}

var _ file.FS = (*FS)(nil)

// inode is a file or a folder, under any number of names.
type inode struct {
	live    map[string]*inode // of a folder: the programs' view
	durable map[string]*inode // of a folder
	f       *os.File          // of a file: reads the programs' view, even after the name is removed
	content content           // of a file: durable
}

func (n *inode) isDir() bool { return n.live != nil }

// content is a sparse file: a size and blocks of data.
type content struct {
	size   int64
	blocks map[int64][]byte
}

// change is one change of names: gone is removed, then come is added.
type change struct {
	gone, come place
	node       *inode // that has the name come
}

type place struct {
	dir  *inode
	name string
}

// New stands on the folder root, whose content counts as durable.
func New(root string) (*FS, error) {
	f := &FS{root: filepath.Clean(root), open: make(map[int]*handle), left: -1}
	seen := make(map[uint64]*inode)
	top, err := load(f.root, seen)
	f.top = top
	for _, n := range seen {
		f.files = append(f.files, n.f)
	}
	return f, err
}

// load reads the file or folder name; seen holds the read files by number: a file may have several names.
func load(name string, seen map[uint64]*inode) (*inode, error) {
	st, err := os.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !st.IsDir() {
		number := st.Sys().(*syscall.Stat_t).Ino
		if n := seen[number]; n != nil {
			return n, nil
		}
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		n := &inode{f: f}
		seen[number] = n
		n.content, err = look(f)
		return n, err
	}
	n := &inode{live: make(map[string]*inode)}
	entries, err := os.ReadDir(name)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if n.live[e.Name()], err = load(filepath.Join(name, e.Name()), seen); err != nil {
			return nil, err
		}
	}
	n.durable = maps.Clone(n.live)
	return n, nil
}

// look reads the present content of a file.
func look(f *os.File) (content, error) {
	st, err := f.Stat()
	if err != nil {
		return content{}, err
	}
	c := content{st.Size(), make(map[int64][]byte)}
	for off := int64(0); ; {
		from, to, err := file.NextData(int(f.Fd()), off, c.size)
		if err != nil || from >= c.size {
			return c, err
		}
		for b := from / blockLen; b*blockLen < to; b++ {
			p := make([]byte, blockLen)
			if _, err := f.ReadAt(p[:min(blockLen, c.size-b*blockLen)], b*blockLen); err != nil {
				return c, err
			}
			c.blocks[b] = p
		}
		off = to
	}
}

// Close closes what the program has left open and forgets all files; the folder stays. No call may follow but Close, of
// the FS and of handles.
func (f *FS) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.open {
		_ = h.Handle.Close()
	}
	for _, r := range f.files {
		_ = r.Close()
	}
	f.files, f.top, f.pending, f.open = nil, nil, nil, nil
	return nil
}

// KillAfter lets n changes happen; all later operations but reads fail with ErrKilled.
func (f *FS) KillAfter(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left = n
}

// Restart lets changes happen again, after a kill: only the process was dead, and its writes still exist, durable or
// not. The dead process's handles must be closed.
func (f *FS) Restart() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left, f.dead = -1, false
}

// Killed reports whether a change was refused after the kill.
func (f *FS) Killed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

// Step counts as a change: for operations past the seam.
func (f *FS) Step() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.step()
}

// Steps is how many changes were counted.
func (f *FS) Steps() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.steps
}

func (f *FS) step() error {
	if f.left == 0 {
		f.dead = true
		return ErrKilled
	}
	if f.left > 0 {
		f.left--
	}
	f.steps++
	return nil
}

// find is the folder that holds name, and the last element of name.
func (f *FS) find(name string) (place, error) {
	rel, err := filepath.Rel(f.root, filepath.Clean(name))
	if err != nil || rel == "." || strings.HasPrefix(rel, "..") {
		return place{}, fmt.Errorf("lossy: %s is not below %s", name, f.root)
	}
	dir := f.top
	for part := range strings.SplitSeq(filepath.Dir(rel), "/") {
		if part == "." {
			continue
		}
		next := dir.live[part]
		if next == nil || !next.isDir() {
			return place{}, &fs.PathError{Op: "find", Path: name, Err: fs.ErrNotExist}
		}
		dir = next
	}
	return place{dir, filepath.Base(rel)}, nil
}

func (f *FS) change(gone, come place, n *inode) {
	if gone.dir != nil {
		delete(gone.dir.live, gone.name)
	}
	if come.dir != nil {
		come.dir.live[come.name] = n
	}
	f.pending = append(f.pending, &change{gone, come, n})
}

type handle struct {
	file.Handle
	f *FS
	n *inode
}

// Open implements file.FS.
func (f *FS) Open(name string, flag int, perm fs.FileMode) (file.Handle, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err != nil {
		return nil, err
	}
	n := at.dir.live[at.name]
	if flag&os.O_CREATE != 0 && n == nil || flag&os.O_TRUNC != 0 {
		if err := f.step(); err != nil {
			return nil, err
		}
	}
	h, err := file.OS.Open(name, flag, perm)
	if err != nil {
		return nil, err
	}
	if n == nil {
		r, err := os.Open(name)
		if err != nil {
			return nil, errors.Join(err, h.Close())
		}
		n = &inode{f: r, content: content{blocks: make(map[int64][]byte)}}
		f.files = append(f.files, r)
		f.change(place{}, at, n)
	}
	opened := &handle{h, f, n}
	f.open[int(h.Fd())] = opened
	return opened, nil
}

// Mkdir implements file.FS.
func (f *FS) Mkdir(name string, perm fs.FileMode) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err != nil {
		return err
	}
	if err := f.step(); err != nil {
		return err
	}
	if err := os.Mkdir(name, perm); err != nil {
		return err
	}
	f.change(place{}, at, &inode{live: make(map[string]*inode), durable: make(map[string]*inode)})
	return nil
}

// Rename implements file.FS.
func (f *FS) Rename(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	a, err := f.find(from)
	if err != nil {
		return err
	}
	b, err := f.find(to)
	if err != nil {
		return err
	}
	if err := f.step(); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return err
	}
	f.change(a, b, a.dir.live[a.name])
	return nil
}

// Link implements file.FS.
func (f *FS) Link(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	a, err := f.find(from)
	if err != nil {
		return err
	}
	b, err := f.find(to)
	if err != nil {
		return err
	}
	if err := f.step(); err != nil {
		return err
	}
	if err := os.Link(from, to); err != nil {
		return err
	}
	f.change(place{}, b, a.dir.live[a.name])
	return nil
}

// Remove implements file.FS.
func (f *FS) Remove(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, err := f.find(name)
	if err != nil {
		return err
	}
	if err := f.step(); err != nil {
		return err
	}
	if err := os.Remove(name); err != nil {
		return err
	}
	f.change(at, place{}, nil)
	return nil
}

// ReadDir implements file.FS.
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) { return os.ReadDir(name) }

// SyncDir implements file.FS.
func (f *FS) SyncDir(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	dir := f.top
	if filepath.Clean(name) != f.root {
		at, err := f.find(name)
		if err != nil {
			return err
		}
		if dir = at.dir.live[at.name]; dir == nil || !dir.isDir() {
			return &fs.PathError{Op: "sync", Path: name, Err: fs.ErrNotExist}
		}
	}
	if err := f.step(); err != nil {
		return err
	}
	f.settle(func(c *change) bool {
		return c.come.dir == dir || c.come.dir == nil && c.gone.dir == dir
	})
	return nil
}

// settle makes the pending changes durable that chosen picks, with the earlier changes of the same names.
func (f *FS) settle(chosen func(*change) bool) {
	take := make([]bool, len(f.pending))
	need := make(map[place]bool)
	for i := len(f.pending) - 1; i >= 0; i-- {
		c := f.pending[i]
		if chosen(c) || need[c.gone] || need[c.come] {
			take[i] = true
			for _, p := range []place{c.gone, c.come} {
				if p.dir != nil {
					need[p] = true
				}
			}
		}
	}
	var rest []*change
	for i, c := range f.pending {
		if !take[i] {
			rest = append(rest, c)
			continue
		}
		if c.gone.dir != nil {
			delete(c.gone.dir.durable, c.gone.name)
		}
		if c.come.dir != nil {
			c.come.dir.durable[c.come.name] = c.node
		}
	}
	f.pending = rest
}

// Synced says that the file behind fd was synced past the seam, and counts as a change.
func (f *FS) Synced(fd int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.open[fd]
	if h == nil {
		return fmt.Errorf("lossy: fd %d is not open", fd)
	}
	return f.sync(h.n)
}

func (f *FS) sync(n *inode) error {
	if err := f.step(); err != nil {
		return err
	}
	c, err := look(n.f)
	if err == nil {
		n.content = c
	}
	return err
}

func (h *handle) Datasync() error {
	h.f.mu.Lock()
	defer h.f.mu.Unlock()
	return h.f.sync(h.n)
}

func (h *handle) WriteAt(p []byte, off int64) (int, error) {
	if err := h.f.Step(); err != nil {
		return 0, err
	}
	return h.Handle.WriteAt(p, off)
}

func (h *handle) Truncate(size int64) error {
	if err := h.f.Step(); err != nil {
		return err
	}
	return h.Handle.Truncate(size)
}

func (h *handle) Punch(off, n int64) error {
	if err := h.f.Step(); err != nil {
		return err
	}
	return h.Handle.Punch(off, n)
}

func (h *handle) CopyFrom(from file.Handle, off, n int64) error {
	if err := h.f.Step(); err != nil {
		return err
	}
	if l, ok := from.(*handle); ok {
		from = l.Handle
	}
	return h.Handle.CopyFrom(from, off, n)
}

func (h *handle) Close() error {
	h.f.mu.Lock()
	delete(h.f.open, int(h.Fd()))
	h.f.mu.Unlock()
	return h.Handle.Close()
}

// Crash writes a state that a loss of power now could leave into the folder into, which must not exist. The FS
// continues with the result as its durable state, so Crash is the last call on an FS.
func (f *FS) Crash(rng *rand.Rand, into string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.settle(func(*change) bool { return rng.IntN(2) == 0 })
	return write(f.top, into, rng, make(map[*inode]string))
}

// write makes the state of n after a crash; seen has the first name of every file.
func write(n *inode, name string, rng *rand.Rand, seen map[*inode]string) error {
	if first := seen[n]; first != "" {
		return os.Link(first, name)
	}
	if !n.isDir() {
		seen[n] = name
		return writeFile(n, name, rng)
	}
	if err := os.Mkdir(name, 0o700); err != nil {
		return err
	}
	for _, e := range slices.Sorted(maps.Keys(n.durable)) {
		if err := write(n.durable[e], filepath.Join(name, e), rng, seen); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(n *inode, name string, rng *rand.Rand) error {
	now, err := look(n.f)
	if err != nil {
		return err
	}
	was := n.content
	size := was.size
	if rng.IntN(2) == 0 {
		size = now.size
	}
	out, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Truncate(size); err != nil {
		return err
	}
	blocks := maps.Clone(was.blocks)
	maps.Copy(blocks, now.blocks)
	for _, b := range slices.Sorted(maps.Keys(blocks)) {
		p := mix(was.blocks[b], now.blocks[b], rng)
		if p == nil || b*blockLen >= size {
			continue
		}
		if _, err := out.WriteAt(p[:min(blockLen, size-b*blockLen)], b*blockLen); err != nil {
			return err
		}
	}
	return nil
}

// mix is a possible content of a block after a crash; nil is a hole.
func mix(was, now []byte, rng *rand.Rand) []byte {
	if was == nil || now == nil { // the map changes in whole blocks
		if rng.IntN(2) == 0 {
			return was
		}
		return now
	}
	out := slices.Clone(was)
	how := rng.IntN(3)
	for s := 0; s < blockLen; s += sectorLen {
		if how == 0 || how == 1 && rng.IntN(2) == 0 {
			copy(out[s:s+sectorLen], now[s:])
		}
	}
	return out
}
