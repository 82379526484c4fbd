package source

import (
	"errors"
	"net/http"
	"strconv"
	"time"
)

// maxWait is the longest pause that a busy server gets when it asks for one. A longer one is the importer's.
const maxWait = 2 * time.Minute

// BusyError is a server that has no time now. It is the cause in an error that says which one.
type BusyError struct {
	status string
	wait   time.Duration
	told   bool // the server asked for wait
}

// Busy is what an answer says of that; nil: the server is not busy.
func Busy(resp *http.Response) *BusyError {
	if resp.StatusCode != http.StatusTooManyRequests && resp.StatusCode != http.StatusServiceUnavailable {
		return nil
	}
	wait, told := retryAfter(resp.Header.Get("Retry-After"), time.Now())
	return &BusyError{resp.Status, wait, told}
}

func (e *BusyError) Error() string {
	when := ""
	if e.told {
		when = ", and asks to come again in " + e.wait.Round(time.Second).String()
	}
	return "busy (HTTP " + e.status + ")" + when
}

// Pause is how long to wait before the server is asked again: what it asked for, else otherwise. Where that is not
// short the transfer is to end, for its importer to come again.
func (e *BusyError) Pause(otherwise time.Duration) (wait time.Duration, short bool) {
	if e.told {
		otherwise = e.wait
	}
	return otherwise, otherwise <= maxWait
}

// Wait is how long the server behind an error asked to be left alone; 0 where it did not.
func Wait(err error) time.Duration {
	var busy *BusyError
	if errors.As(err, &busy) && busy.told {
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
