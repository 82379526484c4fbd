package api

import "strconv"

// SizeText is a number of bytes for people, as the statuses show it: "512 B", "1.5 GiB".
func SizeText(n int64) string {
	if n < 1024 {
		return strconv.FormatInt(n, 10) + " B"
	}
	v, unit := float64(n)/1024, "KiB"
	for _, u := range []string{"MiB", "GiB", "TiB"} {
		if v < 1024 {
			break
		}
		v, unit = v/1024, u
	}
	prec := 1
	if v == float64(int64(v)) {
		prec = 0
	}
	return strconv.FormatFloat(v, 'f', prec, 64) + " " + unit
}
