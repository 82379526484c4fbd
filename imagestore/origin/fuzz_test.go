package origin

import (
	"fmt"
	"testing"
	"time"
)

// FuzzContentRange: an announced range is valid, or refused.
func FuzzContentRange(f *testing.F) {
	for _, s := range []string{"bytes 0-9/10", "bytes 5-9/*", "bytes 0-9/9", "bytes 9-0/10", "bytes */10", "bytes -5-9/10",
		"bytes +5-9/10", "bytes 0-5/-7", "bytes 0-9223372036854775807/*", "bytes 0-99999999999999999999/10", "items 0-1/2", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		from, to, total, ok := ParseContentRange(s)
		if !ok {
			return
		}
		if from < 0 || to < from || to+1 < 0 || total != -1 && total <= to {
			t.Fatalf("%q is %d to %d of %d", s, from, to, total)
		}
		again := fmt.Sprintf("bytes %d-%d/%d", from, to, total)
		if total < 0 {
			again = fmt.Sprintf("bytes %d-%d/*", from, to)
		}
		if f, l, n, ok := ParseContentRange(again); !ok || f != from || l != to || n != total {
			t.Fatalf("%q is %q, which is %d to %d of %d", s, again, f, l, n)
		}
	})
}

func FuzzRetryAfter(f *testing.F) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, s := range []string{"0", "120", "-1", "99999999999999999999", "Fri, 02 Jan 2026 03:04:10 GMT",
		"Fri, 02 Jan 1970 03:04:10 GMT", "Fri, 31 Dec 9999 23:59:59 GMT", "soon", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if wait, told := retryAfter(s, now); wait < 0 || !told && wait != 0 {
			t.Fatalf("%q is %s, told %v", s, wait, told)
		}
	})
}
