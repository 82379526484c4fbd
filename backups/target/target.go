// Package target is the seam to the stores of backup targets: a store keeps whole objects by name. Below the package
// lie the stores folder, share, s3, azure and sftp; web, which the stores behind HTTP share; bounded, which ends the
// calls of a store that hangs; address, which opens the store of a URL; and targettest, the contract that each of them
// passes.
//
// Each store keeps these invariants. An object is whole or absent: neither a power loss nor a failed Put leaves a torn
// object, and List never shows one. Put and Delete return after their effect is durable. Only names that CheckName
// accepts are objects; List skips everything else in the place of the store. Errors have a kind of package api: a
// missing object is NotFound, a bad name, range or short object Invalid, a refused credential Denied, a store without
// room Full, a store that does not answer Unavailable. An error holds no secret. The end of a caller's context ends the
// operation, and errors.Is finds the context's error.
//
// A store has no goroutine that outlives a call, other than the idle connections of s3, azure and sftp and the
// abandoned calls of bounded, for which Close answers.
package target

import (
	"context"
	"fmt"
	"strings"
	"time"

	"drover.io/drover/api"
)

// Object describes an object of a store. Stores make an Object with NewObject.
type Object struct {
	Name     string
	Size     int64
	Modified time.Time // by the store's own clock
}

// largestObject is larger than every object of a repository: sums of sizes fit into an int64.
const largestObject = 1 << 40

// NewObject bounds what a server tells of an object: the size to 0 and largestObject, and the time as api.BoundTime
// does. An object with another size than the server tells counts as damaged when it is read.
func NewObject(name string, size int64, modified time.Time) Object {
	return Object{name, min(max(size, 0), largestObject), api.BoundTime(modified)}
}

// Store keeps whole objects below names like "data/ab/abcd". Methods are safe for concurrent use, also by several
// processes on the same store.
type Store interface {
	// Put writes an object, and replaces an object of the same name whole. The object is durable before Put returns.
	// Put does not change body, and a store can write body faster if block.Aligned. After an error, body belongs to the
	// store: the caller does not change the memory any more, because an abandoned call may still read it.
	Put(ctx context.Context, name string, body []byte) error
	// Get reads n bytes from off on; n < 0 reads to the end. An object that ends earlier is an error of kind invalid, a
	// missing object of kind not found.
	Get(ctx context.Context, name string, off, n int64) ([]byte, error)
	// Stat describes an object; a missing object is an error of kind not found.
	Stat(ctx context.Context, name string) (Object, error)
	// List calls each, in any order, for the objects whose name begins with prefix, until each returns an error; List
	// returns this error. List may miss objects that are written or deleted meanwhile. No such object is no error.
	List(ctx context.Context, prefix string, each func(Object) error) error
	// Delete removes objects durably; a missing object is no error. After an error, some of the objects may be deleted.
	Delete(ctx context.Context, names ...string) error
}

// FolderLister is a Store that lists folders without the objects in them.
type FolderLister interface {
	// ListFolders calls each, in any order, once for the first element after prefix of names with more elements. prefix
	// ends in '/'. Errors and deletions meanwhile are as in List.
	ListFolders(ctx context.Context, prefix string, each func(name string) error) error
}

// ListFolders is that of a FolderLister. In another store it lists all objects.
func ListFolders(ctx context.Context, s Store, prefix string, each func(name string) error) error {
	if err := CheckPrefix(prefix); err != nil {
		return err
	}
	if l, ok := s.(FolderLister); ok {
		return l.ListFolders(ctx, prefix, each)
	}
	last := map[string]struct{}{}
	return s.List(ctx, prefix, func(o Object) error {
		name, _, more := strings.Cut(strings.TrimPrefix(o.Name, prefix), "/")
		if _, again := last[name]; again || !more {
			return nil
		}
		last[name] = struct{}{}
		return each(name)
	})
}

// Bounds of names: the shortest of the file systems and stores.
const (
	maxElement = 255
	maxName    = 512
)

// CheckName refuses a name that a store could not keep, or that could lead out of the store: a name has elements of
// letters, digits, '.', '_' and '-', joined by '/', and no element begins with a dot.
func CheckName(name string) error {
	if len(name) > maxName {
		return api.Errorf(api.Invalid, "object name %.64q...: has %d bytes, at most %d are allowed", name, len(name), maxName)
	}
	for element := range strings.SplitSeq(name, "/") {
		switch {
		case element == "":
			return api.Errorf(api.Invalid, "object name %q: has an empty element", name)
		case element[0] == '.':
			return api.Errorf(api.Invalid, "object name %q: an element begins with a dot", name)
		case len(element) > maxElement:
			return api.Errorf(api.Invalid, "object name %q: an element has %d bytes, at most %d are allowed",
				name, len(element), maxElement)
		case strings.ContainsFunc(element, isForeign):
			return api.Errorf(api.Invalid, "object name %q: only letters, digits, '.', '_', '-' and '/' are allowed", name)
		}
	}
	return nil
}

// CheckPrefix refuses a prefix with which no name can begin.
func CheckPrefix(prefix string) error { return CheckName(prefix + "x") }

// CheckRange refuses a range that no object has.
func CheckRange(name string, off, n int64) error {
	if off < 0 || n >= 0 && off+n < off {
		return api.Errorf(api.Invalid, "object %s: the range of %d bytes from %d is outside of every object", name, n, off)
	}
	return nil
}

// Short is the error of a Get beyond the end of an object of size bytes.
func Short(store, name string, off, n, size int64) error {
	want := fmt.Sprintf("%d bytes", n)
	if n < 0 {
		want = "bytes"
	}
	return api.Errorf(api.Invalid, "%s: object %s is too short: cannot read %s from %d of %d",
		store, name, want, off, size)
}

func isForeign(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '.' && r != '_' && r != '-'
}
