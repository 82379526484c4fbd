package azure

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/bloberror"

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

// isMissing reports whether the server has no such object.
func isMissing(err error) bool { return bloberror.HasCode(err, bloberror.BlobNotFound) }

// isBeyondTheEnd reports whether a range begins after the end of the object.
func isBeyondTheEnd(err error) bool { return bloberror.HasCode(err, bloberror.InvalidRange) }

// failed is the error of the operation with the kind of its cause.
func (o *operation) failed(err error) error {
	if caller := o.caller.Err(); caller != nil {
		return api.Errorf(api.Other, "%s: cannot %s: %w", o.store, o.action, caller)
	}
	if o.Ctx.Err() != nil {
		return o.unavailable("the server did not answer in time")
	}
	var answer *azcore.ResponseError // its text has the whole answer
	if errors.As(err, &answer) {
		code := bloberror.Code(answer.ErrorCode)
		if code == "" {
			code = bloberror.Code(http.StatusText(answer.StatusCode))
		}
		return o.errorf(kindOf(code, answer.StatusCode), fmt.Sprintf("the server answered %.100q (%d)%s", string(code),
			answer.StatusCode, remedies[code]))
	}
	var request *url.Error // its text repeats the object's address
	if errors.As(err, &request) {
		err = request.Err
	}
	return o.unavailable(err.Error())
}

func (o *operation) unavailable(cause string) error { return o.errorf(api.Unavailable, cause) }

func (o *operation) errorf(kind api.Kind, cause string) error {
	cfg := o.store.cfg
	return api.Errorf(kind, "%s: cannot %s: %s", o.store, o.action, cfg.Redact(cause, cfg.Key))
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
	switch {
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return api.Denied
	case status == http.StatusInsufficientStorage:
		return api.Full
	case status == http.StatusRequestTimeout || status == http.StatusTooManyRequests || status >= 500:
		return api.Unavailable
	}
	return api.Other
}
