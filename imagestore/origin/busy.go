package origin

import (
	"errors"
	"net/http"
	"strconv"
	"time"
)

// maxWait is the longest pause for which a transfer waits for a busy server. After a longer one the importer tries
// again.
const maxWait = 2 * time.Minute

// BusyError is the cause in the errors about a busy server.
type BusyError struct {
	status string
	wait   time.Duration
	asked  bool // the server asked for wait
}

// Busy returns the error for an answer of a busy server, nil for any other answer.
func Busy(resp *http.Response) *BusyError {
	if resp.StatusCode != http.StatusTooManyRequests && resp.StatusCode != http.StatusServiceUnavailable {
		return nil
	}
	wait, asked := retryAfter(resp.Header.Get("Retry-After"), time.Now())
	return &BusyError{resp.Status, wait, asked}
}

func (e *BusyError) Error() string {
	when := ""
	if e.asked {
		when = ", and asks to come again in " + e.wait.Round(time.Second).String()
	}
	return "busy (HTTP " + e.status + ")" + when
}

// Pause returns the wait before the next request: the wait that the server asked for, else otherwise. After a wait
// that is not short, the transfer ends and the importer starts a new one.
func (e *BusyError) Pause(otherwise time.Duration) (wait time.Duration, short bool) {
	if e.asked {
		otherwise = e.wait
	}
	return otherwise, otherwise <= maxWait
}

// Wait returns the wait that the server behind an error asked for, or 0.
func Wait(err error) time.Duration {
	var busy *BusyError
	if errors.As(err, &busy) && busy.asked {
		return busy.wait
	}
	return 0
}

// retryAfter reads a number of seconds or a date.
func retryAfter(s string, now time.Time) (time.Duration, bool) {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second, true
	}
	if t, err := http.ParseTime(s); err == nil {
		return max(t.Sub(now), 0), true
	}
	return 0, false
}
