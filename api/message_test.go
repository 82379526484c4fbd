package api

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// TestMessagesArePlain: no message moves the cursor of a terminal, turns the direction of text, or exceeds an event.
func TestMessagesArePlain(t *testing.T) {
	for text, want := range map[string]string{
		"two\nlines, ü": "two\nlines, ü",
		"\x1b[2J\r\b":   "?[2J??",
		"\u009b2J":      "?2J",
		"\u202egnp":     "?gnp",
		"a\x00\xff":     "a?\ufffd",
	} {
		if got := ClipMessage(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
	if got := ClipMessage(strings.Repeat("ü", 1000)); len(got) > 1024 || !utf8.ValidString(got) {
		t.Errorf("a long message has %d bytes", len(got))
	}
}
