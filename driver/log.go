package driver

import (
	"context"
	"io"
	"log/slog"
	"sync/atomic"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"drover.io/drover/api"
)

// newLogger creates the process's log and gives the log to the libraries, whose records count one level less.
func newLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, api.Errorf(api.Invalid, "--log-level %q: use debug, info, warn or error", level)
	}
	opts := &slog.HandlerOptions{Level: l}
	var h slog.Handler
	switch format {
	case "text":
		h = slog.NewTextHandler(w, opts)
	case "json":
		h = slog.NewJSONHandler(w, opts)
	default:
		return nil, api.Errorf(api.Invalid, "--log-format %q: use text or json", format)
	}
	log := slog.New(h)
	slog.SetDefault(log)
	lib := demoted{h}
	ctrllog.SetLogger(logr.FromSlogHandler(lib))
	klog.SetSlogLogger(slog.New(lib))
	return log, nil
}

// stopping is set once the process begins to end: libraries then complain about intended closures.
var stopping atomic.Bool

// demoted lowers the level of records: a library's information is detail for a user of Drover, and the library itself
// handles its errors.
type demoted struct{ slog.Handler }

func demoteLevel(l slog.Level) slog.Level {
	if stopping.Load() {
		return l - 12
	}
	return l - 4
}

func (d demoted) Enabled(ctx context.Context, l slog.Level) bool {
	return d.Handler.Enabled(ctx, demoteLevel(l))
}
func (d demoted) Handle(ctx context.Context, r slog.Record) error {
	if !d.Enabled(ctx, r.Level) {
		return nil // libraries report errors without asking Enabled
	}
	r.Level = demoteLevel(r.Level)
	return d.Handler.Handle(ctx, r)
}
func (d demoted) WithAttrs(a []slog.Attr) slog.Handler { return demoted{d.Handler.WithAttrs(a)} }
func (d demoted) WithGroup(n string) slog.Handler      { return demoted{d.Handler.WithGroup(n)} }
