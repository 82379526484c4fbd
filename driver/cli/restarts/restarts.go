// Package restarts lets a command outlive a restart of the API server: it knows the errors of a server that is away or
// still starts, and repeats the command's work meanwhile. The package starts no goroutines.
package restarts

import (
	"context"
	"crypto/tls"
	"errors"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// NoAnswer marks the cause why a request got no answer. The connection's errors have no common type: HTTP/2 has some
// that are only words.
type NoAnswer struct{ Cause error }

// Error implements error.
func (n NoAnswer) Error() string { return n.Cause.Error() }

// Unwrap returns the cause.
func (n NoAnswer) Unwrap() error { return n.Cause }

// IsUnserved reports that the server does not know the kind, as right after the server's start.
func IsUnserved(err error) bool {
	var s *apierrors.StatusError
	return apierrors.IsNotFound(err) && errors.As(err, &s) && (s.ErrStatus.Details == nil ||
		s.ErrStatus.Details.Name == "" ||
		apierrors.IsUnexpectedServerError(err) ||
		slices.ContainsFunc(s.ErrStatus.Details.Causes, func(c metav1.StatusCause) bool {
			return c.Type == metav1.CauseTypeUnexpectedServerResponse
		}))
}

// mostSilence bounds the silence of an API server that answered before; pause is the time between two attempts.
const (
	mostSilence = 2 * time.Minute
	pause       = 250 * time.Millisecond
)

// Through retries do while the API server is unreachable, because reconcilers continue without the API server
// and after its restart.
func Through(ctx context.Context, show func(state string, done, total int64), do func() error) error {
	for since := time.Now(); ; {
		began := time.Now()
		err := do()
		if !IsUnanswered(err) {
			return err
		}
		if time.Since(began) > 5*time.Second {
			since = time.Now() // the server answered until the end of the call
		}
		if time.Since(since) > mostSilence {
			return err
		}
		show("waiting for the API server", 0, 0)
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
}

// IsUnanswered reports that the API server did not answer, or is still starting. A server with a wrong certificate
// answered.
func IsUnanswered(err error) bool {
	var none NoAnswer
	var certificate *tls.CertificateVerificationError
	return errors.As(err, &none) && !errors.As(err, &certificate) || IsUnserved(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsTooManyRequests(err)
}
