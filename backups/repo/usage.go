package repo

import (
	"context"
	"errors"

	"drover.io/drover/backups/repo/blob"
	"drover.io/drover/backups/repo/index"
)

// Usage says how much a repository has, by its index: hidden and damaged packs do not count.
type Usage struct {
	StoredBytes int64 // of the sealed blobs in packs
	UniqueBytes int64 // StoredBytes, with each repeated blob counted once
}

// Usage reads the index files that the local table does not cover yet, and adds up the table.
func (r *Repository) Usage(ctx context.Context) (u Usage, err error) {
	b, err := r.LoadIndex(ctx)
	if err != nil {
		return u, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	var last struct {
		id   blob.ID
		kind blob.Kind
	}
	err = b.table.Each(func(row index.Row) error {
		if row.Hidden || row.Damaged {
			return nil
		}
		u.StoredBytes += int64(row.Length)
		if row.ID != last.id || row.Kind != last.kind || row.Number == 0 {
			u.UniqueBytes += int64(row.Length)
		}
		last.id, last.kind = row.ID, row.Kind
		return ctx.Err()
	})
	return u, err
}
