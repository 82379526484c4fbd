package api

import (
	"context"
	"errors"
	"fmt"
	"net"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Explain wraps an error of the Kubernetes client, or the end of a context, with the action and its object, and adds
// a kind. An error with a kind keeps the kind; nil stays nil.
func Explain(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	what := fmt.Sprintf(format, args...)
	var known *Error
	var netErr net.Error
	switch {
	case errors.As(err, &known):
		return Errorf(known.Kind, "%s: %w", what, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return Errorf(Busy, "%s: in progress when the time of this call ended; a repeated call joins it", what)
	case apierrors.IsNotFound(err):
		return Errorf(NotFound, "%s: %w", what, err)
	case apierrors.IsAlreadyExists(err):
		return Errorf(Exists, "%s: %w", what, err)
	case apierrors.IsConflict(err):
		return Errorf(Busy, "%s: changed by another client at the same time; try again: %w", what, err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return Errorf(Invalid, "%s: %w", what, err)
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return Errorf(Denied, "%s: %w", what, err)
	case apierrors.IsServiceUnavailable(err), apierrors.IsServerTimeout(err), apierrors.IsTimeout(err),
		apierrors.IsTooManyRequests(err), errors.As(err, &netErr):
		return Errorf(Unavailable, "%s: the API server cannot be reached: %w", what, err)
	}
	return Errorf(Other, "%s: %w", what, err)
}
