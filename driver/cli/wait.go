package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/driver/cli/restarts"
	"drover.io/drover/driver/cli/text"
)

// awaitObject watches the named object until done accepts the object. gone is the error for a deleted object.
func awaitObject[T client.Object](ctx context.Context, c client.WithWatch, name string, gone error,
	done func(T) (bool, error)) (T, error) {
	obj, err := await.Until(ctx, c, name, done)
	if apierrors.IsNotFound(err) && !restarts.IsUnserved(err) {
		return obj, gone
	}
	return obj, explain(ctx, err)
}

// awaitGone waits until an object is deleted. why explains the wait, for a remark and for the message of a timeout.
func awaitGone[T client.Object](ctx context.Context, c client.WithWatch, remarks io.Writer, noun string, obj T,
	why func(T) string) error {
	held, remark := "", remarkOn(remarks, noun, obj.GetName())
	err := explain(ctx, await.Gone(ctx, c, obj, func(now T) {
		held = why(now)
		remark(held)
	}))
	return explainTimeout(err, "the deletion of %s %q continues%s", noun, obj.GetName(), text.Colon(held))
}

// remarkOn returns a function that writes each new reason for which a command waits for an object, as a remark.
func remarkOn(remarks io.Writer, noun, name string) (remark func(why string)) {
	told := ""
	return func(why string) {
		if why != "" && why != told {
			told = why
			fmt.Fprintf(remarks, "%s %q waits: %s\n", noun, name, text.Line(why))
		}
	}
}

// cleanupTime bounds what a command undoes at its end.
const cleanupTime = time.Minute

// cleanup returns a context for what a command undoes at its end, also after the end of ctx.
func cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), cleanupTime, fmt.Errorf("%w after %s", errTimeout,
		cleanupTime))
}

// explainTimeout adds the awaited event to a timeout error.
func explainTimeout(err error, format string, args ...any) error {
	if errors.Is(err, errTimeout) {
		return fmt.Errorf("%w: %s", err, fmt.Sprintf(format, args...))
	}
	return err
}

// explain turns an error of the client library into a sentence with advice, and adds a kind.
func explain(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var known *api.Error
	if errors.As(err, &known) {
		return err
	}
	var u *url.Error
	var op *net.OpError
	if errors.As(err, &u) || errors.As(err, &op) {
		where := "the API server"
		if u != nil {
			if p, perr := url.Parse(u.URL); perr == nil {
				where += " at " + p.Host
			}
			err = u.Err
		}
		return api.Errorf(api.Unavailable, "%s does not answer: is `drover serve` running there? (%w)", where,
			restarts.NoAnswer{Cause: err})
	}
	switch {
	case apierrors.IsUnauthorized(err), apierrors.IsForbidden(err):
		return api.Errorf(api.Denied, "the API server refuses this kubeconfig: %w", err)
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return api.Errorf(api.Invalid, "the API server refuses this: %s", validationCauses(err))
	case apierrors.IsConflict(err):
		return api.Errorf(api.Busy, "the object was changed at the same time: try again (%w)", err)
	case meta.IsNoMatchError(err):
		return api.Errorf(api.Unavailable, "the API server does not know Drover's objects: is it the right one? (%w)", err)
	}
	return err
}

// validationCauses returns a person's part of a validation error: the field and its fault.
func validationCauses(err error) string {
	var s *apierrors.StatusError
	if !errors.As(err, &s) || s.ErrStatus.Details == nil || len(s.ErrStatus.Details.Causes) == 0 {
		return err.Error()
	}
	var out []string
	for _, c := range s.ErrStatus.Details.Causes {
		switch {
		case strings.Contains(c.Message, "some validation rules were not checked"): // follows from the other causes
		case c.Field == "<nil>": // concerns the whole object
			out = append(out, c.Message)
		default:
			out = append(out, c.Field+": "+c.Message)
		}
	}
	return strings.Join(out, "; ")
}

// getObject reads an object; a missing object is an error of kind not found that says how to list the existing objects.
func getObject(ctx context.Context, c client.Client, noun, name string, obj client.Object) error {
	err := c.Get(ctx, client.ObjectKey{Name: name}, obj)
	if apierrors.IsNotFound(err) {
		return api.Errorf(api.NotFound, "%s %q does not exist: `drover %s list` shows all", noun, name, noun)
	}
	return explain(ctx, err)
}
