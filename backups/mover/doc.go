// Package mover copies volumes and images into a repository, and back.
//
// Backup reads the chunks that changed since a base, stores those that the repository lacks, writes the manifest, and
// commits with one snapshot. Restore writes all chunks of a backup into a sink. Copy copies the blobs of a backup into
// another repository.
//
// Invariants:
//
//   - A backup that was not committed leaves no trace but blobs without a snapshot, which the next backup finds.
//   - Only the session that wrote a snapshot returns its id, so no other session loses by the deletion of the snapshot
//     after an error: Adopt commits the content of another session's snapshot under an id of its own.
//   - The index has every blob of a snapshot that Backup returns without an error, also the blobs of the base.
//     Whether the packs of the index are whole is the concern of verification.
//   - A chunk whose digest the source knows, and whose blob the repository has, is neither read nor hashed.
//
// Goroutines: Backup, Copy and Restore wait for all that they start. A Progress is the only state that outlives a call.
package mover

import (
	"sync/atomic"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// Source is a volume or image at one instant.
type Source = block.DigestSource

// Progress of a Backup or Restore. Methods are safe for concurrent use.
type Progress struct {
	total, done atomic.Int64
	complete    atomic.Bool               // total is final
	began       atomic.Pointer[time.Time] // nil: not yet
}

// reset begins an attempt, and forgets an attempt that failed.
func (p *Progress) reset() {
	p.complete.Store(false)
	p.total.Store(0)
	p.done.Store(0)
	now := time.Now()
	p.began.Store(&now)
}

// At returns the progress for a status. The end is not known while the total is not final, or nothing is done.
func (p *Progress) At(now time.Time) (at api.ByteProgress) {
	at.BytesDone, at.BytesTotal = p.Bytes()
	if began := p.began.Load(); began != nil && p.complete.Load() {
		at.EstimatedEnd = api.EstimateEnd(*began, now, 0, at.BytesDone, at.BytesTotal)
	}
	return at
}

// Bytes returns how many bytes are done, of how many that Backup or Restore knows of so far.
func (p *Progress) Bytes() (done, total int64) { return p.done.Load(), p.total.Load() }
