// Package progress shows the progress of an operation in one line. The package starts no goroutines.
package progress

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

// Bar shows the progress of an operation: a redrawn line on a terminal, elsewhere a plain line at each change of
// state and each tenth. Bar is safe for concurrent use and has no goroutine; callers trigger the drawing.
type Bar struct {
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
	form    int // of the line, in this state: how many figures gave way to the bar,
	bar     int // and the width of the bar
}

const narrowestBar, widestBar = 8, 40 // columns

// New writes to w, in colour-free text. The label names the object.
func New(w io.Writer, label string) *Bar {
	p := &Bar{w: w, label: label, start: time.Now(), tenth: -1}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.width = 80
		if cols, _, err := term.GetSize(int(f.Fd())); err == nil && cols > 20 {
			p.width = cols
		}
	}
	return p
}

// Show reports done of total bytes (total 0: unknown).
func (p *Bar) Show(state string, done, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	changed := state != p.state
	if changed || done < p.current {
		p.baseAt = time.Time{} // progress after a pause, or from further back, has a new speed
	}
	if changed {
		p.form, p.bar = 0, widestBar
	}
	if p.baseAt.IsZero() && done > 0 {
		p.base, p.baseAt = done, now
	}
	p.state, p.current = state, done
	if p.width > 0 {
		if changed || now.Sub(p.drawn) > 80*time.Millisecond || (total > 0 && done >= total) {
			p.drawn = now
			p.drawLine(done, total)
		}
		return
	}
	tenth := int64(-1)
	if total > 0 {
		tenth = done * 10 / total
	}
	if changed || tenth > p.tenth {
		p.tenth = tenth
		fmt.Fprintln(p.w, p.plainLine(done, total))
	}
}

func (p *Bar) plainLine(done, total int64) string {
	s := p.label + ": " + p.state
	if total > 0 && done > 0 {
		s += fmt.Sprintf(", %d %%, %s of %s", done*100/total, api.SizeText(done), api.SizeText(total))
	}
	return s
}

func (p *Bar) drawLine(done, total int64) {
	p.open = true
	count, rate, rest := "", "", ""
	if total > 0 {
		count = fmt.Sprintf(" %3d %%  %s of %s", done*100/total, api.SizeText(done), api.SizeText(total))
		if d := time.Since(p.baseAt).Seconds(); !p.baseAt.IsZero() && d > 0.3 && done > p.base {
			perSecond := float64(done-p.base) / d
			rate = fmt.Sprintf("  %s/s", api.SizeText(int64(perSecond)))
			if left := float64(total-done) / perSecond; left >= 1 {
				rest = fmt.Sprintf("  %s left", time.Duration(left*float64(time.Second)).Round(time.Second))
			}
		}
	}
	left := fmt.Sprintf("%s  %s ", p.label, p.state)
	text := left + count + rate + rest
	forms := []string{count + rate + rest, count + rest, count} // the bar takes precedence over figures
	for ; total > 0 && p.form < len(forms); p.form++ {
		right := forms[p.form]
		if room := p.width - len(left) - len(right) - 3; room >= narrowestBar {
			p.bar = min(p.bar, room) // the bar never widens, so that changing figures cause no flicker
			full := int(int64(p.bar) * min(done, total) / total)
			text = left + "[" + strings.Repeat("=", full) + strings.Repeat(" ", p.bar-full) + "]" + right
			break
		}
	}
	if len(text) >= p.width {
		text = text[:p.width-1]
	}
	fmt.Fprintf(p.w, "\r%s\x1b[K", text)
}

// Clear erases the line, so that a result or an error stands alone.
func (p *Bar) Clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.open {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.open = false
	}
}

// Write writes whole lines, each on its own.
func (p *Bar) Write(lines []byte) (int, error) {
	p.Clear()
	return p.w.Write(lines)
}
