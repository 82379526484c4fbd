package origin

import (
	"errors"
	"math"
	"strconv"
	"strings"
)

// ParseContentRange reads "bytes 5-9/10"; total is -1 for "*".
func ParseContentRange(s string) (from, to, total int64, ok bool) {
	rest, found := strings.CutPrefix(s, "bytes ")
	span, all, slash := strings.Cut(rest, "/")
	first, last, dash := strings.Cut(span, "-")
	if !found || !slash || !dash {
		return 0, 0, 0, false
	}
	from, err := strconv.ParseInt(first, 10, 64)
	to, lerr := strconv.ParseInt(last, 10, 64)
	total = -1
	var terr error
	if all != "*" {
		total, terr = strconv.ParseInt(all, 10, 64)
	}
	return from, to, total, errors.Join(err, lerr, terr) == nil && from >= 0 && to >= from && to < math.MaxInt64 &&
		(all == "*" || to < total)
}
