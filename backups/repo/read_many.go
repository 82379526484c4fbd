package repo

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
	"drover.io/drover/block"
)

// Bounds of ReadMany.
const (
	runLength  = 8 << 20  // bytes of one request, except for a larger blob
	runGap     = 64 << 10 // unwanted bytes between two blobs of one request
	runReaders = 4        // requests at once
)

// alignedPool has aligned memory for a plain blob of a chunk or less, so that its reader writes the blob to a disk past
// the page cache.
var alignedPool = sync.Pool{New: func() any { return new([]byte) }}

// foundBlob is a wanted blob, and its places among the wanted ids.
type foundBlob struct {
	index.Location
	places []int
}

// ReadMany reads blobs of a kind with one request for neighbours in a pack, and calls each once for every place of ids,
// in any order and from several goroutines; each does not call ReadMany. plain is valid during the call, and aligned
// memory if it has a chunk at most. err has the kinds and types of Read's errors for a missing or damaged blob. Other
// errors, and those that each returns, end ReadMany.
func (b *Blobs) ReadMany(ctx context.Context, kind blob.Kind, ids []blob.ID,
	each func(place int, plain []byte, err error) error) error {
	return b.ReadWanted(ctx, kind, ids, nil, each)
}

// ReadWanted is ReadMany without the places that are not wanted any more when their request is due. wanted, unless nil,
// is called once for each place, from several goroutines.
func (b *Blobs) ReadWanted(ctx context.Context, kind blob.Kind, ids []blob.ID, wanted func(place int) bool,
	each func(place int, plain []byte, err error) error) error {
	found, err := b.findMany(ctx, kind, ids, each)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runReaders)
	for _, run := range splitRuns(found) {
		group.Go(func() error {
			release, err := b.r.reserveRun(ctx, run)
			if err != nil {
				return err
			}
			defer release()
			return b.readRun(ctx, wantedBlobs(run, wanted), each)
		})
	}
	return group.Wait()
}

// findMany finds the blobs in the order of the packs, and calls each for those that the index does not have.
func (b *Blobs) findMany(ctx context.Context, kind blob.Kind, ids []blob.ID,
	each func(int, []byte, error) error) ([]*foundBlob, error) {
	found := map[blob.ID]*foundBlob{}
	for i, id := range ids {
		f := found[id]
		if f == nil {
			l, ok, err := b.Find(ctx, id, kind)
			if err != nil {
				return nil, err
			}
			if !ok {
				if err := each(i, nil, b.missing(id, kind)); err != nil {
					return nil, err
				}
				continue
			}
			f = &foundBlob{Location: l}
			found[id] = f
		}
		f.places = append(f.places, i)
	}
	sorted := make([]*foundBlob, 0, len(found))
	for _, f := range found {
		sorted = append(sorted, f)
	}
	slices.SortFunc(sorted, func(a, b *foundBlob) int {
		return cmp.Or(bytes.Compare(a.Pack[:], b.Pack[:]), cmp.Compare(a.Offset, b.Offset))
	})
	return sorted, nil
}

type partKey struct{}

// Values of partKey.
const (
	urgentPart = iota + 1
	movesPart
)

// UrgentContext makes reads with the context not wait for the memory of other reads, because a user waits now.
func UrgentContext(ctx context.Context) context.Context {
	return context.WithValue(ctx, partKey{}, urgentPart)
}

// MoveContext makes other reads not wait for the memory of reads with the context: callers store the bytes, and another
// store may be slow.
func MoveContext(ctx context.Context) context.Context {
	return context.WithValue(ctx, partKey{}, movesPart)
}

// reserveRun reserves the memory of one request, and of a plain chunk.
func (r *Repository) reserveRun(ctx context.Context, run []*foundBlob) (release func(), err error) {
	part, last := r.options.Reads, run[len(run)-1]
	switch ctx.Value(partKey{}) {
	case urgentPart:
		part = r.options.Urgent
	case movesPart:
		part = r.options.Moves
	}
	return part.Reserve(ctx, int64(last.Offset)+int64(last.Length)-int64(run[0].Offset)+block.ChunkSize)
}

