package diskfs

import (
	"errors"

	"golang.org/x/sys/unix"

	"drover.io/drover/api"
)

// Classify gives errors of the kernel their kind: full for a lack of room, unavailable for a disk that fails.
func Classify(err error) error {
	var e *api.Error
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return api.Errorf(api.Full, "no room on the disk: %w", err)
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EIO):
		return api.Errorf(api.Unavailable, "the disk does not work: %w", err)
	}
	return err
}

// NoRoom reports whether err comes of a full disk or quota.
func NoRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
