package repo

import (
	"bytes"
	"context"
	"io"
	"strings"
	"sync"

	"github.com/klauspost/compress/zstd"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/target"
)

// Names and folders of a repository.
const (
	configName      = "config"
	keysFolder      = "keys/"
	dataFolder      = "data/"
	indexFolder     = "index/"
	snapshotsFolder = "snapshots/"
	locksFolder     = "locks/"
)

// Bounds of objects in bytes.
const (
	smallFile   = 64 << 10
	indexLimit  = 32 << 20 // sealed; Drover's and restic's have about 2 MiB
	indexPlain  = 1 << 30
	folderLimit = 1 << 18  // objects
	windowLimit = 64 << 20 // memory of a decoder
)

// listAttempts is how often a reader lists a folder again whose objects other sessions replace meanwhile.
const listAttempts = 5

// compressedFile is the first byte of a compressed file.
const compressedFile = 2

// fastEncoder is for data, betterEncoder for trees and files: fast leaves hexadecimal digits as they are.
var (
	fastEncoder   = sync.OnceValue(func() *zstd.Encoder { return newEncoder(zstd.SpeedFastest) })
	betterEncoder = sync.OnceValue(func() *zstd.Encoder { return newEncoder(zstd.SpeedBetterCompression) })

	// blobDecoder fills the given memory and never allocates more.
	blobDecoder = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderConcurrency(0),
			zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(blob.Limit))
		if err != nil {
			panic(err) // only wrong options fail
		}
		return d
	})
)

func newEncoder(level zstd.EncoderLevel) *zstd.Encoder {
	// The window, restic's too, bounds the memory of a decoder of an index file.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(level), zstd.WithLowerEncoderMem(true),
		zstd.WithWindowSize(512<<10))
	if err != nil {
		panic(err) // only wrong options fail
	}
	return e
}

// namedFile is an object whose name ends in the SHA-256 of its bytes.
type namedFile struct {
	target.Object
	id blob.ID
}

// listFolder lists the objects of a folder, without those whose names are no ids: no program reads such objects.
func listFolder(ctx context.Context, store target.Store, folder string) (files []namedFile, err error) {
	err = store.List(ctx, folder, func(o target.Object) error {
		name, ok := strings.CutPrefix(o.Name, folder)
		id, err := blob.Parse(name)
		if !ok || err != nil {
			return nil
		}
		if len(files) == folderLimit {
			return api.Errorf(api.Unsupported, "more than %d objects; `restic prune` merges index files", folderLimit)
		}
		files = append(files, namedFile{o, id})
		return nil
	})
	if err != nil {
		return nil, api.Errorf(api.KindOf(err), "repository: %s cannot be listed: %w", folder, err)
	}
	return files, nil
}

// readNamed reads an object of at most limit bytes and compares the bytes with the name. A damaged object is read
// twice: a network may damage bytes, too.
func readNamed(ctx context.Context, store target.Store, f namedFile, limit int64) (b []byte, err error) {
	for range 2 {
		b, err = readObject(ctx, store, f.Object, limit)
		if err == nil && blob.Sum(b) != f.id {
			err = api.Errorf(api.Corrupt, "object %s: the bytes do not match the name", f.Name)
		}
		if !api.Is(err, api.Corrupt) {
			break
		}
	}
	return b, err
}

// readFixed reads a small object with a fixed name.
func readFixed(ctx context.Context, store target.Store, name string) ([]byte, error) {
	o, err := store.Stat(ctx, name)
	if err != nil {
		return nil, err
	}
	return readObject(ctx, store, o, smallFile)
}

func readObject(ctx context.Context, store target.Store, o target.Object, limit int64) ([]byte, error) {
	if o.Size < 0 || o.Size > limit {
		return nil, api.Errorf(api.Corrupt, "object %s: %d bytes, at most %d are allowed", o.Name, o.Size, limit)
	}
	return readRange(ctx, store, o.Name, 0, o.Size)
}

// readRange reads n bytes; an object that has fewer is damaged.
func readRange(ctx context.Context, store target.Store, name string, off, n int64) ([]byte, error) {
	b, err := store.Get(ctx, name, off, n)
	switch {
	case api.Is(err, api.Invalid):
		return nil, api.Errorf(api.Corrupt, "object %s: too short: %w", name, err)
	case err != nil:
		return nil, err
	case int64(len(b)) != n:
		return nil, api.Errorf(api.Corrupt, "object %s: the store returned %d bytes instead of %d", name, len(b), n)
	}
	return b, nil
}

// saveFile seals plain, compressed, into a new object of folder.
func (r *Repository) saveFile(ctx context.Context, folder string, plain []byte) (blob.ID, error) {
	id, sealed := r.sealFile(plain)
	return id, r.store.Put(ctx, folder+id.String(), sealed)
}

// sealFile returns the bytes and the name of a new file.
func (r *Repository) sealFile(plain []byte) (id blob.ID, sealed []byte) {
	sealed = r.key.Seal(nil, betterEncoder().EncodeAll(plain, []byte{compressedFile}))
	return blob.Sum(sealed), sealed
}

// loadFile reads the object of a file and calls read with the plain bytes, of which there are at most limit.
func (r *Repository) loadFile(ctx context.Context, f namedFile, sealed, plain int64, read func(io.Reader) error) error {
	b, err := readNamed(ctx, r.store, f, sealed)
	if err != nil {
		return err
	}
	return r.openFile(b, plain, read)
}

// openFile is loadFile for a caller that has the sealed bytes, which openFile changes.
func (r *Repository) openFile(sealed []byte, plain int64, read func(io.Reader) error) error {
	b, err := r.key.Open(sealed)
	if err != nil {
		return err
	}
	switch {
	case len(b) > 0 && (b[0] == '{' || b[0] == '['):
		return read(bytes.NewReader(b))
	case len(b) == 0 || b[0] != compressedFile:
		return api.Errorf(api.Unsupported, "the file has an unknown encoding; only JSON and compressed JSON are supported")
	}
	// With a concurrency of 1 the decoder starts no goroutine.
	d, err := zstd.NewReader(bytes.NewReader(b[1:]), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(windowLimit))
	if err != nil {
		return api.Errorf(api.Corrupt, "the compressed file is damaged: %w", err)
	}
	defer d.Close()
	return read(&plainReader{d, plain})
}

// plainReader reads at most left bytes; all errors but the end are of kind Corrupt.
type plainReader struct {
	from io.Reader
	left int64
}

func (p *plainReader) Read(b []byte) (int, error) {
	n, err := p.from.Read(b)
	if p.left -= int64(n); p.left < 0 {
		return 0, api.Errorf(api.Corrupt, "the decompressed file is too large")
	}
	if err != nil && err != io.EOF { //nolint:errorlint // a reader returns io.EOF bare
		err = api.Errorf(api.Corrupt, "the compressed file is damaged: %w", err)
	}
	return n, err
}
