package driver

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"drover.io/drover/api"
)

// codeOf maps every kind of error to a gRPC code.
var codeOf = map[api.Kind]codes.Code{
	api.Other:       codes.Internal,
	api.Invalid:     codes.InvalidArgument,
	api.NotFound:    codes.NotFound,
	api.Exists:      codes.AlreadyExists,
	api.Busy:        codes.Aborted,
	api.InUse:       codes.FailedPrecondition,
	api.Full:        codes.ResourceExhausted,
	api.OutOfRange:  codes.OutOfRange,
	api.Unavailable: codes.Unavailable,
	api.Unsupported: codes.InvalidArgument, // an unsupported parameter; an unsupported call is Unimplemented
	api.Corrupt:     codes.DataLoss,
	api.Denied:      codes.PermissionDenied,
}

// toStatus turns an error into a code and a message without details.
func toStatus(err error) error {
	if err == nil {
		return nil
	}
	var kind *api.Error
	if errors.As(err, &kind) {
		code, ok := codeOf[kind.Kind]
		if !ok {
			code = codes.Internal
		}
		return status.Error(code, err.Error())
	}
	var st interface{ GRPCStatus() *status.Status }
	switch {
	case errors.As(err, &st):
		return status.Error(st.GRPCStatus().Code(), st.GRPCStatus().Message())
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	}
	return status.Error(codes.Internal, err.Error())
}
