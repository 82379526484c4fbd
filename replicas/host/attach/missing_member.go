package attach

import (
	"context"
	"errors"
	"syscall"

	"drover.io/drover/api"
	"drover.io/drover/block"
)

// missingMember is a member that a resume leaves out: the files of the replica, on this node, are missing or the disk
// fails, or an earlier process began without the member and did not drop the member in time. The engine drops the
// member like a replica on a node that does not answer, and continues with the other members.
type missingMember struct{ why error }

// isMissing reports whether a member is missing, so that the next try need not wait for the disk.
func isMissing(err error) bool {
	return api.Is(err, api.Corrupt) || api.Is(err, api.NotFound) ||
		errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EROFS)
}

// Submit implements engine.Member.
func (m missingMember) Submit(q *block.Request) {
	q.Err = m.missingError()
	q.Done(q)
}

func (m missingMember) missingError() error {
	return api.Errorf(api.Unavailable, "a missing replica cannot be opened: %w", m.why)
}

// Adopt implements engine.Member.
func (m missingMember) Adopt(context.Context, int64, int64, []string) error { return m.missingError() }

// Expand implements engine.Member.
func (m missingMember) Expand(context.Context, int64) error { return m.missingError() }

// Close implements engine.Member.
func (m missingMember) Close() error { return nil }
