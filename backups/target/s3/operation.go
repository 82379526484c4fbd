package s3

import (
	"context"
	"errors"
	"net/http"
	"net/url"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/web"
)

// operation is one call of the store, with a deadline.
type operation struct {
	*web.Deadline
	store  *Store
	action string // for errors
	caller context.Context
}

// begin starts an operation that moves n bytes.
func (s *Store) begin(ctx context.Context, action string, n int64) *operation {
	return &operation{Deadline: s.cfg.Begin(ctx, n), store: s, action: action, caller: ctx}
}

// failed is the error of the operation with the kind of its cause.
func (o *operation) failed(err error) error {
	if caller := o.caller.Err(); caller != nil {
		return api.Errorf(api.Other, "%s: cannot %s: %w", o.store, o.action, caller)
	}
	if o.Ctx.Err() != nil {
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
	var refused credentials.ErrorResponse
	if errors.As(err, &refused) {
		return o.errorf(api.Denied, "the server gives no credentials of the role: "+refused.Error()+
			"; check the role, and its trust in the identity of Drover")
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
