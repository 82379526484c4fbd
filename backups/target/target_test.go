package target_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"drover.io/drover/api"
	"drover.io/drover/backups/target"
)

// TestNamesStayInsideTheStore: CheckName accepts the names of a repository and refuses, with kind invalid, names that
// could lead out of a store or that a store could not keep.
func TestNamesStayInsideTheStore(t *testing.T) {
	long := strings.Repeat("a", 255)
	for name, good := range map[string]bool{
		"config":                        true,
		"data/ab/abcd":                  true,
		"backup_1-2.cfg":                true,
		long:                            true,
		"":                              false,
		"/":                             false,
		"/etc/passwd":                   false,
		"a/":                            false,
		"a//b":                          false,
		".":                             false,
		"..":                            false,
		"a/../b":                        false,
		".tmp/a":                        false,
		"a/.b":                          false,
		"a\x00b":                        false,
		"a\\b":                          false,
		"a b":                           false,
		"ü":                             false,
		"\xff":                          false,
		long + "a":                      false,
		long + "/" + long + "/" + "abc": false,
	} {
		if err := target.CheckName(name); (err == nil) != good || !good && !api.Is(err, api.Invalid) {
			t.Errorf("%.40q: %v, want good: %v", name, err, good)
		}
	}
	for prefix, good := range map[string]bool{
		"": true, "data": true, "data/": true, "/": false, "..": false, "a//": false,
	} {
		if err := target.CheckPrefix(prefix); (err == nil) != good {
			t.Errorf("prefix %q: %v, want good: %v", prefix, err, good)
		}
	}
}

// TestObjectsAreBounded: no size is negative, no sum of sizes of a long list is, and every time can be in an object of
// the API server.
func TestObjectsAreBounded(t *testing.T) {
	for _, size := range []int64{math.MinInt64, -1, 0, 5, math.MaxInt64} {
		o := target.NewObject("a", size, time.Unix(1<<60, 0))
		if o.Size < 0 || o.Size > math.MaxInt64>>20 || size == 5 && o.Size != size || o.Modified.Year() > 9999 {
			t.Errorf("%d bytes: %+v", size, o)
		}
	}
}
