// Package cache keeps parts of immutable objects of a store in a local folder.
//
// The package promises nothing: a part may be missing, a hole, or damaged, and the caller compares the bytes with a
// checksum that the caller has from elsewhere. Therefore nothing is synced, no file is written in one piece, several
// processes may use a folder at once, and an administrator may delete the folder at any time. No method returns an
// error: a cache that does not work costs time alone.
//
// A file of the folder has the name of the object, and the parts at their offsets in the object. The bytes are those of
// the store, so sealed ones stay sealed.
//
// The package has no goroutines. Folder.mu is a leaf, and is held while a Folder looks through its files.
package cache

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"drover.io/drover/backups/repo/blob"
)

const (
	blockSize = 4096
	// unusedTime is how long an object stays at least after its last use. To evict whatever was not used for longest is
	// of no help to sweeps, which read all objects in turn: each object would leave shortly before its next use.
	unusedTime = 3 * 24 * time.Hour
	// lookInterval is the least time between two looks through all files of a full folder.
	lookInterval = time.Hour
	// touchInterval is how exact the times of the last use are.
	touchInterval = time.Hour
)

// Folder keeps parts of objects. Methods are safe for concurrent use. A nil Folder keeps nothing.
type Folder struct {
	path  string
	limit int64

	mu     sync.Mutex
	used   int64     // bytes on the disk at the last look, and of all parts since
	looked time.Time // zero: never
}

// New returns the folder at path, which need not exist. The folder has at most limit bytes, and some more where several
// processes write at once.
func New(path string, limit int64) *Folder { return &Folder{path: path, limit: limit} }

// ReadAt fills b with the part of an object from off on, and reports whether the folder has so many bytes. The caller
// compares them with a checksum.
func (f *Folder) ReadAt(id blob.ID, b []byte, off int64) bool {
	if f == nil {
		return false
	}
	path := f.file(id)
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer file.Close() // a file that is only read
	if n, _ := file.ReadAt(b, off); n < len(b) {
		return false
	}
	now := time.Now()
	if info, err := file.Stat(); err == nil && now.Sub(info.ModTime()).Abs() > touchInterval {
		_ = os.Chtimes(path, now, now)
	}
	return true
}

// WriteAt keeps the part of an object from off on, unless the folder is full of objects that were used lately.
func (f *Folder) WriteAt(id blob.ID, b []byte, off int64) {
	if f == nil || !f.reserve(int64(len(b)+blockSize-1)/blockSize*blockSize) {
		return
	}
	path := f.file(id)
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if os.IsNotExist(err) && os.MkdirAll(f.path, 0o700) == nil {
		file, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	}
	if err != nil {
		return
	}
	_, err = file.WriteAt(b, off)
	if file.Close() != nil || err != nil {
		_ = os.Remove(path) // the disk may be full
	}
}

func (f *Folder) file(id blob.ID) string { return filepath.Join(f.path, id.String()) }

// reserve counts n bytes more, and makes room for them.
func (f *Folder) reserve(n int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.looked.IsZero() || f.used+n > f.limit && time.Since(f.looked).Abs() > lookInterval {
		f.evict()
	}
	if f.used+n > f.limit {
		return false
	}
	f.used += n
	return true
}

// cachedFile is a file of the folder.
type cachedFile struct {
	path string
	size int64 // on the disk
	used time.Time
}

// evict counts the bytes of all files, and removes the files that were not used for longest if the folder is nearly
// full.
func (f *Folder) evict() {
	now := time.Now()
	f.looked, f.used = now, 0
	entries, _ := os.ReadDir(f.path)
	files := make([]cachedFile, 0, len(entries))
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		size := info.Size()
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			size = s.Blocks * 512
		}
		files = append(files, cachedFile{filepath.Join(f.path, e.Name()), size, info.ModTime()})
		f.used += size
	}
	slices.SortFunc(files, func(a, b cachedFile) int { return cmp.Compare(a.used.UnixNano(), b.used.UnixNano()) })
	for _, file := range files {
		// A time in the future is that of a clock that was wrong.
		if f.used > f.limit/4*3 && now.Sub(file.used).Abs() > unusedTime && os.Remove(file.path) == nil {
			f.used -= file.size
		}
	}
}
