package text

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"drover.io/drover/api"
)

// Age returns how long ago t was, for people; of the zero time nothing.
func Age(t metav1.Time) string {
	if t.IsZero() {
		return ""
	}
	return duration.HumanDuration(time.Since(t.Time))
}

// AgeOfText is Age for a time as RFC 3339; a text that is none gives nothing.
func AgeOfText(text string) string {
	at, _ := time.Parse(time.RFC3339, text)
	return Age(metav1.NewTime(at))
}

// AgeOf is Age for a time that may be missing.
func AgeOf(t *metav1.Time) string {
	if t == nil {
		return ""
	}
	return Age(*t)
}

// Seconds formats a duration for people.
func Seconds(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.2f s", d.Seconds())
	}
	return d.Round(100 * time.Millisecond).String()
}

// SomeBytes formats a size for people, and an unknown size (0) as nothing.
func SomeBytes(n int64) string {
	if n == 0 {
		return ""
	}
	return api.SizeText(n)
}

// JoinLabels formats labels for people, in the order of their names.
func JoinLabels(labels map[string]string) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, k+"="+labels[k])
	}
	return strings.Join(all, ", ")
}

// PrintConditions writes a table of conditions, if any.
func PrintConditions(w io.Writer, conds []metav1.Condition) {
	if len(conds) == 0 {
		return
	}
	fmt.Fprintln(w, "\nConditions:")
	rows := make([][]string, 0, len(conds))
	for _, c := range conds {
		rows = append(rows, []string{c.Type, string(c.Status), c.Reason, Age(c.LastTransitionTime), c.Message})
	}
	_ = Table(w, "TYPE STATUS REASON SINCE MESSAGE", rows)
}

// Colon returns s after a colon, or nothing if s is empty.
func Colon(s string) string {
	if s == "" {
		return ""
	}
	return ": " + s
}
