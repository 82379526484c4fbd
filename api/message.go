package api

import (
	"strings"
	"unicode"
)

// ClipMessage shortens a message to the length that an event accepts, and makes the message plain: stores and servers
// supply parts of messages.
func ClipMessage(s string) string {
	if len(s) > 1000 {
		s = strings.ToValidUTF8(s[:1000], "") + "..."
	}
	return PlainText(s)
}

// PlainText replaces each character that moves the cursor of a terminal or hides text, but for the ends of lines.
func PlainText(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}
