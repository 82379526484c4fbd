package replicas

import (
	"context"
	"errors"
	"syscall"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// absent is a member that its engine's next process does not open when it takes the device up: the files of a replica
// of this node are gone, or its disk fails, or an earlier process began without the member and did not drop it in time.
// The engine drops it like one on a node that is not reached, and goes on with the others.
type absent struct{ why error }

// isAbsent reports whether an error is one that the next try need not wait for.
func isAbsent(err error) bool {
	return api.Is(err, api.Corrupt) || api.Is(err, api.NotFound) ||
		errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EROFS)
}

// Submit implements engine.Member.
func (m absent) Submit(q *block.Request) {
	q.Err = m.gone()
	q.Done(q)
}

func (m absent) gone() error { return api.Errorf(api.Unavailable, "it cannot be opened: %w", m.why) }

// Adopt implements engine.Member.
func (m absent) Adopt(context.Context, int64, int64, []string) error { return m.gone() }

// Expand implements engine.Member.
func (m absent) Expand(context.Context, int64) error { return m.gone() }

// Close implements engine.Member.
func (m absent) Close() error { return nil }
