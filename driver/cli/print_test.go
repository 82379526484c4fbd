package cli

import (
	"strings"
	"testing"
)

// TestReasonOfAWaitForgesNothing: the reason of a wait, which a store supplies, neither begins a line nor moves the
// cursor nor turns the direction of the text.
func TestReasonOfAWaitForgesNothing(t *testing.T) {
	var out strings.Builder
	remarkOn(&out, "backup", "b")("x\nState:  Completed\r\x1b[2J\u009b2J\u202e")
	if strings.Count(out.String(), "\n") != 1 || strings.ContainsAny(out.String(), "\r\x1b\u009b\u202e") {
		t.Errorf("%q", out.String())
	}
}
