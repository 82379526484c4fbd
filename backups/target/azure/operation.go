package azure

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/bloberror"

	"drover.io/drover/api"
	"drover.io/drover/backups/target/web"
)

// operation is one call of the store.
type operation struct{ *web.Operation }

// begin starts an operation that moves n bytes.
func (s *Store) begin(ctx context.Context, action string, n int64) operation {
	return operation{s.cfg.BeginOperation(ctx, s, action, n, s.cfg.Key)}
}

// isMissing reports whether the server has no such object.
func isMissing(err error) bool { return bloberror.HasCode(err, bloberror.BlobNotFound) }

// isBeyondTheEnd reports whether a range begins after the end of the object.
func isBeyondTheEnd(err error) bool { return bloberror.HasCode(err, bloberror.InvalidRange) }

// failed is the error of the operation with the kind of its cause.
func (o operation) failed(err error) error { return o.Failed(err, explain) }

// explain is the kind and the cause of a server's answer.
func explain(err error) (kind api.Kind, cause string, is bool) {
	var answer *azcore.ResponseError // its text has the whole answer
	if !errors.As(err, &answer) {
		return kind, "", false
	}
	code := bloberror.Code(answer.ErrorCode)
	if code == "" {
		code = bloberror.Code(http.StatusText(answer.StatusCode))
	}
	return kindOf(code, answer.StatusCode), fmt.Sprintf("the server answered %.100q (%d)%s", string(code),
		answer.StatusCode, remedies[code]), true
}

var remedies = map[bloberror.Code]string{
	bloberror.AuthenticationFailed: "; check the account key, and the clock of this node",
	bloberror.AuthorizationFailure: "; check the firewall rules of the account",
	bloberror.ContainerNotFound:    "; make the container, or correct its name",
	bloberror.BlobArchived:         "; move the object from the archive tier first",
}

// kindOf is the kind of a server's answer.
func kindOf(code bloberror.Code, status int) api.Kind {
	switch code {
	case bloberror.BlobNotFound:
		return api.NotFound
	case bloberror.ContainerNotFound, bloberror.ContainerBeingDeleted, bloberror.ContainerDisabled:
		return api.Unavailable
	case bloberror.BlobArchived:
		return api.Unsupported
	case bloberror.MD5Mismatch:
		return api.Corrupt
	case bloberror.BlobImmutableDueToPolicy, bloberror.AccountIsDisabled:
		return api.Denied
	case bloberror.RequestBodyTooLarge, bloberror.InvalidResourceName:
		return api.Invalid
	}
	return web.KindOfStatus(status)
}
