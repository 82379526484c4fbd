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

// result is one figure. Ratio is value over the baseline's; for figures in seconds or bytes there may be no baseline.
type result struct {
	Name     string  `json:"name"`
	Subject  string  `json:"subject"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline string  `json:"baseline,omitempty"`
	Ratio    float64 `json:"ratio,omitempty"`
	note     string
}

// add records a figure relative to a baseline's value (0: none).
func (b *bench) add(name, subject string, value float64, unit, baseline string, of float64, note string) {
	r := result{Name: name, Subject: subject, Value: round(value), Unit: unit, Baseline: baseline, note: note}
	if of > 0 {
		r.Ratio = round(value / of)
	}
	b.results = append(b.results, r)
}

func round(v float64) float64 {
	switch {
	case v >= 1000:
		return float64(int64(v + 0.5))
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

func (b *bench) print(w io.Writer) {
	fmt.Fprintf(w, "\n%s; medians of %d rounds\n\n", machine(), b.rounds)
	tw := tabwriter.NewWriter(w, 0, 4, 3, ' ', 0)
	fmt.Fprintln(tw, "FIGURE\tSUBJECT\tVALUE\tUNIT\tRATIO\tTO\tNOTE")
	for _, r := range b.results {
		ratio := ""
		if r.Ratio > 0 {
			ratio = fmt.Sprintf("%.2f", r.Ratio)
		}
		fmt.Fprintf(tw, "%s\t%s\t%.4g\t%s\t%s\t%s\t%s\n", r.Name, r.Subject, r.Value, r.Unit, ratio, r.Baseline, r.note)
	}
	_ = tw.Flush()
}

func (b *bench) write(path string) error {
	report := map[string]any{"machine": machine(), "rounds": b.rounds, "results": b.results}
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