// splitRuns splits sorted blobs into those that one request reads.
func splitRuns(sorted []*foundBlob) (runs [][]*foundBlob) {
	from := 0
	for i, f := range sorted {
		if i+1 < len(sorted) && isNeighbour(sorted[from], f, sorted[i+1]) {
			continue
		}
		runs = append(runs, sorted[from:i+1])
		from = i + 1
	}
	return runs
}

func isNeighbour(first, last, next *foundBlob) bool {
	end := int64(last.Offset) + int64(last.Length)
	gap := int64(next.Offset) - end
	return next.Pack == last.Pack && gap >= 0 && gap <= runGap &&
		int64(next.Offset)+int64(next.Length)-int64(first.Offset) <= runLength
}

// wantedBlobs leaves out the places that are not wanted, and the blobs without a place.
func wantedBlobs(run []*foundBlob, wanted func(int) bool) (left []*foundBlob) {
	if wanted == nil {
		return run
	}
	for _, f := range run {
		f.places = slices.DeleteFunc(f.places, func(place int) bool { return !wanted(place) })
		if len(f.places) > 0 {
			left = append(left, f)
		}
	}
	return left
}

// readRun reads neighbours, trees from the cache as far as possible.
func (b *Blobs) readRun(ctx context.Context, run []*foundBlob, each func(int, []byte, error) error) error {
	scratch := alignedPool.Get().(*[]byte)
	defer func() {
		if cap(*scratch) <= block.ChunkSize {
			alignedPool.Put(scratch)
		}
	}()
	var left []*foundBlob
	for _, f := range run {
		if n := f.PlainLength(); n > cap(*scratch) {
			*scratch = block.AlignedBuffer(max(n, block.ChunkSize))
		}
		plain, ok := b.r.readCachedTree(f.Location, *scratch)
		if !ok {
			left = append(left, f)
			continue
		}
		if err := f.call(plain, nil, each); err != nil {
			return err
		}
	}
	for _, some := range splitRuns(left) {
		if err := b.readStoredRun(ctx, some, *scratch, each); err != nil {
			return err
		}
	}
	return nil
}

// readStoredRun reads neighbours from the store. If this fails for a reason that may concern only some of them,
// readStoredRun reads them one by one.
func (b *Blobs) readStoredRun(ctx context.Context, run []*foundBlob, scratch []byte,
	each func(int, []byte, error) error) error {
	from, last := int64(run[0].Offset), run[len(run)-1]
	sealed, err := b.r.readPart(ctx, last.Kind, last.Pack, from, int64(last.Offset)+int64(last.Length)-from)
	if err != nil && !IsDamage(err) {
		return api.Errorf(api.KindOf(err), "repository %.8s: pack %.8s: %w", b.r.ID(), last.Pack, err)
	}
	for _, f := range run {
		var plain []byte
		var damage error
		if err == nil {
			at := int64(f.Offset) - from
			plain, damage = b.r.openBlob(f.Location, sealed[at:at+int64(f.Length)], scratch)
		}
		if err != nil || damage != nil {
			plain, damage = b.Read(ctx, f.ID, f.Kind, scratch)
			if damage != nil && !IsDamage(damage) {
				return damage
			}
		}
		if err := f.call(plain, damage, each); err != nil {
			return err
		}
	}
	return nil
}

// call calls each for all places of the blob.
func (f *foundBlob) call(plain []byte, damage error, each func(int, []byte, error) error) error {
	for _, place := range f.places {
		if err := each(place, plain, damage); err != nil {
			return err
		}
	}
	return nil
}

// IsDamage reports whether err says that the repository lost or damaged a blob, so that other blobs can still be read.
func IsDamage(err error) bool { return api.Is(err, api.Corrupt) || api.Is(err, api.NotFound) }
