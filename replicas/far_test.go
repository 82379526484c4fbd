package replicas

import (
	"context"
	"errors"
	"testing"
	"time"
)

// A source that fails, and one that is silent, do not keep a chunk from being read of the next one; a silent one is let
// go then.
func TestNextSourceIsAsked(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]func(ctx context.Context) error{
		"a source that fails": func(context.Context) error { return errors.New("damaged there") },
		"a silent source":     func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		buf := make([]byte, 4)
		err := readFirst(t.Context(), 2, time.Millisecond, buf, func(ctx context.Context, i int, b []byte) error {
			if i == 0 {
				return first(ctx)
			}
			copy(b, "good")
			return nil
		})
		if err != nil || string(buf) != "good" {
			t.Errorf("beside %s: %q, %v", name, buf, err)
		}
	}
	broken := errors.New("broken")
	err := readFirst(t.Context(), 3, time.Hour, make([]byte, 4), func(context.Context, int, []byte) error { return broken })
	if !errors.Is(err, broken) {
		t.Errorf("all sources are broken: %v", err)
	}
}
