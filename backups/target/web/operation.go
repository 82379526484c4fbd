package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

// maxObject bounds the memory for an object whose length the server tells.
const maxObject = 1 << 30

// Operation is one call of a store behind HTTP, with a deadline. Its errors name the store and the action, and hold no
// secret.
type Operation struct {
	*Deadline
	Action  string // for errors
	store   string
	caller  context.Context
	network Network
	secrets []Secret
}

// BeginOperation starts an operation of a store that moves size bytes. No error of the operation repeats secrets. The
// caller ends the Operation.
func (n Network) BeginOperation(ctx context.Context, store fmt.Stringer, action string, size int64,
	secrets ...Secret) *Operation {
	return &Operation{Deadline: n.Begin(ctx, size), Action: action, store: store.String(), caller: ctx, network: n,
		secrets: secrets}
}

// Failed is the error of an operation that err ended. explain gives the kind and the cause of an answer of the server;
// it is false for any other error.
func (o *Operation) Failed(err error, explain func(error) (kind api.Kind, cause string, is bool)) error {
	if caller := o.caller.Err(); caller != nil {
		return api.Errorf(api.Other, "%s: cannot %s: %w", o.store, o.Action, caller)
	}
	if o.Ctx.Err() != nil {
		return o.Unavailable("the server did not answer in time")
	}
	if kind, cause, is := explain(err); is {
		return o.errorf(kind, cause)
	}
	var request *url.Error // its text repeats the object's address
	if errors.As(err, &request) {
		err = request.Err
	}
	return o.Unavailable(err.Error())
}

// Unavailable is an error of the operation of kind unavailable.
func (o *Operation) Unavailable(cause string) error { return o.errorf(api.Unavailable, cause) }

func (o *Operation) errorf(kind api.Kind, cause string) error {
	return api.Errorf(kind, "%s: cannot %s: %s", o.store, o.Action, o.network.Redact(cause, o.secrets...))
}

// KindOfStatus is the kind of a server's answer by its status alone.
func KindOfStatus(status int) api.Kind {
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

// Range is what a Get reads: N bytes of an object from Off on, or all from there if N < 0.
type Range struct {
	Store interface {
		target.Store
		fmt.Stringer
	}
	Name   string
	Off, N int64
}

// Check refuses a name or a range that no object has.
func (r Range) Check() error {
	if err := target.CheckName(r.Name); err != nil {
		return err
	}
	return target.CheckRange(r.Name, r.Off, r.N)
}

// IsWhole reports whether the range is the whole object: the request names no range.
func (r Range) IsWhole() bool { return r.Off == 0 && r.N < 0 }

// ReadEmpty answers a Get of no bytes, for which HTTP has no request, and one that the server refused as beyond the
// end.
func (r Range) ReadEmpty(ctx context.Context) ([]byte, error) {
	o, err := r.Store.Stat(ctx, r.Name)
	switch {
	case err != nil:
		return nil, err
	case r.Off+max(r.N, 0) > o.Size:
		return nil, target.Short(r.Store.String(), r.Name, r.Off, r.N, o.Size)
	case r.N > 0 || r.N < 0 && r.Off < o.Size:
		return nil, api.Errorf(api.Unavailable, "%s: cannot read object %s: the server refused a range inside of the object",
			r.Store, r.Name)
	}
	return []byte{}, nil
}

// ReadAnswer reads the body of an answer with length bytes, whose header Content-Range is contentRange. The server must
// have sent the range exactly.
func (r Range) ReadAnswer(ctx context.Context, o *Operation, body io.Reader, contentRange string, length int64) (
	[]byte, error) {
	if !r.IsWhole() {
		var first, last, size int64
		_, err := fmt.Sscanf(contentRange, "bytes %d-%d/%d", &first, &last, &size)
		end := size
		if r.N > 0 {
			end = min(size, r.Off+r.N)
		}
		switch {
		case err == nil && r.Off >= size: // a server may answer with an empty range
			return r.ReadEmpty(ctx)
		case err != nil || first != r.Off || first > last || last != end-1:
			return nil, o.Unavailable(fmt.Sprintf("the server answered a read of %d bytes from %d with the range %q", r.N, r.Off,
				contentRange))
		case end-r.Off < r.N:
			return nil, target.Short(r.Store.String(), r.Name, r.Off, r.N, size)
		}
		length = end - r.Off
	}
	return o.readBody(body, length)
}

// readBody reads exactly length bytes.
func (o *Operation) readBody(body io.Reader, length int64) ([]byte, error) {
	if length < 0 || length > maxObject {
		return nil, o.Unavailable(fmt.Sprintf("the server gives the length %d, at most %d are allowed", length, maxObject))
	}
	o.Extend(length)
	b := make([]byte, length)
	if n, err := io.ReadFull(body, b); err != nil {
		cut := fmt.Sprintf("the answer ended after %d of %d bytes", n, length)
		return nil, o.Failed(err, func(error) (api.Kind, string, bool) { return api.Unavailable, cut, true })
	}
	return b, nil
}
