package api

import (
	"fmt"
	"strconv"
	"strings"
)

// SizeText formats a number of bytes for people, as in the statuses: "512 B", "1.5 GiB".
func SizeText(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, u := float64(n)/1024, 0
	for f >= 1024 && u < len(units)-1 {
		f /= 1024
		u++
	}
	return fmt.Sprintf("%s %ciB", strings.TrimSuffix(fmt.Sprintf("%.1f", f), ".0"), units[u])
}

// CountText formats a number of things for people: "1 disk", "2 disks".
func CountText(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return strconv.Itoa(n) + " " + thing + "s"
}
