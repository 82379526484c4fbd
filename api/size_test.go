package api

import "testing"

func TestSizeTextHasTheLargestUnit(t *testing.T) {
	const gib = int64(1) << 30
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 10 * gib: "10 GiB",
		1 << 44: "16 TiB", gib + 1: "1 GiB", 1 << 52: "4 PiB"} {
		if got := SizeText(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
