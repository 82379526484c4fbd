package targets

import (
	"context"
	"errors"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo"
)

// fault is an error with the reason of ConditionUnavailable.
type fault struct {
	reason string
	err    error
}

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// reasonKinds are the kinds of faults whose errors have another kind, or none.
var reasonKinds = map[string]api.Kind{
	api.ReasonBadURL:        api.Invalid,
	api.ReasonBadSecret:     api.Invalid,
	api.ReasonDenied:        api.Denied,
	api.ReasonWrongPassword: api.Denied,
}

// kind is the kind of the errors of Repositories.Open: what a person has to correct is Invalid or Denied.
func (f *fault) kind() api.Kind {
	if kind, ok := reasonKinds[f.reason]; ok {
		return kind
	}
	return api.Unavailable
}

// IsPermanent reports whether another attempt to make a backup fails, too. A store that denies the access does not
// count: a person may be about to change the credentials, at the begin of a backup and in the middle alike.
func IsPermanent(err error) bool {
	switch api.KindOf(err) {
	case api.Invalid, api.Unsupported, api.NotFound:
		return true
	}
	return false
}

// faultf makes a fault.
func faultf(reason, format string, args ...any) error {
	f := &fault{reason: reason}
	f.err = api.Errorf(f.kind(), format, args...)
	return f
}

// reasonOf is the reason of a fault, or "" for an error that says nothing about the target.
func reasonOf(err error) string {
	var f *fault
	if errors.As(err, &f) {
		return f.reason
	}
	return ""
}

// storeFault makes a fault of an error of a store or a repository. The end of ctx is no fault of the target.
func storeFault(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil || reasonOf(err) != "" {
		return err
	}
	reason := api.ReasonUnreachable
	switch api.KindOf(err) {
	case api.Denied:
		if reason = api.ReasonDenied; repo.IsWrongPassword(err) {
			reason = api.ReasonWrongPassword
		}
	case api.Corrupt, api.Unsupported, api.Exists:
		reason = api.ReasonBadRepository
	case api.Invalid:
		reason = api.ReasonBadURL // the store refuses the names or the bucket
	}
	return &fault{reason, err}
}
