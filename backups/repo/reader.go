package repo

import (
	"cmp"
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/backups/repo/tree"
)

// DamagedError says that the store lost or changed a blob. The error is of kind Corrupt.
type DamagedError struct {
	Blob, Pack blob.ID
	Kind       blob.Kind
	missing    bool // the store does not have the pack
	err        error
}

func (e *DamagedError) Error() string {
	return e.Kind.String() + " blob " + e.Blob.String() + ": damaged in pack " + e.Pack.String() + ": " + e.err.Error()
}

func (e *DamagedError) Unwrap() error { return e.err }

// packName is the name of a pack's object.
func packName(id blob.ID) string {
	name := id.String()
	return dataFolder + name[:2] + "/" + name
}

// Read reads a blob with one request, or a tree from the cache, and compares the bytes with the id; if they are
// damaged, Read tries the other packs that have the blob. If a pack is missing, Read looks for a sweep that moved the
// blob. The result may use the memory of into. A blob outside of the index is an error of kind NotFound, a blob
// that is damaged in every pack a *DamagedError.
func (b *Blobs) Read(ctx context.Context, id blob.ID, kind blob.Kind, into []byte) ([]byte, error) {
	plain, err := b.readFound(ctx, id, kind, into)
	var damaged *DamagedError
	if !errors.As(err, &damaged) || !damaged.missing {
		return plain, err
	}
	plain, found, e := b.readMoved(ctx, id, kind, into)
	if e != nil || !found {
		return nil, cmp.Or(e, err)
	}
	return plain, nil
}

// readFound is Read by the index as it is known.
func (b *Blobs) readFound(ctx context.Context, id blob.ID, kind blob.Kind, into []byte) ([]byte, error) {
	l, ok, err := b.Find(ctx, id, kind)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, b.missing(id, kind)
	}
	if plain, ok := b.r.readCachedTree(l, into); ok {
		return plain, nil
	}
	plain, err := b.readAt(ctx, l, into)
	var damaged *DamagedError
	if !errors.As(err, &damaged) {
		return plain, err
	}
	others, e := b.findAll(id, kind)
	if e != nil {
		return nil, err // the index is the smaller concern
	}
	for _, other := range others {
		if other == l {
			continue
		}
		if plain, e := b.readAt(ctx, other, into); e == nil {
			return plain, nil
		}
	}
	return nil, err
}

// readAt reads a blob at one of its locations in the store.
func (b *Blobs) readAt(ctx context.Context, l index.Location, into []byte) ([]byte, error) {
	sealed, err := b.r.readPart(ctx, l.Kind, l.Pack, int64(l.Offset), int64(l.Length))
	var plain []byte
	if err == nil {
		plain, err = b.r.openBlob(l, sealed, into)
	}
	missing := api.Is(err, api.NotFound)
	switch {
	case missing:
		err = api.Errorf(api.Corrupt, "the pack is missing: %w", err)
	case err != nil && !api.Is(err, api.Corrupt):
		return nil, api.Errorf(api.KindOf(err), "%v blob %s: pack %.8s: %w", l.Kind, l.ID, l.Pack, err)
	}
	if err != nil {
		return nil, &DamagedError{l.ID, l.Pack, l.Kind, missing, err}
	}
	return plain, nil
}

// readPart reads a part of a pack from the store. A part with trees goes into the cache, too: sweeps and the next
// backup read the trees again.
func (r *Repository) readPart(ctx context.Context, kind blob.Kind, pack blob.ID, off, n int64) ([]byte, error) {
	sealed, err := readRange(ctx, r.store, packName(pack), off, n)
	if err == nil && kind == blob.Tree {
		r.trees.WriteAt(pack, sealed, off)
	}
	return sealed, err
}

// readCachedTree reads a tree from the cache. The bytes count only if they match the id.
func (r *Repository) readCachedTree(l index.Location, into []byte) (plain []byte, ok bool) {
	if l.Kind != blob.Tree {
		return nil, false
	}
	sealed := make([]byte, l.Length)
	if !r.trees.ReadAt(l.Pack, sealed, int64(l.Offset)) {
		return nil, false
	}
	plain, err := r.openBlob(l, sealed, into)
	return plain, err == nil
}

func (b *Blobs) missing(id blob.ID, kind blob.Kind) error {
	return api.Errorf(api.NotFound, "%v blob %s: not in repository %.8s", kind, id, b.r.ID())
}

// ReadTree reads the nodes of a folder. A blob that is no tree is an error of kind Corrupt.
func (b *Blobs) ReadTree(ctx context.Context, id blob.ID) ([]tree.Node, error) {
	plain, err := b.Read(ctx, id, blob.Tree, nil)
	if err != nil {
		return nil, err
	}
	nodes, err := tree.Decode(plain)
	if err != nil {
		return nil, api.Errorf(api.KindOf(err), "tree blob %s: %w", id, err)
	}
	return nodes, nil
}

// openBlob decrypts, decompresses and compares with the id. The result is in the memory of into, if into has room, or
// in that of sealed.
func (r *Repository) openBlob(l index.Location, sealed, into []byte) (plain []byte, err error) {
	if n := l.PlainLength(); l.Plain == 0 && n > 0 && n <= cap(into) {
		plain, err = r.key.OpenTo(into[:n], sealed)
		if err == nil && blob.Sum(plain) != l.ID {
			err = errOtherBytes
		}
		return plain, err
	}
	_, plain, err = r.openStored(l, sealed, into)
	return plain, err
}

var errOtherBytes = api.Errorf(api.Corrupt, "the bytes do not match the id")

// openStored is openBlob for a caller that wants the sealed bytes, too; openBlob decrypts in place.
func (r *Repository) openStored(l index.Location, sealed, into []byte) (stored, plain []byte, err error) {
	if stored, err = r.key.Open(sealed); err != nil {
		return nil, nil, err
	}
	plain = stored
	if n := int(l.Plain); n > 0 {
		if cap(into) < n {
			into = make([]byte, n)
		}
		plain, err = blobDecoder().DecodeAll(stored, into[:0:n])
		if err != nil || len(plain) != n {
			return nil, nil, api.Errorf(api.Corrupt, "%d bytes instead of %d after decompression (%v)", len(plain), n, err)
		}
	}
	if blob.Sum(plain) != l.ID {
		return nil, nil, errOtherBytes
	}
	return stored, plain, nil
}
