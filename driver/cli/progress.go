package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"drover.io/drover/api"
)

// progress shows how far something is: one line that is drawn anew on a terminal, and elsewhere a plain line at each
// change of state and each tenth. Safe for concurrent use. It draws when told to and has no goroutine of its own.
type progress struct {
	w     io.Writer
	width int // of the terminal; 0: not a terminal
	label string

	mu      sync.Mutex
	start   time.Time
	state   string
	tenth   int64
	drawn   time.Time
	open    bool // an unfinished line stands on the terminal
	base    int64
	baseAt  time.Time
	current int64
}

// newProgress writes to w, in colour-free text. label names what moves.
func newProgress(w io.Writer, label string) *progress {
	p := &progress{w: w, label: label, start: time.Now(), tenth: -1}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.width = 80
		if cols, _, err := term.GetSize(int(f.Fd())); err == nil && cols > 20 {
			p.width = cols
		}
	}
	return p
}

// at reports: done of total bytes (total 0: unknown), or a percentage with total 100 and unit "%".
func (p *progress) at(state string, done, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if p.baseAt.IsZero() && done > 0 {
		p.base, p.baseAt = done, now
	}
	changed := state != p.state
	p.state, p.current = state, done
	if p.width > 0 {
		if changed || now.Sub(p.drawn) > 80*time.Millisecond || (total > 0 && done >= total) {
			p.drawn = now
			p.draw(done, total)
		}
		return
	}
	tenth := int64(-1)
	if total > 0 {
		tenth = done * 10 / total
	}
	if changed || tenth > p.tenth {
		p.tenth = tenth
		fmt.Fprintln(p.w, p.line(done, total))
	}
}

func (p *progress) line(done, total int64) string {
	s := p.label + ": " + p.state
	if total > 0 && done > 0 {
		s += fmt.Sprintf(", %d %%, %s of %s", done*100/total, api.SizeText(done), api.SizeText(total))
	}
	return s
}

func (p *progress) draw(done, total int64) {
	p.open = true
	right := ""
	if total > 0 {
		right = fmt.Sprintf(" %3d %%  %s of %s", done*100/total, api.SizeText(done), api.SizeText(total))
		if d := time.Since(p.baseAt).Seconds(); !p.baseAt.IsZero() && d > 0.3 && done > p.base {
			rate := float64(done-p.base) / d
			right += fmt.Sprintf("  %s/s", api.SizeText(int64(rate)))
			if left := float64(total-done) / rate; left >= 1 {
				right += fmt.Sprintf("  %s left", time.Duration(left*float64(time.Second)).Round(time.Second))
			}
		}
	}
	left := fmt.Sprintf("%s  %s ", p.label, p.state)
	room := min(p.width-len(left)-len(right)-3, 40)
	bar := ""
	if total > 0 && room >= 8 {
		full := int(int64(room) * min(done, total) / total)
		bar = "[" + strings.Repeat("=", full) + strings.Repeat(" ", room-full) + "]"
	}
	text := left + bar + right
	if len(text) >= p.width {
		text = text[:p.width-1]
	}
	fmt.Fprintf(p.w, "\r%s\x1b[K", text)
}

// clear takes the line away, so that a result or an error stands alone.
func (p *progress) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}

// counter counts what is read through it into a progress.
type counter struct {
	r     io.Reader
	p     *progress
	state string
	done  int64
	total int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.done += int64(n)
	c.p.at(c.state, c.done, c.total)
	return n, err
}
