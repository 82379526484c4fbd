package s3

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"

	"drover.io/drover/api"
)

// operation is one call of the store, with a deadline.
type operation struct {
	store  *Store
	action string // for errors
	caller context.Context
	ctx    context.Context
	cancel context.CancelFunc
	timer  *time.Timer
}

// begin starts an operation that moves n bytes.
func (s *Store) begin(ctx context.Context, action string, n int64) *operation {
	o := &operation{store: s, action: action, caller: ctx}
	o.ctx, o.cancel = context.WithCancel(ctx)
	o.timer = time.AfterFunc(s.allowance(n), o.cancel)
	return o
}

// allowance is the time for an operation that moves n bytes.
func (s *Store) allowance(n int64) time.Duration {
	return 3*s.cfg.AnswerTime + time.Duration(n/slowLine)*time.Second
}

// extend moves the deadline: from now on the operation has the time for n bytes.
func (o *operation) extend(n int64) { o.timer.Reset(o.store.allowance(n)) }

// pause stops the clock until extend.
func (o *operation) pause() { o.timer.Stop() }

func (o *operation) end() {
	o.timer.Stop()
	o.cancel()
}

// bodyWaiter is a transport whose requests end after the transport has released their bodies. The HTTP transport may
// read a body after an early answer or an error. The library rewinds the same body for the next try, and after Put the
// memory belongs to the caller.
type bodyWaiter struct{ next http.RoundTripper }

func (w bodyWaiter) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body == nil {
		return w.next.RoundTrip(req)
	}
	released := make(chan struct{})
	sent := req.Body
	req = req.WithContext(req.Context()) // a copy: a transport must not change its request
	req.Body = readCloser{sent, sync.OnceValue(func() error { defer close(released); return sent.Close() })}
	answer, err := w.next.RoundTrip(req)
	if err != nil {
		<-released
		return nil, err
	}
	got := answer.Body
	answer.Body = readCloser{got, func() error { defer func() { <-released }(); return got.Close() }}
	return answer, nil
}

type readCloser struct {
	io.Reader
	closeBody func() error
}

func (r readCloser) Close() error { return r.closeBody() }

// failed is the error of the operation with the kind of its cause.
func (o *operation) failed(err error) error {
	if caller := o.caller.Err(); caller != nil {
		return api.Errorf(api.Other, "%s: cannot %s: %w", o.store, o.action, caller)
	}
	if o.ctx.Err() != nil {
		return o.unavailable("the server did not answer in time")
	}
	var answer minio.ErrorResponse
	if errors.As(err, &answer) {
		text := answer.Error()
		if answer.Code != "" && answer.Code != text {
			text += " (" + answer.Code + ")"
		}
		return o.errorf(kindOf(answer), text+remedies[answer.Code])
	}
	var request *url.Error // its text repeats the object's address
	if errors.As(err, &request) {
		err = request.Err
	}
	return o.unavailable(err.Error())
}

func (o *operation) unavailable(cause string) error { return o.errorf(api.Unavailable, cause) }

func (o *operation) errorf(kind api.Kind, cause string) error {
	return api.Errorf(kind, "%s: cannot %s: %s", o.store, o.action, o.store.cfg.redact(cause))
}

var remedies = map[string]string{
	minio.AccessDenied:          "; check the policy of the access key",
	minio.InvalidAccessKeyID:    "; check the access key",
	minio.SignatureDoesNotMatch: "; check the secret key",
	minio.NoSuchBucket:          "; make the bucket, or correct its name",
	"InvalidObjectState":        "; restore the object from the archive class first",
	"RequestTimeTooSkewed":      "; set the clock of this node",
}

// kindOf is the kind of a server's answer. The code comes first, because an object of a batch has no status.
func kindOf(answer minio.ErrorResponse) api.Kind {
	switch answer.Code {
	case minio.NoSuchKey:
		return api.NotFound
	case minio.NoSuchBucket, "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout":
		return api.Unavailable
	case minio.AccessDenied:
		return api.Denied
	case "InvalidObjectState":
		return api.Unsupported
	case "BadDigest":
		return api.Corrupt
	case "EntityTooLarge", minio.InvalidBucketName:
		return api.Invalid
	case "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull":
		return api.Full
	}
	switch status := answer.StatusCode; {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return api.Denied
	case status == http.StatusInsufficientStorage:
		return api.Full
	case status == http.StatusRequestTimeout || status == http.StatusTooManyRequests || status >= 500:
		return api.Unavailable
	}
	return api.Other
}
