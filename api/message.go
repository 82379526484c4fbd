package api

import "strings"

// ClipMessage shortens a message to the length that an event accepts.
func ClipMessage(s string) string {
	if len(s) > 1000 {
		s = strings.ToValidUTF8(s[:1000], "") + "..."
	}
	return s
}
