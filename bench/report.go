package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// result is a figure. Ratio is value over the baseline's value; figures in seconds or bytes may have no baseline.
type result struct {
	Name     string  `json:"name"`
	Subject  string  `json:"subject"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline string  `json:"baseline,omitempty"`
	Ratio    float64 `json:"ratio,omitempty"`
	Goal     string  `json:"goal,omitempty"`
	Missed   bool    `json:"missed,omitempty"`
	base     float64
	section  string
	note     string
}

// addFigure records a figure relative to a baseline's value (0: none).
func (b *bench) addFigure(name, subject string, value float64, unit, baseline string, of float64, note string) {
	r := result{Name: name, Subject: subject, Value: round(value), Unit: unit, Baseline: baseline, base: of, note: note,
		section: b.section}
	if of > 0 {
		r.Ratio = round(value / of)
	}
	r.judgeGoal()
	b.results = append(b.results, r)
}

func round(v float64) float64 {
	switch {
	case v >= 1000:
		return float64(int64(v + 0.5))
	case v < 0:
		return -round(-v)
	default:
		return float64(int64(v*1000+0.5)) / 1000
	}
}

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Clone(v)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

func machine() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return fmt.Sprintf("%d cores, kernel %s", runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]))
}

// loadAverage returns the load average of the last minute.
func loadAverage() float64 {
	var i unix.Sysinfo_t
	if unix.Sysinfo(&i) != nil {
		return 0
	}
	return round(float64(i.Loads[0]) / (1 << 16))
}

// printReport writes a table for each section, and in the end the missed goals.
func (b *bench) printReport(w io.Writer) {
	fmt.Fprintf(w, "\n%s; medians of %d rounds; load %.1f before, %.1f now\n", machine(), b.rounds, b.loadBefore,
		loadAverage())
	tw := tabwriter.NewWriter(w, 0, 4, 3, ' ', 0)
	section, with, missed := "", 0, []result{}
	for _, r := range b.results {
		if r.section != section {
			section = r.section
			fmt.Fprintf(tw, "\t\t\t\t\t\t\t\n%s\t\t\t\t\t\t\t\n", section)
			fmt.Fprintln(tw, "FIGURE\tSUBJECT\tVALUE\tUNIT\tRATIO\tTO\tGOAL\tNOTE")
		}
		ratio, goal := "", r.Goal
		if r.Ratio > 0 {
			ratio = fmt.Sprintf("%.2f", r.Ratio)
		}
		if goal != "" {
			with++
		}
		if r.Missed {
			goal += " MISSED"
			missed = append(missed, r)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Name, r.Subject, shortText(r.Value), r.Unit, ratio, r.Baseline,
			goal, r.note)
	}
	_ = tw.Flush()
	fmt.Fprintf(w, "\n%d of %d goals are reached.\n", with-len(missed), with)
	for _, r := range missed {
		said := shortText(r.Value) + " " + r.Unit
		if r.Ratio > 0 {
			said += fmt.Sprintf(", ratio %.2f to %s", r.Ratio, r.Baseline)
		}
		fmt.Fprintf(w, "  missed: %s of %s: %s; the goal is %s\n", r.Name, r.Subject, said, r.Goal)
	}
}

// shortText formats a figure without insignificant digits.
func shortText(v float64) string {
	if v >= 1000 || v <= -1000 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

func (b *bench) writeReport(path string) error {
	report := map[string]any{"machine": machine(), "rounds": b.rounds, "load": []float64{b.loadBefore, loadAverage()},
		"results": b.results}
	out, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, append(out, '\n'), 0o644); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "\nwritten to", path)
	return nil
}
