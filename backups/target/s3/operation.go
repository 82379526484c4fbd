package s3

import (
	"context"
	"errors"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/web"
)

// operation is one call of the store.
type operation struct{ *web.Operation }

// begin starts an operation that moves n bytes.
func (s *Store) begin(ctx context.Context, action string, n int64) operation {
	return operation{s.cfg.BeginOperation(ctx, s, action, n, s.cfg.SecretKey, s.cfg.SessionToken)}
}

// failed is the error of the operation with the kind of its cause.
func (o operation) failed(err error) error { return o.Failed(err, explain) }

// explain is the kind and the cause of a server's answer.
func explain(err error) (kind api.Kind, cause string, is bool) {
	var answer minio.ErrorResponse
	if errors.As(err, &answer) {
		text := answer.Error()
		if answer.Code != "" && answer.Code != text {
			text += " (" + answer.Code + ")"
		}
		return kindOf(answer), text + remedies[answer.Code], true
	}
	var refused credentials.ErrorResponse
	if errors.As(err, &refused) {
		return api.Denied, "the server gives no credentials of the role: " + refused.Error() +
			"; check the role, and its trust in the identity of Drover", true
	}
	return kind, "", false
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
	return web.KindOfStatus(answer.StatusCode)
}
