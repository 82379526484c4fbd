package api

import (
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ByteProgress is the progress of a backup, a copy or a restore in bytes.
type ByteProgress struct {
	BytesDone  int64 `json:"bytesDone,omitempty"`
	BytesTotal int64 `json:"bytesTotal,omitempty"`
	// EstimatedEnd of a running transfer, at the mean rate so far; empty: not known yet.
	EstimatedEnd *metav1.Time `json:"estimatedEnd,omitempty"`
}

// EstimateEnd estimates the end of a transfer at the mean rate since began, when before of the total bytes were done.
// Nil: too little is done to know.
func EstimateEnd(began, now time.Time, before, done, total int64) *metav1.Time {
	if done <= before || done > total || now.Before(began) {
		return nil
	}
	left := float64(now.Sub(began)) * float64(total-done) / float64(done-before)
	if left > float64(longestEstimate) {
		return nil
	}
	end := metav1.NewTime(now.Add(time.Duration(left)).Truncate(time.Second))
	return &end
}

// longestEstimate is the time behind which no end is estimated.
const longestEstimate = 365 * 24 * time.Hour

// Percent is the part of the bytes that is done.
func (p *ByteProgress) Percent() int32 {
	if p.BytesTotal <= 0 {
		return 0
	}
	return int32(100 * min(p.BytesDone, p.BytesTotal) / p.BytesTotal)
}

// Text is "1 GiB of 3 GiB, ends at about TIME", as far as it is known, behind ", "; empty: nothing is known.
func (p *ByteProgress) Text() (text string) {
	if p.BytesTotal > 0 {
		text = fmt.Sprintf(", %s of %s", SizeText(p.BytesDone), SizeText(p.BytesTotal))
	}
	if p.EstimatedEnd != nil {
		text += ", ends at about " + p.EstimatedEnd.UTC().Format(time.RFC3339)
	}
	return text
}
