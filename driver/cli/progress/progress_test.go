package progress

import (
	"strings"
	"testing"
	"time"
)

// TestProgressInPlainLines: without a terminal, each state and each tenth is a plain line, however often progress is
// reported.
func TestProgressInPlainLines(t *testing.T) {
	var b strings.Builder
	p := New(&b, "image x")
	p.Show("starting", 0, 0)
	for i := int64(0); i <= 1000; i++ {
		p.Show("in-progress", i<<20, 1000<<20)
	}
	p.Clear()
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if len(lines) != 12 || strings.ContainsAny(b.String(), "\r\x1b") || lines[11] != "image x: in-progress, 100 %, 1000 MiB of 1000 MiB" {
		t.Errorf("%d lines:\n%s", len(lines), b.String())
	}
}

// TestProgressOnATerminal: on a terminal the line is drawn again, never wider than the terminal.
func TestProgressOnATerminal(t *testing.T) {
	var b strings.Builder
	p := New(&b, "image x")
	p.width = 60
	p.Show("in-progress", 5<<20, 10<<20)
	for _, frame := range strings.Split(b.String(), "\r")[1:] {
		if n := len(strings.TrimSuffix(frame, "\x1b[K")); n >= 60 {
			t.Errorf("%d columns: %q", n, frame)
		}
	}
	if !strings.Contains(b.String(), " 50 %  5 MiB of 10 MiB") {
		t.Errorf("%q", b.String())
	}
}

// TestProgressKeepsItsBar: a terminal of 80 columns shows a bar beside speed and time. After a pause, the speed counts
// the bytes since the pause.
func TestProgressKeepsItsBar(t *testing.T) {
	var b strings.Builder
	p := New(&b, "image debian-12")
	p.width = 80
	ago := func(d time.Duration) { p.baseAt = time.Now().Add(-d) }
	frames := func() []string { return strings.Split(b.String(), "\r") }
	last := func() string { return strings.TrimSuffix(frames()[len(frames())-1], "\x1b[K") }
	p.Show("in-progress", 1<<20, 1000<<20)
	ago(10 * time.Second)
	p.drawn = time.Time{}
	p.Show("in-progress", 501<<20, 1000<<20)
	if line := last(); !strings.Contains(line, "[=") || !strings.Contains(line, " 50 %") || !strings.Contains(line, "10s left") {
		t.Errorf("%q", line)
	}
	ago(100 * time.Millisecond) // no figure but the count
	p.drawn = time.Time{}
	p.Show("in-progress", 502<<20, 1000<<20)
	if width := func(s string) int { return strings.Index(s, "]") - strings.Index(s, "[") }; len(frames()) < 2 ||
		width(last()) != width(frames()[len(frames())-2]) {
		t.Errorf("the bar flickers: %q", frames())
	}
	p.Show("waiting for the API server", 0, 0)
	p.Show("in-progress", 400<<20, 1000<<20)
	ago(10 * time.Second)
	p.drawn = time.Time{}
	p.Show("in-progress", 500<<20, 1000<<20)
	if line := last(); !strings.Contains(line, "50s left") {
		t.Errorf("%q: 100 MiB came in 10 s, 500 MiB are left", line)
	}
	p.width = 200
	p.Show("sending", 400<<20, 1000<<20)
	ago(10 * time.Second)
	p.drawn = time.Time{}
	p.Show("sending", 500<<20, 1000<<20)
	if line := last(); !strings.Contains(line, "10 MiB/s") && !strings.Contains(line, "9.9 MiB/s") {
		t.Errorf("%q", line)
	}
}
